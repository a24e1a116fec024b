//! Products of decode rows with matrices. The bits of a row do not depend on the number of rows.

use forebay_format::TensorType;
use forebay_ops::Gating;

use super::gating::GateBiases;
use super::weights::{
    DeviceMatrix, ExpertPairs, ExpertPart, ExpertTable, MatvecInput, modules_of, takes_rounded,
    takes_tiles, weight_alignment,
};
use crate::launch::Launch;
use crate::{AddressTable, CudaError, DevicePtr, Gpu, TiledActivations};

/// Maximum number of decode rows, which are one token each, of one launch.
pub const DECODE_ROWS: usize = 32;
/// Number of columns from which all lanes of a warp share a row. Fewer columns are less than two steps of 32 lanes, so too
/// many lanes would idle in the last step.
const LONG: usize = 2048;
/// Maximum number of matrices of one launch.
const MATRICES: usize = 4;
/// Number of warps of a block.
const WARPS: usize = 4;
/// Number of warps of a block that uses tensor cores, and of pairs of rows in a tile: `matvec_tiles.cuh`.
const TILE_WARPS: usize = 8;
const TILE_PAIRS: usize = 8;
/// Bytes of a decoded group of 32 elements in shared memory.
const DECODED_BYTES: usize = 48;
/// Bytes between the groups of different sums in shared memory, against bank conflicts.
const TILE_GAP: usize = 32;
/// Shared memory that the blocks of one multiprocessor may take together: that of compute capability 8.0, minus some
/// for the cache.
const SHARED_BYTES: usize = 150 << 10;

/// Treatment of the outputs of two matrices of one shape.
#[derive(Clone, Copy)]
pub enum Pairing {
    /// Every matrix has its own output.
    Separate,
    /// The first matrix's output becomes `gating(first, second)`; the second matrix's output is not written.
    Gated {
        gating: Gating,
        /// Biases `[experts, rows]`, added before the gated activation. Only experts may have them. Their ids are by
        /// pair, without [`GateBiases::pairs`].
        biases: Option<GateBiases>,
    },
    /// The output of one matrix passes through an activation without a gate.
    Activated(Gating),
}

impl Pairing {
    /// Returns the gated pairing without biases.
    pub fn gated(gating: Gating) -> Pairing {
        Pairing::Gated { gating, biases: None }
    }
}

/// Mode of the kernels, with their numbers; `Mode` in `matvec_arguments.cuh`.
#[derive(Clone, Copy)]
enum Mode {
    Separate = 0,
    Paired = 1,
    Gated = 2,
    Activated = 3,
}

/// Arguments that all kernels share.
struct Work {
    ty: TensorType,
    /// Addresses of the experts' slots, if the weights are those of experts.
    table: Option<AddressTable>,
    ids: DevicePtr<u32>,
    order: DevicePtr<u32>,
    /// Matrices; for experts, `offsets` holds their offsets in every slot instead.
    data: [DevicePtr<u8>; MATRICES],
    offsets: [u64; MATRICES],
    rows: [usize; MATRICES],
    out: [DevicePtr<f32>; MATRICES],
    cols: usize,
    tokens: usize,
    pairs_per_x: usize,
    mode: Mode,
    /// Function for [`Mode::Gated`] and [`Mode::Activated`].
    gating: Gating,
    biases: Option<GateBiases>,
    /// Number of matrices or (token, slot) pairs, each with its own blocks.
    items: usize,
}

impl Gpu {
    /// Multiplies `tokens` tokens (1 to [`DECODE_ROWS`]) with up to four matrices of one type and width. `x` is
    /// `[tokens, cols]`. The order of sums depends only on type and columns, so every token gets the bits that it gets
    /// alone.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, the number of tokens or matrices is wrong, columns are not whole blocks, a
    /// matrix is not aligned, or activations are in the wrong form. Panics if [`Pairing::Gated`] is asked for anything
    /// but two matrices with equally many rows, or with biases.
    pub fn matvec(
        &self,
        ty: TensorType,
        matrices: &[DeviceMatrix],
        x: MatvecInput,
        tokens: usize,
        cols: usize,
        pairing: Pairing,
    ) -> Result<(), CudaError> {
        assert!((1..=MATRICES).contains(&matrices.len()), "{} matrices", matrices.len());
        assert!((1..=DECODE_ROWS).contains(&tokens), "{tokens} tokens");
        let mut work = Work::new(ty, cols, tokens);
        for (i, matrix) in matrices.iter().enumerate() {
            let aligned = matrix.data.address().is_multiple_of(weight_alignment(ty) as u64);
            assert!(aligned, "a matrix of {ty} is not aligned");
            work.data[i] = matrix.data;
            work.rows[i] = matrix.rows;
            work.out[i] = matrix.out;
        }
        work.items = matrices.len();
        if let Pairing::Gated { gating, biases } = pairing {
            assert!(matrices.len() == 2 && matrices[0].rows == matrices[1].rows, "not a pair");
            assert!(biases.is_none(), "biases of one pair of matrices");
            (work.mode, work.gating) = (Mode::Gated, gating);
            work.items = 1;
        }
        work.activate(pairing, matrices.len());
        work.run(self, x)
    }

