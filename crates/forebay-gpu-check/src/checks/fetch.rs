//! Experts that recorded work asks the host for: what is copied, what the tables say afterwards.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use forebay_cuda::{
    DeviceMemory, DevicePtr, ExpertAnswer, ExpertFetch, ExpertMailbox, ExpertMiss, ExpertReturn,
    Pinned,
};
use forebay_store::{Arena, SlotBuffer};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// How long an answer may take on an emulated device.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn checks() -> Vec<Check> {
    let check = |name: &str, sizes, shifts| {
        Check::new(name, move |context| fetched(context, sizes, shifts))
    };
    vec![
        check("fetch aligned experts", [4096, 48, 70_000], [0, 16, 32]),
        check("fetch experts from odd addresses", [1003, 33, 40_001], [1, 6, 15]),
        check("fetch experts from multiples of four", [64, 15, 8196], [4, 8, 12]),
    ]
}

pub fn benches() -> Vec<Bench> {
    let blocks = [4, 8, 16, 32, 64, 128];
    let bench = |(misses, shift, blocks)| {
        let name = format!("fetch {misses} experts of 2.9 MB, shift {shift}, {blocks} blocks");
        Bench::new(name, move |context| bench(context, misses, shift, blocks))
    };
    let back = |(shift, blocks)| {
        let name = format!("fetch 4 experts of 2.9 MB and 4 back, shift {shift}, {blocks} blocks");
        Bench::new(name, move |context| bench_both_ways(context, shift, blocks))
    };
    let both_ways = [(0, 16), (0, 32), (0, 64), (4, 16), (4, 32)].map(back);
    let aligned = blocks.map(|blocks| (4, 0, blocks));
    let others = [(1, 0, 8), (1, 0, 16), (1, 0, 32), (4, 4, 16), (4, 1, 16)];
    aligned.into_iter().chain(others).map(bench).chain(both_ways).collect()
}

/// Pinned memory of random bytes.
struct Source {
    // Before what it pins.
    pinned: Pinned,
    slot: SlotBuffer,
}

impl Source {
    fn new(context: &Context, bytes: usize) -> Result<Source> {
        let arena = Arena::reserve(bytes)?;
        let mut slot = arena.carve(bytes)?;
        let mut random = Random::new(11);
        for chunk in slot.as_mut_slice().chunks_mut(4) {
            chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
        }
        let pinned = context.gpu.pin(arena.addresses(), arena.clone())?;
        Ok(Source { pinned, slot })
    }

    fn address(&self, at: usize) -> u64 {
        self.pinned.device_address(&self.slot.as_slice()[at])
    }
}

/// What a kernel and its host need.
struct Desk {
    mailbox: ExpertMailbox,
    words: DeviceMemory,
    _desk: DeviceMemory,
    _x: DeviceMemory,
    tables: DeviceMemory,
    fetch: ExpertFetch,
}

const EXPERTS: usize = 24;
/// Number of the layer's first expert in the tables.
const FIRST: usize = 16;
const K: usize = 3;
/// What goes to the host with a question.
const STATE: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

impl Desk {
    fn new(context: &Context, k: usize, parts: [(u64, u64); 3], blocks: u32) -> Result<Desk> {
        let gpu = &context.gpu;
        // `now` [2], tickets [2], ids [k], forced [k], slots [k].
        let words = gpu.allocate_with(&vec![0_u32; 4 + 4 * k + 1])?;
        let tables = gpu.allocate_with(&[0_u64; EXPERTS])?;
        let desk = gpu.allocate_with(&vec![0_u32; ExpertFetch::desk_words(k)])?;
        let x = context.upload(&STATE)?;
        let at = |word: usize| words.ptr::<u32>().offset(word);
        let fetch = ExpertFetch {
            now: at(0),
            tickets: at(2),
            desk: desk.ptr(),
            x: x.ptr(),
            slots: at(4).cast(),
            ids: at(4 + 2 * k),
            forced: at(4 + 3 * k),
            k,
            tables: tables.ptr(),
            first: FIRST,
            parts,
            blocks,
        };
        let mailbox = ExpertMailbox::new(gpu, 2, k, STATE.len())?;
        Ok(Desk { mailbox, words, _desk: desk, _x: x, tables, fetch })
    }

    fn upload(&self, context: &Context, run: u32, ids: &[u32], forced: &[u32]) -> Result<()> {
        let gpu = &context.gpu;
        gpu.upload(&[run, u32::from(!forced.is_empty())], self.fetch.now)?;
        gpu.upload(ids, self.fetch.ids)?;
        Ok(gpu.upload(forced, self.fetch.forced)?)
    }
}

