//! Memory layout of rows of keys and values for each type, and access to them for kernels.

use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of elements that share a scale.
pub(super) const BLOCK: usize = 32;

/// Elements by type. Scales are stored separately, one half-precision scale for every [`BLOCK`]
/// elements.
pub(super) enum Elements {
    F16(Buffer<u16>),
    F32(Buffer<f32>),
    Q8 {
        codes: Buffer<i8>,
        scales: Buffer<u16>,
    },
    /// Two codes per byte, the first in the low half.
    Q4 {
        codes: Buffer<u8>,
        scales: Buffer<u16>,
    },
}

/// The rows of one head, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum HeadRows<'a> {
    F16(F16Rows<'a>),
    F32(F32Rows<'a>),
    Q8(Q8Rows<'a>),
    Q4(Q4Rows<'a>),
}

/// Evaluates the expression with a [`HeadRows`], or with two of one cache, bound to the rows of the
/// actual type.
macro_rules! with_rows {
    ($rows:ident => $body:expr) => {{
        use $crate::kv::HeadRows;
        match $rows {
            HeadRows::F16($rows) => $body,
            HeadRows::F32($rows) => $body,
            HeadRows::Q8($rows) => $body,
            HeadRows::Q4($rows) => $body,
        }
    }};
    (($keys:ident, $values:ident) => $body:expr) => {{
        use $crate::kv::HeadRows;
        match ($keys, $values) {
            (HeadRows::F16($keys), HeadRows::F16($values)) => $body,
            (HeadRows::F32($keys), HeadRows::F32($values)) => $body,
            (HeadRows::Q8($keys), HeadRows::Q8($values)) => $body,
            (HeadRows::Q4($keys), HeadRows::Q4($values)) => $body,
            _ => unreachable!("a cache has one type"),
        }
    }};
}
use forebay_ops::KvType;
pub(crate) use with_rows;

/// A run of rows that kernels read in vectors of eight elements.
pub(crate) trait Read<'a>: Copy {
    /// Returns rows that are known to be of this type.
    ///
    /// # Panics
    /// Panics if they are of another type.
    fn of(rows: HeadRows<'a>) -> Self;

    /// Returns the `len` vectors from `first` on.
    fn vectors(self, first: usize, len: usize) -> Self;

    /// Loads and widens vector `at`.
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V;
}

type F16Rows<'a> = &'a [[u16; LANES]];
type F32Rows<'a> = &'a [[f32; LANES]];

#[derive(Clone, Copy)]
pub(crate) struct Q8Rows<'a> {
    codes: &'a [[i8; LANES]],
    /// Scales of the head's rows in the block.
    scales: &'a [u16],
    /// Index in the head of the first vector of this run.
    first: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct Q4Rows<'a> {
    codes: &'a [[u8; LANES / 2]],
    scales: &'a [u16],
    first: usize,
}

impl<'a> Read<'a> for F32Rows<'a> {
    #[inline(always)]
    fn of(rows: HeadRows<'a>) -> Self {
        let HeadRows::F32(rows) = rows else { unreachable!("a cache has one type") };
        rows
    }

    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        &self[first..first + len]
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        simd.load(&self[at])
    }
}

impl<'a> Read<'a> for F16Rows<'a> {
    #[inline(always)]
    fn of(rows: HeadRows<'a>) -> Self {
        let HeadRows::F16(rows) = rows else { unreachable!("a cache has one type") };
        rows
    }

    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        &self[first..first + len]
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        simd.load_f16(&self[at])
    }
}

impl<'a> Read<'a> for Q8Rows<'a> {
    #[inline(always)]
    fn of(rows: HeadRows<'a>) -> Self {
        let HeadRows::Q8(rows) = rows else { unreachable!("a cache has one type") };
        rows
    }

    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        Q8Rows { codes: &self.codes[first..first + len], first: self.first + first, ..self }
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        let scale = simd.splat_f16(self.scales[(self.first + at) / (BLOCK / LANES)]);
        simd.mul(simd.load_i8(&self.codes[at]), scale)
    }
}