    /// Multiplies a row of `x` with one or two matrices of the pair's expert, for each of `pairs`. A pair uses row
    /// `pair / pairs.per_row` of `x`. The bits of a pair's output do not depend on the other pairs, nor on the order.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics in the cases of [`Gpu::matvec`], and if a part does not lie in its slot. The alignment of slots cannot
    /// be checked.
    #[allow(clippy::too_many_arguments, reason = "what the kernel needs to know, each once")]
    pub fn matvec_experts(
        &self,
        ty: TensorType,
        experts: ExpertTable,
        parts: &[ExpertPart],
        pairs: ExpertPairs,
        x: MatvecInput,
        cols: usize,
        pairing: Pairing,
    ) -> Result<(), CudaError> {
        assert!((1..=2).contains(&parts.len()), "{} parts", parts.len());
        assert!(pairs.per_row > 0, "no pairs for a row of activations");
        let mut work = Work::new(ty, cols, 1);
        for (i, part) in parts.iter().enumerate() {
            let aligned = part.offset.is_multiple_of(weight_alignment(ty) as u64);
            assert!(aligned, "a part of {ty} is not aligned in its slot");
            work.offsets[i] = part.offset;
            work.rows[i] = experts.rows;
            work.out[i] = part.out;
        }
        work.mode = if parts.len() == 1 { Mode::Separate } else { Mode::Paired };
        if let Pairing::Gated { gating, biases } = pairing {
            assert!(parts.len() == 2, "not a pair");
            (work.mode, work.gating) = (Mode::Gated, gating);
            assert!(biases.is_none_or(|biases| biases.pairs.is_null()), "pairs are in order");
            work.biases = biases;
        }
        work.activate(pairing, parts.len());
        (work.table, work.ids, work.order) = (Some(experts.slots), pairs.ids, pairs.order);
        (work.pairs_per_x, work.items) = (pairs.per_row, pairs.count);
        work.run(self, x)
    }
}

impl Work {
    fn new(ty: TensorType, cols: usize, tokens: usize) -> Work {
        Work {
            ty,
            table: None,
            ids: DevicePtr::null(),
            order: DevicePtr::null(),
            data: [DevicePtr::null(); MATRICES],
            offsets: [0; MATRICES],
            rows: [0; MATRICES],
            out: [DevicePtr::null(); MATRICES],
            cols,
            tokens,
            pairs_per_x: 1,
            mode: Mode::Separate,
            gating: Gating::Silu,
            biases: None,
            items: 1,
        }
    }

    /// Takes the activation of [`Pairing::Activated`].
    fn activate(&mut self, pairing: Pairing, matrices: usize) {
        if let Pairing::Activated(gating) = pairing {
            assert!(matrices == 1 && !gating.has_gate(), "{matrices} matrices with {gating:?}");
            (self.mode, self.gating) = (Mode::Activated, gating);
        }
    }