/// The rows after a run: the last one's first is what the host computed, nobody has written the others.
fn rows_of(run: u32, rows: &[f32]) -> Outcome {
    let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let (first, others) = rows.split_at(STATE.len());
    let all_nan = others.iter().all(|x| x.is_nan());
    let outcome = Outcome::same(&[all_nan], &[true]).at("other rows");
    match run {
        3 => outcome.worse(Outcome::same(&bits(first), &bits(&STATE.map(|x| 10.0 * x))).at("row")),
        _ => outcome,
    }
}

/// Three tokens: misses, all there, and forced ones of which one goes, back to pinned memory, and one is somebody else's.
fn fetched(context: &Context, bytes: [usize; 3], shifts: [usize; 3]) -> Result<Outcome> {
    let gpu = &context.gpu;
    let source = Source::new(context, 1 << 20)?;
    let mut before = source.slot.as_slice().to_vec();
    // A byte beside each part must stay as it is.
    let mut offsets = [0; 3];
    for part in 1..3 {
        offsets[part] = (offsets[part - 1] + bytes[part - 1] + 1).next_multiple_of(16);
    }
    let slot_bytes = (offsets[2] + bytes[2] + 1).next_multiple_of(16);
    let memory = gpu.allocate(4 * slot_bytes)?;
    gpu.fill(memory.ptr(), 0xa5, 4 * slot_bytes)?;
    let parts = [0, 1, 2].map(|part| (offsets[part] as u64, bytes[part] as u64));
    let mut desk = Desk::new(context, K, parts, 3)?;
    let slot = |number: usize| memory.ptr::<u8>().offset(number * slot_bytes);
    let from =
        |number: usize| [0, 1, 2].map(|part| 256 * (100 * part + 10 * number) + shifts[part]);
    let miss = |number: usize, stays_as: Option<u32>| ExpertMiss {
        stays_as,
        to: slot(number),
        from: from(number).map(|at| source.address(at)),
    };
    // Back to other odd addresses, and as if it were of another layer: a little smaller.
    let back = |part: usize| 300_001 + 100_000 * part + 3 * shifts[part];
    let back_bytes = |part: usize| bytes[part] - part;
    let rows = context.poisoned(K * STATE.len())?;
    let mut slots_held: [Option<usize>; 4] = [None; 4];
    let mut table = [0_u64; EXPERTS];
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    for run in 1..=3 {
        let (ids, forced): ([u32; K], &[u32]) = match run {
            1 => ([5, 0, 7], &[]),
            2 => ([5, 0, 5], &[]),
            _ => ([1, 2, 3], &[7, 1, 5]),
        };
        let chosen = if forced.is_empty() { ids } else { [forced[0], forced[1], forced[2]] };
        desk.upload(context, run, &ids, forced)?;
        gpu.fetch_experts(&desk.fetch, &desk.mailbox, 1)?;
        gpu.take_rows(&desk.fetch, &desk.mailbox, 1, rows.ptr())?;
        let mut asked = [0; K];
        let began = Instant::now();
        let is_waiting = loop {
            if let Some(is_waiting) = desk.mailbox.question(1, run, &mut asked) {
                break is_waiting;
            }
            ensure!(began.elapsed() < PATIENCE, "run {run}: no question came");
        };
        outcome = outcome.worse(Outcome::same(&asked, &chosen).at("asked for"));
        outcome = outcome.worse(Outcome::same(&[is_waiting], &[run != 2]).at("waits"));
        let at = |id: u32| FIRST + id as usize;
        let slots = match run {
            1 => {
                let misses =
                    [miss(0, Some(at(5) as u32)), miss(1, Some(at(0) as u32)), miss(2, None)];
                let slots = [slot(0), slot(1), slot(2)];
                let (gone, returns) = (&[], &[]);
                let answer = ExpertAnswer { slots: &slots, misses: &misses, gone, returns };
                desk.mailbox.answer(1, run, &answer);
                (table[at(5)], table[at(0)]) = (slot(0).address(), slot(1).address());
                slots_held = [Some(0), Some(1), Some(2), None];
                slots
            }
            2 => [slot(0), slot(1), slot(0)],
            _ => {
                let slots = [DevicePtr::null(), slot(3), slot(0)];
                let (misses, gone) = ([miss(3, Some(at(1) as u32))], [at(0) as u32]);
                let returns = [ExpertReturn {
                    from: offsets.map(|offset| slot(1).offset(offset)),
                    to: [0, 1, 2].map(|part| source.address(back(part))),
                    bytes: [0, 1, 2].map(|part| back_bytes(part) as u32),
                }];
                let (misses, gone, returns) = (&misses, &gone, &returns);
                desk.mailbox.answer(1, run, &ExpertAnswer { slots: &slots, misses, gone, returns });
                (table[at(1)], table[at(0)]) = (slot(3).address(), 0);
                slots_held[3] = Some(3);
                // Somebody else's.
                let mut x = [0.0; STATE.len()];
                desk.mailbox.read_state(&mut x);
                outcome = outcome.worse(Outcome::same(&x, &STATE).at("state"));
                desk.mailbox.write_row(0, &x.map(|x| 10.0 * x));
                desk.mailbox.rows_are_there(1, run);
                slots
            }
        };
        gpu.synchronize()?;
        let got: Vec<u64> = gpu.download(desk.fetch.slots, K)?;
        outcome = outcome.worse(Outcome::same(&got, &slots.map(DevicePtr::address)).at("slots"));
        let got: Vec<u64> = gpu.download(desk.tables.ptr(), EXPERTS)?;
        outcome = outcome.worse(Outcome::same(&got, &table).at("tables"));
        let got: Vec<u32> = gpu.download(desk.words.ptr::<u32>().offset(2), 2)?;
        outcome = outcome.worse(Outcome::same(&got, &[0, 0]).at("tickets"));
        let got: Vec<f32> = gpu.download(rows.ptr(), K * STATE.len())?;
        outcome = outcome.worse(rows_of(run, &got));
        let got: Vec<u8> = gpu.download(memory.ptr(), 4 * slot_bytes)?;
        let mut expected = vec![0xa5; 4 * slot_bytes];
        for number in slots_held.into_iter().flatten() {
            for (part, at) in from(number).into_iter().enumerate() {
                let to = number * slot_bytes + offsets[part];
                expected[to..to + bytes[part]]
                    .copy_from_slice(&source.slot.as_slice()[at..][..bytes[part]]);
            }
        }
        outcome = outcome.worse(Outcome::same(&got, &expected).at(&format!("run {run}")));
    }
    for (part, at) in from(1).into_iter().enumerate() {
        let (to, bytes) = (back(part), back_bytes(part));
        before.copy_within(at..at + bytes, to);
    }
    Ok(outcome.worse(Outcome::same(source.slot.as_slice(), &before).at("what went back")))
}