impl<'a> Read<'a> for Q4Rows<'a> {
    #[inline(always)]
    fn of(rows: HeadRows<'a>) -> Self {
        let HeadRows::Q4(rows) = rows else { unreachable!("a cache has one type") };
        rows
    }

    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        Q4Rows { codes: &self.codes[first..first + len], first: self.first + first, ..self }
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        let scale = simd.splat_f16(self.scales[(self.first + at) / (BLOCK / LANES)]);
        let codes = simd.load_nibbles(&self.codes[at]);
        simd.mul(simd.sub(codes, simd.splat(8.0)), scale)
    }
}

impl Elements {
    /// Reserves `len` elements, a multiple of [`BLOCK`]. Returns `None` if the system refuses the memory.
    pub(super) fn zeroed(kind: KvType, len: usize) -> Option<Elements> {
        let scales = || Buffer::zeroed(len / BLOCK);
        Some(match kind {
            KvType::F16 => Elements::F16(Buffer::zeroed(len)?),
            KvType::F32 => Elements::F32(Buffer::zeroed(len)?),
            KvType::Q8_0 => Elements::Q8 { codes: Buffer::zeroed(len)?, scales: scales()? },
            KvType::Q4_0 => Elements::Q4 { codes: Buffer::zeroed(len / 2)?, scales: scales()? },
        })
    }

