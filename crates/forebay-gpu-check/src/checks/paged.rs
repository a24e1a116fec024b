//! A paged KV cache for checks. The blocks of every sequence are scattered through the pool, and everything that no kernel
//! wrote is NaN.

use anyhow::Result;
use forebay_cuda::{
    AttentionInputs, CutPrompts, DeviceKvLayer, DeviceMemory, DevicePtr, Gpu, HeadInput,
    KvLayerShape, KvPool, KvTables, PassRows, PromptRun, PromptTiles,
};
use forebay_ops::{KV_BLOCK, RowKind};

use crate::harness::Context;
use crate::random::Random;

/// Cache of one layer, which is the second of two in its pool.
pub struct PagedCache {
    pub shape: KvLayerShape,
    /// Number of blocks of each sequence.
    ring: usize,
    pool: DeviceMemory,
    tables: DeviceMemory,
    /// Block numbers `[sequences, stride]`.
    numbers: Vec<u32>,
}

/// Rows on the device: the position and the sequence of each.
pub struct Rows {
    kind: RowKind,
    /// Sequence and position of each.
    places: Vec<(usize, usize)>,
    positions: DeviceMemory,
    tables: DeviceMemory,
}

/// Tiles of prompt rows on the device.
pub struct Tiles {
    memory: DeviceMemory,
    count: usize,
    in_parts: bool,
}

impl Tiles {
    /// Uploads the tiles of prompts.
    pub fn new(
        context: &Context,
        shape: &KvLayerShape,
        heads: usize,
        runs: impl Iterator<Item = PromptRun>,
    ) -> Result<Tiles> {
        let CutPrompts { mut tiles, in_parts } = context.gpu.prompt_tiles(shape, heads, runs);
        let count = tiles.len();
        tiles.resize(count.max(1), [0; PromptTiles::WORDS]);
        Ok(Tiles { memory: context.upload(tiles.as_flattened())?, count, in_parts })
    }

    pub fn on_device(&self) -> PromptTiles {
        PromptTiles { words: self.memory.ptr(), count: self.count, in_parts: self.in_parts }
    }
}

impl Rows {
    /// Uploads rows, each given by its sequence and its position.
    pub fn new(context: &Context, kind: RowKind, rows: &[(usize, usize)]) -> Result<Rows> {
        let positions: Vec<u32> = rows.iter().map(|row| row.1 as u32).collect();
        let tables: Vec<u32> = rows.iter().map(|row| row.0 as u32).collect();
        let [positions, tables] = [context.upload(&positions)?, context.upload(&tables)?];
        Ok(Rows { kind, places: rows.to_vec(), positions, tables })
    }

    /// Uploads consecutive rows of one sequence.
    pub fn run(
        context: &Context,
        kind: RowKind,
        sequence: usize,
        positions: std::ops::Range<usize>,
    ) -> Result<Rows> {
        let rows: Vec<(usize, usize)> = positions.map(|at| (sequence, at)).collect();
        Rows::new(context, kind, &rows)
    }

    pub fn pass(&self) -> PassRows {
        self.part(0..self.places.len())
    }

    /// Returns some of the rows.
    pub fn part(&self, of: std::ops::Range<usize>) -> PassRows {
        PassRows {
            kind: self.kind,
            count: of.len(),
            positions: self.positions.ptr::<u32>().offset(of.start),
            tables: self.tables.ptr::<u32>().offset(of.start),
            tiles: PromptTiles::none(),
        }
    }

    /// Uploads the tiles of the rows for attention. There are none for generated tokens.
    pub fn tiles(&self, context: &Context, shape: &KvLayerShape, heads: usize) -> Result<Tiles> {
        let follows = |a: &(usize, usize), b: &(usize, usize)| (a.0, a.1 + 1) == *b;
        let places = if self.kind == RowKind::Prompt { &self.places[..] } else { &[] };
        let runs = places.chunk_by(follows).scan(0, |rows, run| {
            let first = *rows;
            *rows += run.len();
            let (table, position) = run[0];
            Some(PromptRun { first, count: run.len(), position, table })
        });
        Tiles::new(context, shape, heads, runs)
    }
}

