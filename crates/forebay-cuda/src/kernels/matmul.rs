//! Products of prompt rows, on tensor cores or, if requested, in f32.

use forebay_format::TensorType;

use super::weights::{modules_of, takes_rounded, weight_alignment};
use crate::launch::Launch;
use crate::{AddressTable, CudaError, DevicePtr, Gpu};

/// Number of rows and of tokens of a block of the exact kernel.
const EXACT_SIZE: usize = 64;
/// Most rows of an F32 matrix, such as a router, that is multiplied by the exact kernel for few rows. That choice depends on
/// the matrix alone, because the kernels add in different orders.
const NARROW_ROWS: usize = 1024;
/// Tokens and rows of a block of that kernel, and its threads. For up to `FEW_TOKENS`, a block has fewer rows, so that more
/// blocks read at a time.
const NARROW_SIZE: (usize, usize) = (4, 8);
const NARROW_FEW_ROWS: usize = 2;
const FEW_TOKENS: usize = 64;
const NARROW_THREADS: u32 = 64;
/// Most products of a launch on tensor cores; the same as in the kernel.
const TOGETHER: usize = 3;
/// Largest number of tiles that a block computes one after the other, and the bytes that describe them; the same as in the
/// kernel.
const ITEMS: usize = 32;
const ITEMS_BYTES: usize = ITEMS * 32 + 16;

/// Form of the activations for products with a weight type on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NarrowForm {
    /// One half-precision number each, with a power of two for every row.
    Half,
    /// Two half-precision numbers whose sum is the value, with a power of two for every row.
    HalfPair,
    /// Two bfloat16 numbers whose sum is the value.
    BfloatPair,
}

/// Returns the form for weights of type `ty` with `cols` columns. Returns `None` if [`Gpu::matmul`] takes f32, because
/// tensor cores do not help. This holds for F32 and F64 weights, and for rows whose 16-bit activations are not whole
/// multiples of 16 bytes.
pub fn narrow_form(ty: TensorType, cols: usize) -> Option<NarrowForm> {
    match ty {
        TensorType::F32 | TensorType::F64 => None,
        _ if !cols.is_multiple_of(8) => None,
        TensorType::F16 => Some(NarrowForm::HalfPair),
        TensorType::BF16 | TensorType::BF16_C2048 | TensorType::BF16_C256 => {
            Some(NarrowForm::BfloatPair)
        }
        _ => Some(NarrowForm::Half),
    }
}

/// Activations `[rows, cols]` as 16-bit numbers.
#[derive(Clone, Copy)]
pub struct NarrowActivations {
    /// Values `[rows, cols]`, or the high parts of pairs, aligned to 16 bytes.
    pub high: DevicePtr<u16>,
    /// Low parts of pairs `[rows, cols]`, aligned to 16 bytes; not used by [`NarrowForm::Half`].
    pub low: DevicePtr<u16>,
    /// Power of two of each row `[rows]`; not used by [`NarrowForm::BfloatPair`].
    pub scales: DevicePtr<f32>,
}

/// Activations for [`Gpu::matmul`].
#[derive(Clone, Copy)]
pub enum MatmulInput {
    /// Activations in the form that [`narrow_form`] returns.
    Narrow(NarrowActivations),
    /// Activations `[rows, cols]` for products in f32: any type, any shape, slow.
    Float(DevicePtr<f32>),
}

/// Weights of a product, and the rows that are multiplied with each.
#[derive(Clone, Copy)]
pub enum MatmulWeights {
    /// Row `t` of the output is row `t` of `x` times the matrix, for `tokens` rows.
    Dense { data: DevicePtr<u8>, tokens: usize },
    /// Entries `starts[e] .. starts[e + 1]` are multiplied with expert `e`.
    Experts {
        /// Address of each expert's slot; 0 leaves the expert's outputs unchanged.
        slots: AddressTable,
        experts: usize,
        /// Offset of the matrix in the slot.
        offset: u64,
        /// Bounds `[experts + 1]`; the last is at most `entries`.
        starts: DevicePtr<u32>,
        /// Row of `x` that each entry `i` reads; row `i` if null.
        token_rows: DevicePtr<u32>,
        /// Output row that each entry `i` writes; row `i` if null.
        out_rows: DevicePtr<u32>,
        /// Maximum number of entries.
        entries: usize,
    },
}

