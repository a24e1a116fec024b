//! Memory layout of rows of keys and values for each type, and access to them for kernels.

use super::KvType;
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of elements that share a scale.
pub(super) const BLOCK: usize = 32;

/// Rows of keys or values as `[kv_heads, rows, stride]`.
pub(super) struct Plane {
    elements: Elements,
    rows: usize,
    /// Number of elements in a row that hold data.
    dim: usize,
    /// Number of elements from one row to the next.
    stride: usize,
}

/// Elements by type. Scales are stored separately, one half-precision scale for every [`BLOCK`]
/// elements.
enum Elements {
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
pub(crate) use with_rows;

/// A run of rows that kernels read in vectors of eight elements.
pub(crate) trait Read: Copy {
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
    /// Scales of the whole head.
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

impl Read for F32Rows<'_> {
    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        &self[first..first + len]
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        simd.load(&self[at])
    }
}

impl Read for F16Rows<'_> {
    #[inline(always)]
    fn vectors(self, first: usize, len: usize) -> Self {
        &self[first..first + len]
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, at: usize) -> S::V {
        simd.load_f16(&self[at])
    }
}

impl Read for Q8Rows<'_> {
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

impl Read for Q4Rows<'_> {
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

impl Plane {
    /// Reserves the rows. Returns `None` if the system refuses the memory.
    pub(super) fn new(kind: KvType, heads: usize, rows: usize, dim: usize) -> Option<Plane> {
        let stride = kind.padded(dim)?;
        let len = heads.checked_mul(rows)?.checked_mul(stride)?;
        let scales = || Buffer::zeroed(len / BLOCK);
        let elements = match kind {
            KvType::F16 => Elements::F16(Buffer::zeroed(len)?),
            KvType::F32 => Elements::F32(Buffer::zeroed(len)?),
            KvType::Q8_0 => Elements::Q8 { codes: Buffer::zeroed(len)?, scales: scales()? },
            KvType::Q4_0 => Elements::Q4 { codes: Buffer::zeroed(len / 2)?, scales: scales()? },
        };
        Some(Plane { elements, rows, dim, stride })
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn head(&self, head: usize) -> HeadRows<'_> {
        let len = self.rows * self.stride;
        let (first, blocks) = (head * len, head * len / BLOCK);
        match &self.elements {
            Elements::F16(x) => HeadRows::F16(x.as_slice()[first..][..len].as_chunks().0),
            Elements::F32(x) => HeadRows::F32(x.as_slice()[first..][..len].as_chunks().0),
            Elements::Q8 { codes, scales } => HeadRows::Q8(Q8Rows {
                codes: codes.as_slice()[first..][..len].as_chunks().0,
                scales: &scales.as_slice()[blocks..][..len / BLOCK],
                first: 0,
            }),
            Elements::Q4 { codes, scales } => HeadRows::Q4(Q4Rows {
                codes: codes.as_slice()[first / 2..][..len / 2].as_chunks().0,
                scales: &scales.as_slice()[blocks..][..len / BLOCK],
                first: 0,
            }),
        }
    }

    /// Writes `x` `[tokens, heads, dim]` at `position`.
    pub(super) fn write(&mut self, cpu: &Cpu, heads: usize, position: usize, x: &[f32]) {
        if x.is_empty() {
            return;
        }
        let (rows, dim, stride) = (self.rows, self.dim, self.stride);
        for (at, row) in x.chunks_exact(dim).enumerate() {
            let (token, head) = (at / heads, at % heads);
            let first = (head * rows + (position + token) % rows) * stride;
            let blocks = first / BLOCK..(first + stride) / BLOCK;
            match &mut self.elements {
                Elements::F32(x) => x.as_mut_slice()[first..][..dim].copy_from_slice(row),
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
    }

    /// Returns the row of `position`, widened.
    pub(super) fn read(&self, cpu: &Cpu, head: usize, position: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.stride];
        let (vectors, rows) = (self.stride / LANES, self.head(head));
        let at = position % self.rows * vectors;
        with_rows!(rows => {
            dispatch(cpu, Widen { rows: rows.vectors(at, vectors), out: &mut out });
        });
        out.truncate(self.dim);
        out
    }
}

/// Kernel that widens rows.
pub(crate) struct Widen<'a, R> {
    pub rows: R,
    /// Output, in whole vectors.
    pub out: &'a mut [f32],
}

impl<R: Read> Kernel for Widen<'_, R> {
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