fn bench(context: &Context, misses: usize, shift: usize, blocks: u32) -> Result<Measured> {
    bench_ways(context, (misses, 0), shift, blocks)
}

fn bench_both_ways(context: &Context, shift: usize, blocks: u32) -> Result<Measured> {
    bench_ways(context, (4, 4), shift, blocks)
}

/// The bytes of one way count.
fn bench_ways(
    context: &Context,
    (misses, back): (usize, usize),
    shift: usize,
    blocks: u32,
) -> Result<Measured> {
    const PART: usize = 983_040;
    let gpu = &context.gpu;
    let source = Source::new(context, 96 << 20)?;
    let memory = gpu.allocate(8 * 3 * PART)?;
    let parts = [0, 1, 2].map(|part| (part * PART as u64, PART as u64));
    let mut desk = Desk::new(context, K + 1, parts, blocks)?;
    desk.upload(context, 1, &[0; K + 1], &[])?;
    let slots = [0, 1, 2, 3].map(|number| memory.ptr::<u8>().offset(number * 3 * PART));
    let miss = |(number, &to): (usize, &DevicePtr<u8>)| ExpertMiss {
        stays_as: None,
        to,
        from: [0, 1, 2].map(|part| source.address((3 * number + part) << 21 | shift)),
    };
    let all: Vec<ExpertMiss> = slots.iter().enumerate().map(miss).take(misses).collect();
    let goes = |number: usize| ExpertReturn {
        from: [0, 1, 2].map(|part| memory.ptr::<u8>().offset((3 * (4 + number) + part) * PART)),
        to: [0, 1, 2].map(|part| source.address((3 * (4 + number) + part) << 21 | shift)),
        bytes: [PART as u32; 3],
    };
    let returns: Vec<ExpertReturn> = (0..back).map(goes).collect();
    let answer = ExpertAnswer { slots: &slots, misses: &all, gone: &[], returns: &returns };
    desk.mailbox.answer(0, 1, &answer);
    let seconds = median_seconds(context, |_| gpu.fetch_experts(&desk.fetch, &desk.mailbox, 0))?;
    Ok(Measured { seconds, bytes: (misses * 3 * PART) as f64, flops: 0.0 })
}