/// One product: `out[t, r] = sum over c of x[t, c] * w[r, c]`.
#[derive(Clone, Copy)]
pub struct DeviceMatmul {
    pub ty: TensorType,
    pub weights: MatmulWeights,
    /// Number of rows of one matrix.
    pub rows: usize,
    pub cols: usize,
    pub x: MatmulInput,
    /// Output `[tokens or entries, rows]`.
    pub out: DevicePtr<f32>,
}

impl Gpu {
    /// Converts `x [rows, cols]` to 16-bit numbers.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn narrow(
        &self,
        form: NarrowForm,
        x: DevicePtr<f32>,
        out: NarrowActivations,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        if form == NarrowForm::BfloatPair {
            let count = rows * cols;
            let grid = (count.div_ceil(256) as u32, 1, 1);
            let kernel = self.kernel("narrow", "narrow_bfloat")?;
            let launch = Launch::new(kernel, grid, (256, 1, 1));
            let launch = launch.ptr(x, count).ptr(out.high, count).ptr(out.low, count);
            return launch.u64(count as u64).run(self);
        }
        let low = if form == NarrowForm::Half { DevicePtr::null() } else { out.low };
        let kernel = self.kernel("narrow", "narrow_half")?;
        let values = rows * cols;
        let launch = Launch::new(kernel, (rows as u32, 1, 1), (256, 1, 1)).ptr(x, values);
        let launch = launch.ptr(out.high, values).optional(low, values);
        launch.ptr(out.scales, rows).int(cols).run(self)
    }

    /// Computes the product of `job`. The order of sums depends only on the columns, so a row's result does not depend
    /// on other rows.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, a part does not lie in its slot, columns are not whole blocks, or a matrix or
    /// its offset in a slot is not aligned. Panics if activations are 16-bit numbers but [`narrow_form`] returns
    /// `None`.
    pub fn matmul(&self, job: &DeviceMatmul) -> Result<(), CudaError> {
        self.matmul_in(job, None)
    }

    /// Does the same as [`Gpu::matmul`] in tiles of this size, if the product runs on tensor cores. All sizes give the same
    /// bits. `None` chooses the faster one.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics as [`Gpu::matmul`] does.
    pub fn matmul_in(&self, job: &DeviceMatmul, size: Option<TileSize>) -> Result<(), CudaError> {
        self.matmul_together(std::slice::from_ref(job), size)
    }

    /// Computes several products of the same activations as [`Gpu::matmul_in`] does. Those on tensor cores share launches,
    /// because a launch of few rows takes mostly its start and its end.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics as [`Gpu::matmul`] does, or if the jobs differ in more than data or offset, rows and output.
    pub fn matmul_together(
        &self,
        jobs: &[DeviceMatmul],
        size: Option<TileSize>,
    ) -> Result<(), CudaError> {
        for job in jobs {
            check(job);
            assert!(is_beside(job, &jobs[0]), "products of different activations");
        }
        let Some(first) = jobs.first() else { return Ok(()) };
        match first.x {
            MatmulInput::Float(x) => jobs.iter().try_for_each(|job| self.matmul_float(job, x)),
            MatmulInput::Narrow(x) => {
                let size = size.unwrap_or_else(|| self.faster_tile(jobs));
                let mut launches = jobs.chunks(TOGETHER);
                launches.try_for_each(|jobs| self.matmul_narrow(jobs, x, size))
            }
        }
    }

    /// Computes a product in f32.
    fn matmul_float(&self, job: &DeviceMatmul, x: DevicePtr<f32>) -> Result<(), CudaError> {
        let (ty, cols) = (job.ty, job.cols);
        let modules = modules_of(ty);
        if let MatmulWeights::Dense { data, tokens } = job.weights
            && ty == TensorType::F32
            && job.rows <= NARROW_ROWS
        {
            let (name, rows) = match tokens {
                0..=FEW_TOKENS => ("exact_narrow_few", NARROW_FEW_ROWS),
                _ => ("exact_narrow", NARROW_SIZE.1),
            };
            let grid = (tokens.div_ceil(NARROW_SIZE.0), job.rows.div_ceil(rows));
            let kernel = self.kernel(modules.exact, name)?;
            return Launch::new(kernel, (grid.0 as u32, grid.1 as u32, 1), (NARROW_THREADS, 1, 1))
                .ptr(x, tokens * cols)
                .ptr(data.cast::<f32>(), job.rows * cols)
                .ptr(job.out, tokens * job.rows)
                .int(job.rows)
                .int(cols)
                .int(tokens)
                .run(self);
        }
        let (x_rows, out_rows) = known_rows(&job.weights);
        let grid = grid(&job.weights, EXACT_SIZE, job.rows.div_ceil(EXACT_SIZE), 1);
        let launch = Launch::new(self.kernel(modules.exact, "exact_matmul")?, grid, (256, 1, 1))
            .ptr(x, x_rows * cols)
            .ptr(job.out, out_rows * job.rows)
            .int(job.rows)
            .int(cols)
            .u64(row_bytes(job) as u64);
        with_weights(launch, job).run(self)
    }

    /// Computes products on tensor cores, at most [`TOGETHER`], with one launch.
    fn matmul_narrow(
        &self,
        jobs: &[DeviceMatmul],
        x: NarrowActivations,
        size: TileSize,
    ) -> Result<(), CudaError> {
        let first = &jobs[0];
        let (ty, cols) = (first.ty, first.cols);
        let form = narrow_form(ty, cols);
        let form = form.unwrap_or_else(|| panic!("{ty} with {cols} columns takes f32"));
        let parts = if form == NarrowForm::Half { 1 } else { 2 };
        let tile = match size {
            TileSize::Small => small_tile(ty),
            TileSize::Large => LARGE,
            TileSize::LargeApart => APART,
        };
        let module = modules_of(ty).matmul.unwrap_or_else(|| panic!("{ty} takes f32"));
        let (x_rows, out_rows) = known_rows(&first.weights);
        let (low, scales) = match form {
            NarrowForm::Half => (DevicePtr::null(), x.scales),
            NarrowForm::HalfPair => (x.low, x.scales),
            NarrowForm::BfloatPair => (x.low, DevicePtr::null()),
        };
        let (grid, ahead) = match tile.ahead {
            true => (self.blocks_of_items(jobs, &tile), self.steps_ahead(ty, &tile)),
            false => {
                let most = jobs.iter().map(|job| job.rows).max().unwrap_or(0);
                let along_rows = most.div_ceil(tile.rows);
                (grid(&first.weights, tile.tokens, along_rows, jobs.len()), 1)
            }
        };
        let launch = Launch::new(self.kernel(module, tile.kernel)?, grid, (tile.threads, 1, 1))
            .shared(tile.shared_bytes(ty, parts, ahead) as u32)
            .ptr(x.high, x_rows * cols)
            .optional(low, x_rows * cols)
            .optional(scales, x_rows)
            .ptr(first.out, out_rows * first.rows)
            .int(first.rows)
            .int(cols)
            .u64(row_bytes(first) as u64);
        let mut launch = with_weights(launch, first);
        for other in 1..TOGETHER {
            launch = match jobs.get(other) {
                None => launch.u64(0).null().int(0),
                Some(job) => {
                    let launch = with_matrix(launch, job);
                    launch.ptr(job.out, out_rows * job.rows).int(job.rows)
                }
            };
        }
        launch.int(ahead).run(self)
    }
}