impl PagedCache {
    /// Creates a cache for `sequences` sequences. If they keep a window only, `ring` is the number of blocks of each.
    pub fn new(
        context: &Context,
        shape: KvLayerShape,
        sequences: usize,
        ring: Option<usize>,
    ) -> Result<PagedCache> {
        let ring = ring.unwrap_or(shape.blocks());
        let block_bytes = 2 * shape.block_bytes() as usize;
        let blocks = 1 + sequences * ring;
        let pool = context.poisoned((blocks * block_bytes).div_ceil(4))?;
        context.gpu.fill(pool.ptr(), 0, block_bytes)?;
        let mut shuffled: Vec<u32> = (1..blocks as u32).collect();
        let mut random = Random::new(blocks as u64);
        for at in (1..shuffled.len()).rev() {
            shuffled.swap(at, random.next() as usize % (at + 1));
        }
        let entry = |sequence: usize, n: usize| match n < shape.blocks() {
            true => shuffled[sequence * ring + n % ring],
            false => 0,
        };
        let stride = shape.table_stride();
        let numbers: Vec<u32> =
            (0..sequences * stride).map(|at| entry(at / stride, at % stride)).collect();
        let tables = context.upload(&numbers)?;
        Ok(PagedCache { shape, ring, pool, tables, numbers })
    }

    pub fn layer(&self) -> DeviceKvLayer {
        let (shape, stride) = (self.shape, self.shape.table_stride());
        let block_bytes = 2 * shape.block_bytes() as usize;
        let pool = KvPool {
            memory: self.pool.ptr(),
            blocks: self.pool.bytes() / block_bytes,
            block_bytes,
        };
        let tables =
            KvTables { blocks: self.tables.ptr(), stride, count: self.numbers.len() / stride };
        DeviceKvLayer { shape, pool, tables, offset: block_bytes / 2, elsewhere: None }
    }

    /// Returns the number of positions that can be written at once.
    pub fn rows(&self) -> usize {
        self.ring * KV_BLOCK
    }

    /// Downloads the pool.
    pub fn bytes(&self, gpu: &Gpu) -> Result<Vec<u8>> {
        Ok(gpu.download(self.pool.ptr(), self.pool.bytes())?)
    }

    /// Returns the offset in the pool of the block that holds a position of a sequence.
    pub fn block_at(&self, sequence: usize, position: usize) -> usize {
        let number = self.numbers[sequence * self.shape.table_stride() + position / KV_BLOCK];
        number as usize * 2 * self.shape.block_bytes() as usize + self.layer().offset
    }

    /// Stores plain keys `[positions, kv_heads, dim_k]` and values as positions `positions` of a sequence.
    pub fn fill(
        &self,
        context: &Context,
        sequence: usize,
        positions: std::ops::Range<usize>,
        keys: DevicePtr<f32>,
        values: DevicePtr<f32>,
    ) -> Result<()> {
        let KvLayerShape { kv_heads, dim_k, dim_v, .. } = self.shape;
        let (start, end) = (positions.start, positions.end);
        for from in positions.step_by(self.rows()) {
            let to = end.min(from + self.rows());
            let rows = Rows::run(context, RowKind::Prompt, sequence, from..to)?;
            let at = (from - start) * kv_heads;
            let inputs = AttentionInputs {
                q: HeadInput::none(),
                k: HeadInput::plain(keys.offset(at * dim_k)),
                key_norm_dims: [dim_k, 0],
                v: match self.shape.values_in_keys {
                    true => HeadInput::none(),
                    false => HeadInput::plain(values.offset(at * dim_v)),
                },
                heads: 0,
                norm_epsilon: 0.0,
                norms_last: false,
                mixed: 1,
                rotation: None,
            };
            context.gpu.attention_inputs(&inputs, &self.layer(), &rows.pass())?;
            context.gpu.synchronize()?;
        }
        Ok(())
    }
}