    fn run(&self, gpu: &Gpu, x: MatvecInput) -> Result<(), CudaError> {
        let ty = self.ty;
        let row_bytes = ty.row_bytes(self.cols as u64);
        let row_bytes = row_bytes.unwrap_or_else(|| panic!("{} columns of {ty}", self.cols));
        assert!(self.items <= 65_535, "{} pairs in one launch", self.items);
        let tiles = self.table.is_none() && takes_tiles(ty, self.tokens);
        let is_right = match x {
            MatvecInput::Rounded(_) => takes_rounded(ty) && !tiles,
            MatvecInput::Tiled(_) => tiles,
            MatvecInput::Float(_) => !takes_rounded(ty),
        };
        assert!(is_right, "activations in the wrong form for {} rows and {ty}", self.tokens);
        let (experts, all) = (self.table.is_some(), 0..self.items);
        let pairs: usize = all.map(|i| pairs_of(self.rows_of(i), self.mode)).sum();
        let pairs = pairs.div_ceil(gpu.multiprocessors() as usize);
        let variant = Variant::of(ty, self.cols, self.tokens, experts, pairs);
        let blocks =
            (0..self.items.min(MATRICES)).map(|i| variant.blocks(self.rows_of(i), self.mode));
        let blocks = blocks.max().unwrap_or(0);
        let groups = self.tokens.div_ceil(variant.tokens);
        // Blocks loop over the rows, so more blocks than fit at once would only repeat the start of the loop. Also, all
        // groups of tokens are then computed together, and share the L2 cache.
        let resident = gpu.multiprocessors() as usize * variant.blocks_per_multiprocessor;
        let along_rows = blocks.min(resident.div_ceil((self.items * groups).max(1)));
        let grid = (along_rows as u32, self.items as u32, groups as u32);
        let kernel = gpu.kernel(variant.module, variant.name)?;
        let launch = Launch::new(kernel, grid, (32 * variant.warps as u32, 1, 1));
        let mut launch = launch.shared(variant.shared_bytes as u32);
        // Number of rows of activations, and of each output.
        let (x_rows, out_rows) = match self.table {
            Some(_) => (self.items.div_ceil(self.pairs_per_x), self.items),
            None => (self.tokens, self.tokens),
        };
        let values = x_rows * self.cols;
        launch = match x {
            MatvecInput::Rounded(x) => launch.ptr(x.codes, values).ptr(x.scales, values / 32),
            MatvecInput::Tiled(x) => {
                let (codes, scales) = TiledActivations::bytes(x_rows, self.cols);
                launch.ptr(x.codes, codes).ptr(x.scales, scales / 8)
            }
            MatvecInput::Float(x) => launch.ptr(x, values),
        };
        let is_written = |i: usize| i == 0 || !matches!(self.mode, Mode::Gated);
        let bytes = |i: usize| self.rows[i] * row_bytes as usize;
        launch = match self.table {
            Some(table) => {
                let ends = (0..MATRICES).map(|i| self.offsets[i] + bytes(i) as u64);
                launch
                    .table(table, 1, ends.max().unwrap_or(0))
                    .ptr(self.ids, self.items)
                    .optional(self.order, self.items)
            }
            None => launch.null().null().null(),
        };
        launch = (0..MATRICES).fold(launch, |launch, i| match self.table {
            Some(_) => launch.u64(self.offsets[i]),
            None => launch.optional(self.data[i], bytes(i)),
        });
        launch = self.rows.iter().fold(launch, |launch, rows| launch.int(*rows));
        launch = (0..MATRICES).fold(launch, |launch, i| {
            let rows = if is_written(i) { out_rows } else { 0 };
            launch.optional(self.out[i], rows * self.rows[i])
        });
        launch = launch.int(self.cols).u64(row_bytes).int(self.tokens);
        let (gating, alpha, limit) = super::gating::arguments(self.gating);
        launch = launch.int(self.pairs_per_x).int(self.mode as usize);
        launch = launch.int(gating).float(alpha).float(limit);
        let none = (DevicePtr::null(), DevicePtr::null(), DevicePtr::null());
        let (gate, up, ids) = self.biases.map_or(none, |b| (b.gate, b.up, b.ids));
        let biases = launch.optional(gate, self.rows[0]).optional(up, self.rows[0]);
        biases.optional(ids, self.items).run(gpu)
    }

    /// Returns the rows of item `i`. Experts all have as many rows as the first.
    fn rows_of(&self, i: usize) -> usize {
        if self.table.is_none() { self.rows[i] } else { self.rows[0] }
    }
}

/// One of the kernels of a type, chosen by type, columns, tokens and whether the matrices are those of experts. All that
/// serve the same type and columns add in the same order.
struct Variant {
    module: &'static str,
    name: &'static str,
    /// Tokens that a block processes at once.
    tokens: usize,
    /// Warps of a block, and the pairs of rows that a block processes at once.
    warps: usize,
    pairs: usize,
    shared_bytes: usize,
    blocks_per_multiprocessor: usize,
}