    /// Returns the `len` elements from `first` on as rows. Both are whole vectors, and whole blocks for types with
    /// scales.
    #[inline]
    pub(super) fn rows(&self, first: usize, len: usize) -> HeadRows<'_> {
        let (blocks, block_count) = (first / BLOCK, len / BLOCK);
        match self {
            Elements::F16(x) => HeadRows::F16(x.as_slice()[first..][..len].as_chunks().0),
            Elements::F32(x) => HeadRows::F32(x.as_slice()[first..][..len].as_chunks().0),
            Elements::Q8 { codes, scales } => HeadRows::Q8(Q8Rows {
                codes: codes.as_slice()[first..][..len].as_chunks().0,
                scales: &scales.as_slice()[blocks..][..block_count],
                first: 0,
            }),
            Elements::Q4 { codes, scales } => HeadRows::Q4(Q4Rows {
                codes: codes.as_slice()[first / 2..][..len / 2].as_chunks().0,
                scales: &scales.as_slice()[blocks..][..block_count],
                first: 0,
            }),
        }
    }

    /// Writes `row` and its padding to the `stride` elements from `first` on.
    pub(super) fn write(&mut self, cpu: &Cpu, first: usize, stride: usize, row: &[f32]) {
        let blocks = first / BLOCK..(first + stride) / BLOCK;
        match self {
            Elements::F32(x) => x.as_mut_slice()[first..][..row.len()].copy_from_slice(row),
            Elements::F16(x) => {
                let out = &mut x.as_mut_slice()[first..][..stride];
                dispatch(cpu, Narrow { row, out });
            }
            Elements::Q8 { codes, scales } => {
                let codes = &mut codes.as_mut_slice()[first..][..stride];
                let scales = &mut scales.as_mut_slice()[blocks];
                dispatch(cpu, Quantize { row, codes: Codes::Q8(codes), scales });
            }
            Elements::Q4 { codes, scales } => {
                let codes = &mut codes.as_mut_slice()[first / 2..][..stride / 2];
                let scales = &mut scales.as_mut_slice()[blocks];
                dispatch(cpu, Quantize { row, codes: Codes::Q4(codes), scales });
            }
        }
    }

    /// Copies `len` elements.
    pub(super) fn copy(&mut self, from: usize, to: usize, len: usize) {
        let scales = from / BLOCK..(from + len) / BLOCK;
        match self {
            Elements::F16(x) => x.as_mut_slice().copy_within(from..from + len, to),
            Elements::F32(x) => x.as_mut_slice().copy_within(from..from + len, to),
            Elements::Q8 { codes, scales: of } => {
                codes.as_mut_slice().copy_within(from..from + len, to);
                of.as_mut_slice().copy_within(scales, to / BLOCK);
            }
            Elements::Q4 { codes, scales: of } => {
                codes.as_mut_slice().copy_within(from / 2..(from + len) / 2, to / 2);
                of.as_mut_slice().copy_within(scales, to / BLOCK);
            }
        }
    }

    /// Copies `len` elements to `bytes`: elements or codes, then scales.
    pub(super) fn save(&self, first: usize, len: usize, bytes: &mut [u8]) {
        let halves = |bytes: &mut [u8], x: &[u16]| {
            for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
                *bytes = x.to_le_bytes();
            }
        };
        let blocks = first / BLOCK..(first + len) / BLOCK;
        match self {
            Elements::F16(x) => halves(bytes, &x.as_slice()[first..][..len]),
            Elements::F32(x) => {
                let x = &x.as_slice()[first..][..len];
                for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
                    *bytes = x.to_le_bytes();
                }
            }
            Elements::Q8 { codes, scales } => {
                let (to, scales_to) = bytes.split_at_mut(len);
                let codes = &codes.as_slice()[first..][..len];
                to.iter_mut().zip(codes).for_each(|(to, code)| *to = code.cast_unsigned());
                halves(scales_to, &scales.as_slice()[blocks]);
            }
            Elements::Q4 { codes, scales } => {
                let (to, scales_to) = bytes.split_at_mut(len / 2);
                to.copy_from_slice(&codes.as_slice()[first / 2..][..len / 2]);
                halves(scales_to, &scales.as_slice()[blocks]);
            }
        }
    }

    /// Replaces `len` elements by those that [`Elements::save`] wrote.
    pub(super) fn restore(&mut self, first: usize, len: usize, bytes: &[u8]) {
        let halves = |out: &mut [u16], bytes: &[u8]| {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = u16::from_le_bytes(*bytes);
            }
        };
        let blocks = first / BLOCK..(first + len) / BLOCK;
        match self {
            Elements::F16(x) => halves(&mut x.as_mut_slice()[first..][..len], bytes),
            Elements::F32(x) => {
                let out = &mut x.as_mut_slice()[first..][..len];
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            Elements::Q8 { codes, scales } => {
                let out = &mut codes.as_mut_slice()[first..][..len];
                out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte.cast_signed());
                halves(&mut scales.as_mut_slice()[blocks], &bytes[len..]);
            }
            Elements::Q4 { codes, scales } => {
                codes.as_mut_slice()[first / 2..][..len / 2].copy_from_slice(&bytes[..len / 2]);
                halves(&mut scales.as_mut_slice()[blocks], &bytes[len / 2..]);
            }
        }
    }
}

/// Widens as many elements of `rows` as `out` has, whole vectors, from number `first` on.
pub(crate) fn widen(cpu: &Cpu, rows: HeadRows<'_>, first: usize, out: &mut [f32]) {
    with_rows!(rows => {
        let rows = rows.vectors(first / LANES, out.len() / LANES);
        dispatch(cpu, Widen { rows, out });
    });
}

/// Kernel that widens rows.
struct Widen<'a, R> {
    rows: R,
    /// Output, in whole vectors.
    out: &'a mut [f32],
}

impl<'a, R: Read<'a>> Kernel for Widen<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (at, to) in self.out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            simd.store(self.rows.load(simd, at), to);
        }
    }
}