/// Checks that a product's weights can be read.
fn check(job: &DeviceMatmul) {
    let address = match job.weights {
        MatmulWeights::Dense { data, .. } => data.address(),
        MatmulWeights::Experts { offset, .. } => offset,
    };
    let ty = job.ty;
    assert!(address.is_multiple_of(weight_alignment(ty) as u64), "{ty} is not aligned");
}

/// Returns the number of bytes of a row of the matrix.
fn row_bytes(job: &DeviceMatmul) -> usize {
    let bytes = job.ty.row_bytes(job.cols as u64);
    bytes.unwrap_or_else(|| panic!("{} columns of {}", job.cols, job.ty)) as usize
}

/// Returns true if two products multiply the same rows of the same activations with matrices of the same type.
fn is_beside(a: &DeviceMatmul, b: &DeviceMatmul) -> bool {
    let same_x = match (a.x, b.x) {
        (MatmulInput::Narrow(a), MatmulInput::Narrow(b)) => a.high.address() == b.high.address(),
        (MatmulInput::Float(a), MatmulInput::Float(b)) => a.address() == b.address(),
        _ => false,
    };
    let same_rows = match (a.weights, b.weights) {
        (MatmulWeights::Dense { tokens: a, .. }, MatmulWeights::Dense { tokens: b, .. }) => a == b,
        (
            MatmulWeights::Experts { slots: a, starts: at, entries: of, .. },
            MatmulWeights::Experts { slots: b, starts, entries, .. },
        ) => a.address() == b.address() && at.address() == starts.address() && of == entries,
        _ => false,
    };
    same_x && same_rows && a.ty == b.ty && a.cols == b.cols
}

