//! Activations in the forms that the kernels read.

use forebay_format::TensorType;

use super::aligned::AlignedVec;
use super::quantize::{LARGE, QuantizedRow, SMALL, SUM, quantize_row};
use super::types::{ActivationForm, activation_form};
use crate::cpu::{Arithmetic, Cpu, Isa};

/// Slack at the end of each buffer, in elements: vector kernels may read, and then ignore, that
/// many elements behind a row.
const SLACK: usize = 64;

/// The left operand of matrix products: `[tokens, cols]` numbers, in F32 and in the rounded forms
/// that the weight types at hand need. Reused from layer to layer; it keeps its memory.
#[derive(Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    has_floats: bool,
    floats: AlignedVec<f32>,
    small: Quantized,
    large: Quantized,
}

/// All tokens in one of the 8-bit forms.
#[derive(Default)]
struct Quantized {
    valid: bool,
    codes: AlignedVec<i8>,
    scales: AlignedVec<f32>,
    sums16: AlignedVec<i16>,
    sums32: AlignedVec<i16>,
}

/// One token in one of the 8-bit forms; see [`QuantizedRow`].
#[derive(Clone, Copy)]
pub(crate) struct Rounded<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scales: &'a [f32],
    pub(crate) sums16: &'a [i16],
    pub(crate) sums32: &'a [i16],
}

impl Activations {
    /// An empty buffer.
    pub fn new() -> Activations {
        Activations::default()
    }

    /// Takes over `x`, `[tokens, cols]`, in the forms that products with weights of `types` need.
    ///
    /// # Panics
    /// When `x` is not `tokens * cols` long.
    pub fn prepare(
        &mut self,
        cpu: &Cpu,
        x: &[f32],
        tokens: usize,
        cols: usize,
        types: &[TensorType],
    ) {
        assert_eq!(x.len(), tokens * cols, "activations are [tokens, cols]");
        let form = |ty: &TensorType| match cpu.arithmetic() {
            Arithmetic::Exact => ActivationForm::Float,
            Arithmetic::Fast => activation_form(*ty),
        };
        (self.tokens, self.cols) = (tokens, cols);
        let needs = |wanted| types.iter().any(|ty| form(ty) == wanted);
        self.has_floats = needs(ActivationForm::Float);
        if self.has_floats {
            self.floats.first(x.len() + SLACK)[..x.len()].copy_from_slice(x);
        }
        // A row that does not divide into blocks meets no type of such blocks.
        self.small.valid = needs(ActivationForm::Small) && cols.is_multiple_of(SMALL);
        self.large.valid = needs(ActivationForm::Large) && cols.is_multiple_of(LARGE);
        if self.small.valid {
            self.small.fill::<SMALL>(cpu, x, cols);
        }
        if self.large.valid {
            self.large.fill::<LARGE>(cpu, x, cols);
        }
    }

    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether `prepare` made the form.
    pub(crate) fn has(&self, form: ActivationForm) -> bool {
        match form {
            ActivationForm::Float => self.has_floats,
            ActivationForm::Small => self.small.valid,
            ActivationForm::Large => self.large.valid,
        }
    }

    /// One token in F32.
    pub(crate) fn floats(&self, token: usize) -> &[f32] {
        &self.floats.as_slice()[token * self.cols..][..self.cols]
    }

    /// One token with a scale for every 32 elements.
    pub(crate) fn small(&self, token: usize) -> Rounded<'_> {
        self.small.row::<SMALL>(token, self.cols)
    }

    /// One token with a scale for every 256 elements.
    pub(crate) fn large(&self, token: usize) -> Rounded<'_> {
        self.large.row::<LARGE>(token, self.cols)
    }
}

impl Quantized {
    fn row<const BLOCK: usize>(&self, token: usize, cols: usize) -> Rounded<'_> {
        let part = |each: usize| token * (cols / each)..(token + 1) * (cols / each);
        Rounded {
            codes: &self.codes.as_slice()[part(1)],
            scales: &self.scales.as_slice()[part(BLOCK)],
            sums16: &self.sums16.as_slice()[part(SUM)],
            sums32: &self.sums32.as_slice()[part(32)],
        }
    }

    fn fill<const BLOCK: usize>(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        let tokens = x.len().checked_div(cols).unwrap_or(0);
        let rows = RowPointers {
            codes: self.codes.first(tokens * cols + SLACK).as_mut_ptr(),
            scales: self.scales.first(tokens * (cols / BLOCK) + SLACK).as_mut_ptr(),
            sums16: self.sums16.first(tokens * (cols / SUM) + SLACK).as_mut_ptr(),
            sums32: self.sums32.first(tokens * (cols / 32) + SLACK).as_mut_ptr(),
        };
        let isa = cpu.isa();
        cpu.pool().for_each_chunk(tokens, 8, |range| {
            for token in range {
                // SAFETY: the buffers hold `tokens` rows of `cols` elements, and each token is
                // visited by one worker only.
                let row = unsafe { rows.row::<BLOCK>(token, cols) };
                quantize_with::<BLOCK>(isa, &x[token * cols..][..cols], row);
            }
        });
    }
}

/// Where the rows of a [`Quantized`] lie, for workers that fill different rows.
struct RowPointers {
    codes: *mut i8,
    scales: *mut f32,
    sums16: *mut i16,
    sums32: *mut i16,
}

// SAFETY: the pointers are used for disjoint rows only, see `row`.
unsafe impl Sync for RowPointers {}

impl RowPointers {
    /// # Safety
    /// The buffers hold the row of `token`, and nobody else uses that row meanwhile.
    unsafe fn row<'a, const BLOCK: usize>(&self, token: usize, cols: usize) -> QuantizedRow<'a> {
        use std::slice::from_raw_parts_mut;
        let part = |each: usize| (token * (cols / each), cols / each);
        // SAFETY: rows of different tokens do not overlap; the caller vouches for this one.
        unsafe {
            QuantizedRow {
                codes: from_raw_parts_mut(self.codes.add(part(1).0), part(1).1),
                scales: from_raw_parts_mut(self.scales.add(part(BLOCK).0), part(BLOCK).1),
                sums16: from_raw_parts_mut(self.sums16.add(part(SUM).0), part(SUM).1),
                sums32: from_raw_parts_mut(self.sums32.add(part(32).0), part(32).1),
            }
        }
    }
}

/// Rounds one row with the instructions of `isa`; the result is the same for all of them.
fn quantize_with<const BLOCK: usize>(isa: Isa, x: &[f32], row: QuantizedRow<'_>) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: `Cpu::new` has checked that this machine has the instructions of `isa`.
        return unsafe { quantize_avx2::<BLOCK>(x, row) };
    }
    let _ = isa;
    quantize_row::<BLOCK>(x, row);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn quantize_avx2<const BLOCK: usize>(x: &[f32], row: QuantizedRow<'_>) {
    quantize_row::<BLOCK>(x, row);
}
