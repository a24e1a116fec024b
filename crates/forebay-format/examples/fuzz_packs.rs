//! Reads packs with false tables and damaged chunks, many in a short time. A panic, a tensor or chunk outside of the file, or an error for
//! an undamaged pack ends the program with an error.
//!
//! `cargo run --release -p forebay-format --example fuzz_packs -- INPUTS [SEED] [THREADS]`
//!
//! Overflow checks make it stricter: `CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true`.

#[path = "../../forebay-codec/examples/common/fuzz.rs"]
mod common;
#[path = "../tests/common/small_pack.rs"]
mod small_pack;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use common::Fuzz;
use forebay_format::pack::{parse_pack_bytes, restore_gguf};
use small_pack::{coded, decoded, reseal, small};

fn main() -> ExitCode {
    let Some(fuzz) = Fuzz::from_arguments("fuzz_packs") else { return ExitCode::from(2) };
    let packs = [small().pack, coded().pack];
    fuzz.run(Vec::new, |input, random| {
        let pack = &packs[random.usize(..packs.len())];
        step(pack, input, random).map_err(|wrong| tell(wrong, pack, input)).ok()
    })
}

/// Reads one input, which is made of `pack`. Returns whether its tables were accepted, or what is wrong.
fn step(
    pack: &[u8],
    input: &mut Vec<u8>,
    random: &mut fastrand::Rng,
) -> Result<bool, &'static str> {
    input.clear();
    input.extend(pack);
    let is_damaged = random.u16(..1000) > 0;
    if is_damaged {
        damage(input, random);
    }
    let good = catch_unwind(AssertUnwindSafe(|| read(input))).unwrap_or(Err("a panic"))?;
    if good || is_damaged { Ok(good) } else { Err("an undamaged pack is refused") }
}

/// Reads a pack and decodes its chunks. Returns whether its tables were accepted, or what is wrong with that.
fn read(input: &[u8]) -> Result<bool, &'static str> {
    let Ok(catalog) = parse_pack_bytes(input) else { return Ok(false) };
    let Some(pack) = &catalog.pack else { return Err("no pack") };
    let range = pack.chunks.range();
    let tensors = catalog.tensors().iter();
    let mut extents: Vec<_> = tensors.flat_map(|tensor| tensor.extents()).collect();
    extents.sort();
    let mut with_bytes = extents.iter().filter(|extent| extent.length > 0);
    if with_bytes.any(|extent| pack.chunks.cover(extent.offset, extent.end()).is_none()) {
        return Err("a tensor outside of all chunks");
    }
    if extents.windows(2).any(|pair| pair[0].end() > pair[1].offset) {
        return Err("tensors that share bytes");
    }
    let mut end = (range.start, pack.chunks.stored_range().start);
    for chunk in pack.chunks.chunks(range.start, range.end) {
        if (chunk.offset, chunk.stored_offset) != end || chunk.stored_end() > input.len() as u64 {
            return Err("a chunk that is not where it must be");
        }
        end = (chunk.end(), chunk.stored_end());
    }
    if end != (range.end, input.len() as u64) {
        return Err("chunks that do not fill the pack");
    }
    let _ = decoded(input);
    let _ = restore_gguf(&catalog);
    Ok(true)
}

/// Changes some bytes, and corrects the checksums of the tables in most cases.
fn damage(input: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let field = |input: &[u8], at: usize| {
        let bytes = input[at..at + 8].first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(bytes) as usize
    };
    for _ in 0..random.u32(1..5) {
        if input.len() < 4096 {
            return;
        }
        // The header's fields, the entries of a section, or anything.
        let (start, length) = match random.usize(..8) {
            0 => (0, 200),
            1 => (0, input.len()),
            other => {
                let at = 64 + 32 * (other % 4);
                (field(input, at), field(input, at + 8))
            }
        };
        if length == 0 || start >= input.len() {
            continue;
        }
        let at = start.saturating_add(random.usize(..length)).min(input.len() - 1);
        match random.u8(..8) {
            0..4 => input[at] ^= 1 << random.u8(..8),
            4 => input[at] = random.u8(..),
            5 => input[at] = [0, 1, 2, 0x10, 0x7f, 0xff][random.usize(..6)],
            6 => {
                let small = random.u32(..10_000);
                let word = [0, 1, 4096, 8192, small, u32::MAX, 1 << 31][random.usize(..7)];
                let (from, word) = (at / 4 * 4, word.to_le_bytes());
                let end = input.len().min(from + 4);
                input[from..end].copy_from_slice(&word[..end - from]);
            }
            _ => input.truncate(random.usize(..=input.len() / 4096) * 4096),
        }
    }
    if input.len() >= 4096 && random.u8(..16) > 0 {
        if random.bool() {
            let bytes = input.len() as u64;
            input[16..24].copy_from_slice(&bytes.to_le_bytes());
        }
        reseal(input);
    }
}

/// Prints what is wrong with an input, as its differences from the pack that it was made of.
fn tell(wrong: &str, pack: &[u8], input: &[u8]) {
    let changed = (0..input.len()).filter(|&at| pack.get(at) != input.get(at));
    let changed: Vec<_> = changed.map(|at| (at, input[at])).collect();
    println!("{wrong}: {} of {} bytes, changed {changed:?}", input.len(), pack.len());
}