/// Returns the number of rows of `x` that are known to be read, and of rows of the output.
fn known_rows(weights: &MatmulWeights) -> (usize, usize) {
    match *weights {
        MatmulWeights::Dense { tokens, .. } => (tokens, tokens),
        MatmulWeights::Experts { token_rows, entries, .. } => {
            (if token_rows.is_null() { entries } else { entries.min(1) }, entries)
        }
    }
}

/// Size of the part of an output that a block of threads computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileSize {
    /// 32 tokens, and 32 rows of a block type or 64 of another one.
    Small,
    /// 128 tokens and rows.
    Large,
    /// The same, with other warps that decode.
    LargeApart,
}

impl TileSize {
    /// Returns the sizes for weights of this type. Only quantised types and compact BF16 are decoded before tensor cores multiply
    /// them.
    pub fn of(ty: TensorType) -> &'static [TileSize] {
        match decodes(ty) {
            true => &[TileSize::Small, TileSize::Large, TileSize::LargeApart],
            false => &[TileSize::Small, TileSize::Large],
        }
    }
}

/// A tile is the part of the output that a block computes. All tiles give the same bits.
struct Tile {
    kernel: &'static str,
    threads: u32,
    tokens: usize,
    rows: usize,
    /// True if a block copies weights ahead, and computes several tiles one after the other.
    ahead: bool,
    /// Time of 256 columns in microseconds on an H200, if all blocks that run at a time compute them.
    time: f64,
}

const LARGE: Tile =
    Tile { kernel: "matmul_128", threads: 256, tokens: 128, rows: 128, ahead: false, time: 10.4 };

/// For products with at most one block for each multiprocessor.
const APART: Tile = Tile { kernel: "matmul_128_apart", threads: 512, ..LARGE };

fn decodes(ty: TensorType) -> bool {
    takes_rounded(ty) || ty.plain() != ty
}

/// Returns the tile for few tokens. Some warps copy and decode weights of quantised types.
fn small_tile(ty: TensorType) -> Tile {
    if takes_rounded(ty) {
        Tile { kernel: "matmul_32", threads: 512, tokens: 32, rows: 32, ahead: true, time: 1.4 }
    } else {
        Tile { kernel: "matmul_32", threads: 256, tokens: 32, rows: 64, ahead: false, time: 3.5 }
    }
}

impl Tile {
    /// Returns the shared memory of a block, for weights of type `ty` and activations of `parts` parts, which are copied
    /// `ahead` steps ahead. See `Plan` and `matmul_ahead` in `matmul.cu`.
    fn shared_bytes(&self, ty: TensorType, parts: usize, ahead: usize) -> usize {
        // 64 columns of 16 bits.
        let (x, w) = (self.tokens * 64 * 2, self.rows * 64 * 2);
        if self.tokens == LARGE.tokens {
            return 2 * (parts * x + w);
        }
        if !self.ahead {
            return 2 * (4 / parts) * (parts * x + w);
        }
        let chunk = ty.row_bytes(256).expect("blocks divide 256 columns") as usize;
        let is_aligned = weight_alignment(ty) >= 16 && chunk.is_multiple_of(16);
        let pieces = if is_aligned { chunk / 16 } else { (chunk + 30) / 16 };
        let encoded = (ahead.max(2) + 1) * self.rows * 16 * pieces;
        4 * (2 * w + (ahead + 1) * x) + encoded
    }
}

impl Gpu {
    /// Chooses the tile that takes less time. Small tiles decode weights more often. Large ones may be mostly empty, or too
    /// few for the multiprocessors.
    fn faster_tile(&self, jobs: &[DeviceMatmul]) -> TileSize {
        let at_a_time = 2 * self.multiprocessors() as usize;
        let time = |tile: &Tile| tiles(jobs, tile).div_ceil(at_a_time) as f64 * tile.time;
        if time(&small_tile(jobs[0].ty)) <= time(&LARGE) {
            return TileSize::Small;
        }
        let one_each = tiles(jobs, &LARGE) <= self.multiprocessors() as usize;
        if one_each && decodes(jobs[0].ty) { TileSize::LargeApart } else { TileSize::Large }
    }