/// Kernel that rounds a row to half precision, including the padding.
struct Narrow<'a> {
    row: &'a [f32],
    out: &'a mut [u16],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (row, rest) = self.row.as_chunks::<LANES>();
        let out = self.out.as_chunks_mut::<LANES>().0;
        for (x, out) in row.iter().zip(&mut *out) {
            simd.store_f16(simd.load(x), out);
        }
        if !rest.is_empty() {
            let mut last = [0.0; LANES];
            last[..rest.len()].copy_from_slice(rest);
            simd.store_f16(simd.load(&last), &mut out[row.len()]);
        }
    }
}

enum Codes<'a> {
    Q8(&'a mut [i8]),
    Q4(&'a mut [u8]),
}

/// Kernel that rounds a row to codes and scales, including the padding. CUDA's `store_row` takes
/// the same steps, so that both devices keep the same bits.
struct Quantize<'a> {
    row: &'a [f32],
    codes: Codes<'a>,
    scales: &'a mut [u16],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let blocks = self.row.chunks(BLOCK).zip(self.scales);
        match self.codes {
            Codes::Q8(codes) => {
                for ((x, scale), codes) in blocks.zip(codes.chunks_exact_mut(BLOCK)) {
                    *scale = quantize_q8(simd, &block_of(x), codes);
                }
            }
            Codes::Q4(codes) => {
                for ((x, scale), codes) in blocks.zip(codes.chunks_exact_mut(BLOCK / 2)) {
                    *scale = quantize_q4(simd, &block_of(x), codes);
                }
            }
        }
    }
}

type Block = [[f32; LANES]; BLOCK / LANES];

/// Copies `x` to a block and pads it with zeroes.
#[inline(always)]
fn block_of(x: &[f32]) -> Block {
    let mut block = [[0.0; LANES]; BLOCK / LANES];
    block.as_flattened_mut()[..x.len()].copy_from_slice(x);
    block
}

/// Returns the largest magnitude.
#[inline(always)]
fn largest_of<S: Simd>(simd: S, block: &Block) -> f32 {
    let zero = simd.splat(0.0);
    let mut largest = zero;
    for x in block {
        let x = simd.load(x);
        largest = simd.max(largest, simd.max(x, simd.sub(zero, x)));
    }
    simd.largest(largest)
}

/// Writes the codes and returns the scale.
#[inline(always)]
fn quantize_q8<S: Simd>(simd: S, block: &Block, codes: &mut [i8]) -> u16 {
    let largest = largest_of(simd, block);
    let inverse = simd.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
    for (x, codes) in block.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        let mut rounded = [0.0; LANES];
        simd.store(simd.round(simd.mul(simd.load(x), inverse)), &mut rounded);
        *codes = rounded.map(|code| code as i8);
    }
    half_bits(simd, largest / 127.0)
}

#[inline(always)]
fn quantize_q4<S: Simd>(simd: S, block: &Block, codes: &mut [u8]) -> u16 {
    let largest = largest_of(simd, block);
    // The first one, if several elements are equally far from 0.
    let extreme = block.as_flattened().iter().find(|x| x.abs() == largest).map_or(0.0, |x| *x);
    let scale = extreme / -8.0;
    let inverse = simd.splat(if scale != 0.0 { 1.0 / scale } else { 0.0 });
    for (x, codes) in block.iter().zip(codes.as_chunks_mut::<{ LANES / 2 }>().0) {
        let mut shifted = [0.0; LANES];
        let code = simd.add(simd.mul(simd.load(x), inverse), simd.splat(8.5));
        simd.store(simd.min(code, simd.splat(15.0)), &mut shifted);
        for (code, pair) in codes.iter_mut().zip(shifted.as_chunks::<2>().0) {
            *code = pair[0] as u8 | (pair[1] as u8) << 4;
        }
    }
    half_bits(simd, scale)
}

#[inline(always)]
fn half_bits<S: Simd>(simd: S, x: f32) -> u16 {
    let mut bits = [0; LANES];
    simd.store_f16(simd.splat(x), &mut bits);
    bits[0]
}