impl Variant {
    /// `pairs` is the number of pairs of rows for each multiprocessor.
    fn of(ty: TensorType, cols: usize, tokens: usize, experts: bool, pairs: usize) -> Variant {
        let (run, modules) = (run_of(ty), modules_of(ty));
        // The same as in `matvec.cu`. Half-aligned pairs of groups take the most registers.
        let unaligned_pair = run == 2 && weight_alignment(ty) < 16;
        let direct = |name, slots, blocks_per_multiprocessor| Variant {
            module: modules.matvec,
            name,
            tokens: 1,
            warps: WARPS,
            pairs: slots * WARPS,
            shared_bytes: 0,
            blocks_per_multiprocessor,
        };
        // The module for several tokens, if it is needed and exists. Otherwise every token has its own blocks.
        let few = modules.matvec_few.filter(|_| tokens > 1);
        let (name, at_once) = match tokens {
            2 => ("matvec_2", 2),
            3..=4 => ("matvec_4", 4),
            _ => ("matvec_8", 8),
        };
        if !takes_rounded(ty) {
            // Kernels of compact blocks take fewer registers, and more if there are fewer rows than warps.
            let one = match (ty.compact().is_some(), pairs) {
                (false, _) => direct("matvec_1", 1, 4),
                (true, ..=16) => direct("matvec_1_few_rows", 1, 4),
                (true, ..=24) => direct("matvec_1_some_rows", 1, 6),
                (true, _) => direct("matvec_1", 1, 8),
            };
            let few =
                few.map(|module| Variant { module, name, tokens: at_once, ..direct(name, 1, 4) });
            return few.unwrap_or(one);
        }
        let many = modules.matvec_many.filter(|_| takes_tiles(ty, tokens) && !experts);
        if let Some(module) = many {
            // Lanes of a row in the kernels for fewer tokens. Four of them make a warp's part of a tile.
            let lanes = if cols < LONG { 8 / run } else { 32 };
            let (name, tokens) = match (cols < LONG, tokens) {
                (true, ..=8) => ("matvec_short_8", 8),
                (true, _) => ("matvec_short_16", 16),
                (false, ..=8) => ("matvec_8", 8),
                (false, ..=16) => ("matvec_16", 16),
                (false, _) => ("matvec_32", 32),
            };
            return Variant {
                module,
                name,
                tokens,
                warps: TILE_WARPS,
                pairs: TILE_WARPS / (lanes / 4) * TILE_PAIRS,
                shared_bytes: TILE_WARPS * 4 * (16 * run * DECODED_BYTES + TILE_GAP),
                blocks_per_multiprocessor: 2,
            };
        }
        if cols < LONG {
            let one = direct("matvec_short", 4 * run, 4);
            return few.map_or(one, |module| Variant {
                module,
                tokens: 4,
                ..direct("matvec_short_4", 4 * run, 4)
            });
        }
        if experts {
            return direct("matvec_experts", 1, if unaligned_pair { 4 } else { 6 });
        }
        let ring = |module, name, tokens, registers_allow| {
            let shared_bytes = ring_bytes(ty);
            let fitting = (SHARED_BYTES / shared_bytes).clamp(1, registers_allow);
            let blocks_per_multiprocessor = fitting;
            let (warps, pairs) = (WARPS, WARPS);
            Variant { module, name, tokens, warps, pairs, shared_bytes, blocks_per_multiprocessor }
        };
        match few {
            Some(module) if tokens == 2 => ring(module, name, 2, if run == 2 { 4 } else { 6 }),
            Some(module) => ring(module, name, at_once, 5 - run),
            // These types have `fetch` in the kernels.
            None if matches!(ty, TensorType::Q8_0 | TensorType::MXFP4) => direct("matvec_1", 1, 4),
            None if unaligned_pair => ring(modules.matvec, "matvec_1", 1, 4),
            None => ring(modules.matvec, "matvec_1", 1, 7 - run),
        }
    }

    /// Returns the number of blocks that a matrix of `rows` rows can use.
    fn blocks(&self, rows: usize, mode: Mode) -> usize {
        pairs_of(rows, mode).div_ceil(self.pairs)
    }
}

/// Returns the number of pairs of rows of a matrix, or of two.
fn pairs_of(rows: usize, mode: Mode) -> usize {
    match mode {
        Mode::Separate | Mode::Activated => rows.div_ceil(2),
        Mode::Paired | Mode::Gated => rows,
    }
}

/// Returns the number of groups of 32 elements that a lane takes of a row at once. It is 2 for types that have
/// `unpack_two` in the kernels.
fn run_of(ty: TensorType) -> usize {
    if matches!(ty, TensorType::Q4_K | TensorType::Q5_K | TensorType::Q6_K) { 2 } else { 1 }
}

/// Returns the shared memory of a block: `Shape` in `matvec.cu`, and a margin for words that are read across the end.
fn ring_bytes(ty: TensorType) -> usize {
    let segment = 32 * run_of(ty) * 32 / ty.block_elements() * ty.block_bytes();
    let chunks = (segment + 16 - weight_alignment(ty)).div_ceil(16);
    let stage = 2 * chunks * 16;
    let stages = if run_of(ty) == 2 { 2 } else { (28_672 / (WARPS * stage)).clamp(2, 4) };
    WARPS * stages * stage + 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supports_weights;

    #[test]
    fn every_variant_is_in_its_module() {
        let mut texts = std::collections::HashMap::new();
        for &ty in TensorType::all().iter().filter(|ty| supports_weights(**ty)) {
            for cols in [256, 4096] {
                for (tokens, experts) in (1..=DECODE_ROWS).map(|n| (n, false)).chain([(1, true)]) {
                    let few =
                        [1, 20, 100].map(|pairs| Variant::of(ty, cols, tokens, experts, pairs));
                    for Variant { module, name, .. } in few {
                        let text = texts.entry(module).or_insert_with(|| crate::ptx::text(module));
                        let entry = format!(".entry {name}(");
                        let has = text.as_ref().is_some_and(|text| text.contains(&entry));
                        assert!(has, "{module} {name}");
                    }
                }
            }
        }
    }
}