    /// Returns the grid of products whose blocks compute several tiles: so few blocks that all run at a time, unless they would
    /// have too many tiles. Blocks take equal shares of the tiles that exist.
    fn blocks_of_items(&self, jobs: &[DeviceMatmul], tile: &Tile) -> (u32, u32, u32) {
        let row_tiles: usize = jobs.iter().map(|job| job.rows.div_ceil(tile.rows)).sum();
        let most = grid(&jobs[0].weights, tile.tokens, 1, 1).0 as usize * row_tiles;
        let at_a_time = 2 * self.multiprocessors() as usize;
        let blocks = at_a_time * most.div_ceil(at_a_time * ITEMS);
        (blocks.min(most) as u32, 1, 1)
    }

    /// Returns the number of steps by which activations are copied ahead: as many as shared memory has room for. Two blocks
    /// share a multiprocessor if they can.
    fn steps_ahead(&self, ty: TensorType, tile: &Tile) -> usize {
        // Every block takes another KiB, and the multiprocessor has one more than a block may have.
        const RESERVED: usize = 1024;
        let room = self.shared_memory().saturating_sub(ITEMS_BYTES);
        let half = (self.shared_memory() + RESERVED) / 2 - RESERVED - ITEMS_BYTES;
        let bytes = |ahead| tile.shared_bytes(ty, 1, ahead);
        let room = if bytes(1) <= half { half } else { room };
        (2..=3).rev().find(|&ahead| bytes(ahead) <= room).unwrap_or(1)
    }
}

/// Returns the expected number of tiles of all products.
fn tiles(jobs: &[DeviceMatmul], tile: &Tile) -> usize {
    let row_tiles: usize = jobs.iter().map(|job| job.rows.div_ceil(tile.rows)).sum();
    tiles_along_tokens(&jobs[0].weights, tile) * row_tiles
}

/// Returns the expected number of tiles along the tokens.
fn tiles_along_tokens(weights: &MatmulWeights, tile: &Tile) -> usize {
    match *weights {
        MatmulWeights::Dense { tokens, .. } => tokens.div_ceil(tile.tokens),
        // Every expert has some entries, unless there are few.
        MatmulWeights::Experts { experts, entries, .. } => {
            let used = experts.min(entries).max(1);
            used * entries.div_ceil(used).div_ceil(tile.tokens)
        }
    }
}

/// Returns a grid with blocks for every possible tile of `size` tokens, times `along_rows` blocks along the rows, for `products`
/// products.
fn grid(
    weights: &MatmulWeights,
    size: usize,
    along_rows: usize,
    products: usize,
) -> (u32, u32, u32) {
    let tiles = match *weights {
        MatmulWeights::Dense { tokens, .. } => tokens.div_ceil(size),
        // Every expert with entries may have one tile that is not full.
        MatmulWeights::Experts { experts, entries, .. } => entries / size + experts.min(entries),
    };
    (tiles as u32, along_rows as u32, products as u32)
}

/// Passes the parameters named in `tiles.cuh`.
fn with_weights(launch: Launch, job: &DeviceMatmul) -> Launch {
    let launch = with_matrix(launch, job);
    match job.weights {
        MatmulWeights::Dense { tokens, .. } => {
            launch.null().null().null().null().int(0).int(tokens)
        }
        MatmulWeights::Experts {
            slots,
            experts,
            offset,
            starts,
            token_rows,
            out_rows,
            entries,
        } => {
            let bytes = offset + (job.rows * row_bytes(job)) as u64;
            let launch = launch.table(slots, experts, bytes).ptr(starts, experts + 1);
            let launch = launch.optional(token_rows, entries).optional(out_rows, entries);
            launch.int(experts).int(entries)
        }
    }
}

/// Passes the address of a dense matrix, or the offset of the matrix in an expert's slot.
fn with_matrix(launch: Launch, job: &DeviceMatmul) -> Launch {
    match job.weights {
        MatmulWeights::Dense { data, .. } => launch.ptr(data, job.rows * row_bytes(job)),
        MatmulWeights::Experts { slots, offset, .. } => {
            slots.check(offset + (job.rows * row_bytes(job)) as u64);
            launch.u64(offset)
        }
    }
}
