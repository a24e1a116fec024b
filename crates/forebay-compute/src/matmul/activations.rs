//! Activations in the forms that the kernels read.

use forebay_format::TensorType;

use super::quantize::{BLOCK, LargeBlock, Rounded, SmallBlock};
use super::types::{ActivationForm, activation_form};
use crate::buffer::SharedSlice;
use crate::cpu::{Arithmetic, Cpu, Isa};

/// The left operand of matrix products: `[tokens, cols]` numbers in F32 and in the rounded forms
/// that the weight types need. The buffer keeps its memory and is reused from layer to layer.
#[derive(Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    has_floats: bool,
    has_small: bool,
    has_large: bool,
    floats: Vec<f32>,
    small: Vec<SmallBlock>,
    large: Vec<LargeBlock>,
}

impl Activations {
    /// Creates an empty buffer.
    pub fn new() -> Activations {
        Activations::default()
    }

    /// Stores `x` `[tokens, cols]` in the forms that products with weights of `types` need.
    ///
    /// # Panics
    /// Panics if `x` is not `tokens * cols` long.
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
        // A type with blocks of this size cannot have rows that are not whole blocks.
        self.has_small = needs(ActivationForm::Small) && cols.is_multiple_of(32);
        self.has_large = needs(ActivationForm::Large) && cols.is_multiple_of(BLOCK);
        if self.has_floats {
            self.floats.clear();
            self.floats.extend_from_slice(x);
        }
        if self.has_small {
            fill(cpu, &mut self.small, x, cols);
        }
        if self.has_large {
            fill(cpu, &mut self.large, x, cols);
        }
    }

    /// Returns the number of rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns true if `prepare` made the form.
    pub(crate) fn has(&self, form: ActivationForm) -> bool {
        match form {
            ActivationForm::Float => self.has_floats,
            ActivationForm::Small => self.has_small,
            ActivationForm::Large => self.has_large,
        }
    }

    /// Returns one token in F32.
    pub(crate) fn floats(&self, token: usize) -> &[f32] {
        &self.floats[token * self.cols..][..self.cols]
    }

    /// Returns one token with a scale for every 32 elements.
    pub(crate) fn small(&self, token: usize) -> &[SmallBlock] {
        let blocks = self.cols.div_ceil(BLOCK);
        &self.small[token * blocks..][..blocks]
    }

    /// Returns one token with a scale for every 256 elements.
    pub(crate) fn large(&self, token: usize) -> &[LargeBlock] {
        let blocks = self.cols / BLOCK;
        &self.large[token * blocks..][..blocks]
    }
}

/// Rounds `x`, which has rows of `cols` elements, in parallel.
fn fill<B: Rounded>(cpu: &Cpu, blocks: &mut Vec<B>, x: &[f32], cols: usize) {
    let blocks_of_row = cols.div_ceil(BLOCK);
    let rows = x.len().checked_div(cols).unwrap_or(0);
    if blocks.len() < rows * blocks_of_row {
        blocks.resize(rows * blocks_of_row, B::ZERO);
    }
    let isa = cpu.isa();
    let blocks = SharedSlice::new(blocks);
    // 1024 elements take a quarter of a microsecond, so a region for a single row would cost more
    // than it saves.
    let rows_of_chunk = (1_usize << 14).div_ceil(cols.max(1));
    cpu.pool().for_each_chunk(rows, rows_of_chunk, |range| {
        for row in range {
            // SAFETY: every row is visited by one worker only.
            let blocks = unsafe { blocks.piece(row * blocks_of_row, blocks_of_row) };
            round_row(isa, &x[row * cols..][..cols], blocks);
        }
    });
}

/// Rounds one row with the instructions of `isa`. All instruction sets give the same result.
fn round_row<B: Rounded>(isa: Isa, x: &[f32], blocks: &mut [B]) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: `Cpu::new` has checked that this machine has the instructions of `isa`.
        return unsafe { round_row_avx2(x, blocks) };
    }
    let _ = isa;
    round_row_inline(x, blocks);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn round_row_avx2<B: Rounded>(x: &[f32], blocks: &mut [B]) {
    round_row_inline(x, blocks);
}

#[inline(always)]
fn round_row_inline<B: Rounded>(x: &[f32], blocks: &mut [B]) {
    for (x, block) in x.chunks(BLOCK).zip(blocks) {
        block.round(x);
    }
}
