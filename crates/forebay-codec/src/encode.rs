//! Encoding of chunks: the same bytes on every processor.

use crate::blocks::Ends;
use crate::layout::{HEADER, Header, LEVELS, Layout, bitmap_bytes};
#[cfg(target_arch = "x86_64")]
use crate::steps::{Avx2, Avx512};
use crate::steps::{Bytes, Eights, NO_BYTES, Steps, split_blocks};
use crate::table::{CODES, SAMPLED, SECOND, THIRD, counts_of, most_frequent};
use crate::{CodecError, Float, Isa, Table, Weights, chunk_bytes_max};

/// Code of the third level for exponents that no level has.
const RAW: u8 = 15;

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
    encode_chunk_with(Isa::best(), weights, table, bytes, out)
}

/// Encodes like [`encode_chunk`] with the instructions of `isa`.
///
/// # Errors
/// Returns the errors of [`encode_chunk`].
///
/// # Panics
/// Panics if the processor has no such instructions.
pub fn encode_chunk_with(
    isa: Isa,
    weights: impl Into<Weights>,
    table: &Table,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    encode_with_base(isa, weights.into(), table, None, bytes, out)
}

/// Encodes like [`encode_chunk_with`]. `base` is the most frequent of the first exponents, if the caller knows it.
pub(crate) fn encode_with_base(
    isa: Isa,
    weights: Weights,
    table: &Table,
    base: Option<u8>,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    assert!(isa.is_available(), "{isa:?} on a processor without it");
    let chunk = Plain { weights, table, base, count: weights.in_chunk(bytes.len())?, bytes };
    match isa {
        Isa::Portable => chunk.encode::<Eights>(out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx2 => unsafe { encode_avx2(&chunk, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx512 => unsafe { encode_avx512(&chunk, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("it is not available"),
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn encode_avx2(chunk: &Plain<'_>, out: &mut Vec<u8>) {
    chunk.encode::<Avx2>(out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
fn encode_avx512(chunk: &Plain<'_>, out: &mut Vec<u8>) {
    chunk.encode::<Avx512>(out);
}

/// A chunk before encoding.
struct Plain<'a> {
    weights: Weights,
    table: &'a Table,
    base: Option<u8>,
    count: usize,
    bytes: &'a [u8],
}

impl Plain<'_> {
    #[inline(always)]
    fn encode<S: Steps>(&self, out: &mut Vec<u8>) {
        let (weights, count) = (self.weights, self.count);
        let start = out.len();
        out.reserve(chunk_bytes_max(weights, count));
        out.resize(start + HEADER, 0);
        let ends = match weights {
            Weights::Plain(_) => 0,
            Weights::Compact(of) => Ends::write(of, self.bytes, out).bytes(),
        };
        // Places of a level depend only on the numbers of items of the levels before.
        let layout = |follow| Layout::of(weights, count, ends, follow);
        out.resize(start + layout([count; LEVELS]).bytes(), 0);
        let chunk = &mut out[start..];

        let mut exponents = NO_BYTES;
        let all = layout([0; LEVELS]);
        self.split::<S>(&all, &mut exponents, chunk);
        let base = self.base.unwrap_or_else(|| base_of(&exponents[..count]));
        let known = self.table.exponents(base);
        let [first, second] =
            [0, SECOND].map(|code| [known[code], known[code + 1], known[code + 2]]);

        // Exponents behind the last item get the first code.
        exponents[count..count.next_multiple_of(64)].fill(first[0]);
        let mut follow = [0; LEVELS];
        let mut later = NO_BYTES;
        let maps = chunk[all.first].split_at_mut(bitmap_bytes(count));
        follow[0] = S::level(&exponents, first, maps, &mut later);
        later[follow[0]..follow[0].next_multiple_of(64)].fill(second[0]);
        let mut last = NO_BYTES;
        let maps = chunk[layout(follow).second].split_at_mut(bitmap_bytes(follow[0]));
        follow[1] = S::level(&later, second, maps, &mut last);

        let third = layout(follow).third;
        let mut code_of = [RAW; 256];
        for (code, exponent) in known[THIRD..].iter().enumerate() {
            code_of[usize::from(*exponent)] = code as u8;
        }
        let mut codes = NO_BYTES;
        let raw = &mut chunk[third.end..];
        for (exponent, code) in last[..follow[1]].iter().zip(&mut codes) {
            *code = code_of[usize::from(*exponent)];
            // No branch, because it would often be predicted wrongly. What is written too much is overwritten or cut off.
            if let Some(raw) = raw.get_mut(follow[2]) {
                *raw = *exponent;
            }
            follow[2] += usize::from(*code == RAW);
        }
        let layout = layout(follow);
        chunk[layout.raw.start + follow[2]..layout.raw.end].fill(0);
        bitmaps::<S>(&codes, follow[1], &mut chunk[third]);
        Header { base, follow }.write(chunk);
        out.truncate(start + layout.bytes());
    }

    /// Takes the weights apart, and writes their other bits.
    #[inline(always)]
    fn split<S: Steps>(&self, layout: &Layout, exponents: &mut Bytes, chunk: &mut [u8]) {
        let (bytes, count) = (self.bytes, self.count);
        let (mut bits, maps) = (NO_BYTES, layout.rest_bits.clone());
        match self.weights {
            Weights::Plain(float @ Float::Bf16) => {
                let rest = chunk[layout.rest_bytes.clone()].iter_mut();
                split_two(float, bytes, exponents.iter_mut().zip(rest), |rest, of| {
                    *rest = of as u8
                });
            }
            Weights::Plain(float @ Float::F16) => {
                let rest = chunk[layout.rest_bytes.clone()].iter_mut().zip(&mut bits);
                split_two(float, bytes, exponents.iter_mut().zip(rest), |(low, high), of| {
                    (*low, *high) = (of as u8, (of >> 8) as u8);
                });
                bitmaps::<S>(&bits, count, &mut chunk[maps]);
            }
            Weights::Plain(float @ Float::F8E4M3) => {
                split_one(float, bytes, exponents, &mut bits);
                bitmaps::<S>(&bits, count, &mut chunk[maps]);
            }
            Weights::Plain(float @ Float::F8E5M2) => {
                split_one(float, bytes, exponents, &mut bits);
                bitmaps::<S>(&bits, count, &mut chunk[maps]);
            }
            Weights::Compact(of) => {
                split_blocks::<S>(of, bytes, exponents, &mut chunk[layout.rest_bytes.clone()]);
            }
        }
    }
}

/// Writes the bitmaps of the bits of `count` bytes, from the lowest on, as many as there is room for.
#[inline(always)]
fn bitmaps<S: Steps>(bytes: &Bytes, count: usize, to: &mut [u8]) {
    let maps = to.chunks_exact_mut(bitmap_bytes(count).max(1));
    (0..).zip(maps).for_each(|(bit, bitmap)| S::bitmap(bytes, bit, bitmap));
}

/// Takes weights of two bytes apart.
#[inline(always)]
fn split_two<'a, R>(
    float: Float,
    weights: &[u8],
    to: impl Iterator<Item = (&'a mut u8, R)>,
    put: impl Fn(R, u16),
) {
    for (weight, (exponent, rest)) in weights.as_chunks::<2>().0.iter().zip(to) {
        let (of, bits) = float.split(u16::from_le_bytes(*weight));
        *exponent = of;
        put(rest, bits);
    }
}

/// Takes weights of one byte apart.
#[inline(always)]
fn split_one(float: Float, weights: &[u8], exponents: &mut Bytes, rest: &mut Bytes) {
    for ((weight, exponent), rest) in weights.iter().zip(exponents).zip(rest) {
        let (of, bits) = float.split(u16::from(*weight));
        (*exponent, *rest) = (of, bits as u8);
    }
}

/// Returns the base of a chunk with these exponents.
fn base_of(exponents: &[u8]) -> u8 {
    most_frequent(&counts_of(&exponents[..exponents.len().min(SAMPLED)]))
}

const _: () = assert!(
    LEVELS == 3 && CODES == THIRD + RAW as usize,
    "a code of the third level has four bits"
);
