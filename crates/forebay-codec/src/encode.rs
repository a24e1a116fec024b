//! Encoding of chunks.

#[cfg(target_arch = "x86_64")]
use crate::bits::ByBmi2;
use crate::bits::{ByByte, Moves, equal, gather, write_bitmap};
use crate::blocks::{Ends, split_blocks};
use crate::layout::{HEADER, Header, LEVELS, Layout, bitmap_bytes};
use crate::table::{CODES, SAMPLED, SECOND, THIRD, counts_of, most_frequent};
use crate::{CHUNK_WEIGHTS, CodecError, Isa, Table, Weights};

/// Bytes of a bitmap of a whole chunk.
const BITMAP: usize = CHUNK_WEIGHTS / 8;

/// Appends one chunk with the weights in `bytes`, up to [`CHUNK_WEIGHTS`] of them, to `out`. It has at most
/// [`chunk_bytes_max`](crate::chunk_bytes_max) bytes, and at least eight. The same weights and table give the same bytes.
///
/// # Errors
/// Returns an error if these are no whole weights or blocks, or too many or none.
pub fn encode_chunk(
    weights: impl Into<Weights>,
    table: &Table,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let weights = weights.into();
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx2.is_available() {
        // SAFETY: the processor has the instructions.
        return unsafe { encode_avx2(weights, table, bytes, out) };
    }
    encode::<ByByte>(weights, table, bytes, out)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn encode_avx2(
    weights: Weights,
    table: &Table,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    encode::<ByBmi2>(weights, table, bytes, out)
}

#[inline(always)]
fn encode<M: Moves>(
    weights: Weights,
    table: &Table,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let count = weights.in_chunk(bytes.len())?;
    // Exponents, and the low and high byte of sign and mantissa.
    let mut exponents = [0_u8; CHUNK_WEIGHTS];
    let (mut low, mut high) = ([0_u8; CHUNK_WEIGHTS], [0_u8; CHUNK_WEIGHTS]);
    let parts = exponents.iter_mut().zip(low.iter_mut().zip(&mut high));
    match weights {
        Weights::Plain(float) if float.bytes() == 2 => {
            let all = bytes.as_chunks::<2>().0.iter().zip(parts);
            all.for_each(|(weight, (exponent, rest))| {
                let (of, bits) = float.split(u16::from_le_bytes(*weight));
                (*exponent, *rest.0, *rest.1) = (of, bits as u8, (bits >> 8) as u8);
            });
        }
        Weights::Plain(float) => bytes.iter().zip(parts).for_each(|(weight, (exponent, rest))| {
            let (of, bits) = float.split(u16::from(*weight));
            (*exponent, *rest.0) = (of, bits as u8);
        }),
        Weights::Compact(of) => split_blocks(of, bytes, &mut exponents, &mut low),
    }
    let base = most_frequent(&counts_of(&exponents[..count.min(SAMPLED)]));
    let known = table.exponents(base);
    // Exponents behind the last weight get the first code.
    exponents[count..count.next_multiple_of(8)].fill(known[0]);
    let (mut first_low, mut first_high) = ([0_u8; BITMAP], [0_u8; BITMAP]);
    let (mut later, mut later_count) = ([0_u8; CHUNK_WEIGHTS + 8], 0);
    let eights = exponents.as_chunks::<8>().0[..count.div_ceil(8)].iter();
    for ((eight, low), high) in eights.zip(&mut first_low).zip(&mut first_high) {
        let word = u64::from_le_bytes(*eight);
        let [zero, one, two] = [0, 1, 2].map(|code| equal(word, known[code]));
        let three = !(zero | one | two) & 0x8080_8080_8080_8080;
        (*low, *high) = (gather((one | three) >> 7), gather((two | three) >> 7));
        // Exponents that the first level does not hold.
        let kept = M::compress(word, (three >> 7) * 0xff);
        later[later_count..later_count + 8].copy_from_slice(&kept.to_le_bytes());
        later_count += three.count_ones() as usize;
    }
    let mut code_of = [CODES as u8; 256];
    for (code, exponent) in known.iter().enumerate().rev() {
        code_of[usize::from(*exponent)] = code as u8;
    }
    let (mut second, mut third, mut raw) = (Items::new(), Items::new(), Items::new());
    for exponent in &later[..later_count] {
        let code = code_of[usize::from(*exponent)];
        second.push((code - SECOND as u8).min(3), true);
        third.push(code.wrapping_sub(THIRD as u8), code >= THIRD as u8);
        raw.push(*exponent, usize::from(code) == CODES);
    }

    let follow = [later_count, third.len, raw.len];
    let start = out.len();
    out.resize(start + HEADER, 0);
    let ends = match weights {
        Weights::Plain(_) => 0,
        Weights::Compact(of) => Ends::write(of, bytes, out).bytes(),
    };
    let layout = Layout::of(weights, count, ends, follow);
    out.resize(start + layout.bytes(), 0);
    let chunk = &mut out[start..];
    Header { base, follow }.write(chunk);
    let rest = weights.rest_bits();
    let bits_of = if rest >= 8 { &high } else { &low };
    if rest >= 8 {
        chunk[layout.rest_bytes.clone()][..count].copy_from_slice(&low[..count]);
    }
    let mut bitmaps = |range: std::ops::Range<usize>, items: &[u8], all: usize| {
        let bytes = bitmap_bytes(all);
        if bytes == 0 {
            return;
        }
        for (bit, bitmap) in chunk[range].chunks_exact_mut(bytes).enumerate() {
            write_bitmap(items, bit as u32, bitmap);
        }
    };
    bitmaps(layout.rest_bits.clone(), &bits_of[..count], count);
    bitmaps(layout.second.clone(), second.get(), follow[0]);
    bitmaps(layout.third.clone(), third.get(), follow[1]);
    let (low_bits, high_bits) = chunk[layout.first].split_at_mut(bitmap_bytes(count));
    low_bits.copy_from_slice(&first_low[..low_bits.len()]);
    high_bits.copy_from_slice(&first_high[..high_bits.len()]);
    chunk[layout.raw][..raw.len].copy_from_slice(raw.get());
    Ok(())
}

/// Up to [`CHUNK_WEIGHTS`] bytes.
struct Items {
    bytes: [u8; CHUNK_WEIGHTS],
    len: usize,
}

impl Items {
    fn new() -> Items {
        Items { bytes: [0; CHUNK_WEIGHTS], len: 0 }
    }

    /// Adds a byte if `is_kept`. No branch, because it would often be predicted wrongly.
    #[inline(always)]
    fn push(&mut self, byte: u8, is_kept: bool) {
        self.bytes[self.len] = byte;
        self.len += usize::from(is_kept);
    }

    fn get(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

const _: () =
    assert!(LEVELS == 3 && CODES == THIRD + 15, "a code of the third level has four bits");

#[cfg(test)]
mod tests {
    use super::*;

    /// What is encoded must not depend on the processor.
    #[test]
    fn all_processors_write_the_same_bytes() {
        let mut bytes = vec![0; 2 * CHUNK_WEIGHTS];
        let mut random = fastrand::Rng::with_seed(5);
        for weights in Weights::ALL {
            for spread in [1, 40, 255] {
                bytes.iter_mut().for_each(|byte| *byte = random.u8(..=spread));
                for count in [1, 7, 8, 31, 33, 1000, 2048, CHUNK_WEIGHTS] {
                    let bytes = &bytes[..weights.bytes_of(count)];
                    if bytes.is_empty() {
                        continue;
                    }
                    let table = Table::of(weights, bytes).unwrap();
                    let (mut own, mut portable) = (vec![1, 2], vec![1, 2]);
                    encode_chunk(weights, &table, bytes, &mut own).unwrap();
                    encode::<ByByte>(weights, &table, bytes, &mut portable).unwrap();
                    assert_eq!(own, portable, "{weights:?}, {count} weights");
                }
            }
        }
    }
}
