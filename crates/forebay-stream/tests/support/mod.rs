//! A model of random bytes, and a residency for it.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::time::Duration;

use forebay_store::{
    Arena, DiskModel, EngineOptions, FaultPlan, FileSet, IoKind, ReadEngine, VirtualClock,
    open_engine, open_faulty_engine, open_simulated_engine,
};
use forebay_stream::{
    Block, BlockId, Budget, ExpertIndex, Extent, FileIndex, LayerIndex, Lease, ModelBlocks,
    PolicyKind, Residency, Step, StreamError, TensorType,
};

/// Reproducible random choices.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// Returns distinct experts of a layer in ascending order; low numbers are more frequent.
    pub fn experts(&mut self, known: u32, count: usize) -> Vec<ExpertIndex> {
        let mut chosen: Vec<u32> = Vec::new();
        while chosen.len() < count.min(known as usize) {
            let expert = self.below(u64::from(known)).min(self.below(u64::from(known))) as u32;
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        chosen.sort_unstable();
        chosen.into_iter().map(ExpertIndex).collect()
    }
}

/// Blocks, and the contents of the files that hold them.
pub struct Model {
    pub blocks: ModelBlocks,
    pub images: Vec<Vec<u8>>,
}

pub const LAYERS: u32 = 4;
pub const EXPERTS: u32 = 10;
pub const PER_TOKEN: usize = 3;

fn heads() -> Step {
    Step::Heads { extent: 0, heads: 5, plain: 3, value: 4, rank: 10, ty: TensorType::F16 }
}

/// Returns a step whose parts have more bytes than its input.
fn quantised_heads() -> Step {
    Step::Heads { extent: 0, heads: 5, plain: 3, value: 4, rank: 32, ty: TensorType::Q8_0 }
}

/// Returns the steps for gate and up, and for down.
fn four_bits() -> Vec<Step> {
    vec![
        Step::Mxfp4 { blocks: 0, scales: 2, rows: 40, row_blocks: 3, turns: 2 },
        Step::Mxfp4 { blocks: 1, scales: 3, rows: 60, row_blocks: 3, turns: 1 },
    ]
}

impl Model {
    /// Creates a model. Layer 0 is dense, and the other layers have experts of two sizes. The last layer's experts and
    /// a part of layers 1 and 2 need a relayout. Blocks lie at odd offsets in two files, and the three parts of an
    /// expert are far apart.
    pub fn new(seed: u64) -> Model {
        let mut random = Random::new(seed);
        let mut ends = [333_u64, 77];
        let mut extent = |file: usize, length: u64| {
            let extent = Extent { file: FileIndex(file as u32), offset: ends[file], length };
            ends[file] += length + 5;
            extent
        };
        let mut dense: Vec<Block> = Vec::new();
        let mut experts: Vec<Vec<Block>> = Vec::new();
        for layer in 0..LAYERS {
            let mut block = Block::from(vec![extent(0, 9000 + 100 * u64::from(layer))]);
            match layer {
                1 => block.push_relayout(&[extent(1, 700)], vec![heads()]),
                2 => block.push_relayout(&[extent(1, 1190)], vec![quantised_heads()]),
                _ => block.push(extent(1, 700)),
            };
            dense.push(block);
            let bytes = if layer % 2 == 0 { 5001 } else { 3002 };
            let count = if layer == 0 { 0 } else { EXPERTS };
            if layer == LAYERS - 1 {
                let mut expert = |_| {
                    let lengths = [1920, 2880, 120, 180];
                    let extents = lengths.map(|length| extent(length as usize / 16 % 2, length));
                    let mut block = Block::default();
                    block.push_relayout(&extents, four_bits());
                    block
                };
                experts.push((0..count).map(&mut expert).collect());
                continue;
            }
            let mut of_layer = vec![Block::default(); count as usize];
            for part in 0..3 {
                for expert in &mut of_layer {
                    expert.push(extent(part % 2, bytes));
                }
            }
            experts.push(of_layer);
        }
        dense.push(vec![extent(1, 15_000)].into());
        dense.push(vec![extent(1, 12_000)].into());
        let image = |end: u64| (0..end + 10).map(|_| random.next() as u8).collect();
        let images = ends.into_iter().map(image).collect();
        let blocks = ModelBlocks { dense, experts, experts_per_token: PER_TOKEN };
        Model { blocks, images }
    }

    pub fn block(&self, block: BlockId) -> &Block {
        match block {
            BlockId::Dense(index) => &self.blocks.dense[index as usize],
            BlockId::Expert(layer, expert) => {
                &self.blocks.experts[layer.0 as usize][expert.0 as usize]
            }
        }
    }

    /// Checks that every part of a lease has exactly the file's bytes, or the result of their relayout.
    pub fn check(&self, residency: &Residency, lease: &Lease) {
        let parts: Vec<&[u8]> =
            (0..residency.parts(lease)).map(|part| residency.bytes(lease, part)).collect();
        self.check_parts(lease.block(), &parts);
    }

    /// Checks that these are a block's parts.
    pub fn check_parts<Part: AsRef<[u8]>>(&self, block: BlockId, parts: &[Part]) {
        let of = self.block(block);
        let read = |extent: &Extent| {
            let image = &self.images[extent.file.0 as usize];
            &image[extent.offset as usize..extent.end() as usize]
        };
        let read: Vec<&[u8]> = of.extents.iter().map(read).collect();
        let wanted = match &of.relayout {
            None => read.concat(),
            Some(relayout) => {
                let mut made = vec![0; relayout.bytes()];
                for share in relayout.shares(usize::MAX) {
                    let out = share.out.clone();
                    relayout.make(&share, &read[relayout.extents.clone()], &mut made[out]);
                }
                let (before, behind) =
                    (&read[..relayout.extents.start], &read[relayout.extents.end..]);
                [before.concat(), made, behind.concat()].concat()
            }
        };
        let lengths: Vec<u64> = parts.iter().map(|part| part.as_ref().len() as u64).collect();
        assert_eq!(lengths, of.part_bytes(), "{block}");
        let mut rest = &wanted[..];
        for (number, part) in parts.iter().enumerate() {
            let (wanted, behind) = rest.split_at(part.as_ref().len());
            assert!(part.as_ref() == wanted, "{block}, part {number}");
            rest = behind;
        }
    }

    pub fn simulated(&self, ram: Option<u64>, policy: PolicyKind, faults: FaultPlan) -> Residency {
        let files = FileSet::in_memory(self.images.clone());
        let options = EngineOptions { stall_timeout: Duration::from_secs(2), ..small_requests() };
        self.residency(ram, policy, &files, |_| {
            open_simulated_engine(
                &files,
                &options,
                DiskModel::default(),
                &VirtualClock::default(),
                faults,
            )
            .unwrap()
        })
    }

    /// Creates a residency over real files, read by io_uring or `pread`.
    pub fn real(
        &self,
        kind: IoKind,
        folder: &std::path::Path,
        ram: Option<u64>,
        policy: PolicyKind,
        faults: Option<FaultPlan>,
    ) -> Residency {
        let path = |index: usize| folder.join(format!("{index}.bin"));
        let paths: Vec<_> = (0..self.images.len()).map(path).collect();
        for (path, image) in paths.iter().zip(&self.images) {
            std::fs::write(path, image).unwrap();
        }
        let files = FileSet::open(&paths).unwrap();
        // Only a test of a fault waits for the end of the time. Other reads may be slow on a busy machine.
        let stall_timeout = Duration::from_secs(if faults.is_some() { 1 } else { 60 });
        let options = EngineOptions { stall_timeout, ..small_requests() };
        self.residency(ram, policy, &files, |arena| match faults {
            Some(faults) => open_faulty_engine(kind, &files, arena, &options, faults).unwrap(),
            None => open_engine(kind, &files, arena, &options).unwrap(),
        })
    }

    fn residency(
        &self,
        ram: Option<u64>,
        policy: PolicyKind,
        files: &FileSet,
        engine: impl FnOnce(&Arena) -> Box<dyn ReadEngine>,
    ) -> Residency {
        let plan = Budget::plan(&self.blocks, ram, 0, policy).unwrap();
        let arena = Arena::reserve(plan.arena_bytes as usize).unwrap();
        let engine = engine(&arena);
        let residency = Residency::new(&self.blocks, plan, files, &arena, engine).unwrap();
        assert_eq!(arena.used_bytes(), arena.bytes(), "the plan's bytes are the slots' bytes");
        residency
    }

    /// Returns budgets from the smallest to one that holds everything.
    pub fn budgets(&self, count: u64) -> Vec<Option<u64>> {
        let smallest = Budget::smallest(&self.blocks, 0);
        let all = Budget::plan(&self.blocks, None, 0, PolicyKind::LAYER_LRU).unwrap();
        let all = all.arena_bytes + all.reserved_bytes;
        let between = (0..count).map(|step| Some(smallest + (all - smallest) * step / (count - 1)));
        between.chain([None]).collect()
    }
}

/// Returns options with requests so small that a block takes several, and so many retries that only lasting faults are
/// reported.
fn small_requests() -> EngineOptions {
    EngineOptions {
        request_bytes: 4096,
        queue_depth: 8,
        background_depth: 4,
        retries: 12,
        relayout_bytes: 5100,
        ..Default::default()
    }
}

/// Runs one decoder step: every layer's dense block and experts, then the head. Checks all bytes.
pub fn step(
    model: &Model,
    residency: &mut Residency,
    batches: &[Vec<ExpertIndex>],
) -> Result<(), StreamError> {
    for layer in 0..LAYERS {
        let dense = residency.dense(layer)?;
        model.check(residency, &dense);
        drop(dense);
        if !batches[layer as usize].is_empty() {
            batch(model, residency, LayerIndex(layer), &batches[layer as usize])?;
        }
    }
    for head in LAYERS..model.blocks.dense.len() as u32 {
        let dense = residency.dense(head)?;
        model.check(residency, &dense);
    }
    Ok(())
}

/// Runs one layer's batch, in as many chunks as it takes. Checks that every expert arrives exactly once.
pub fn batch(
    model: &Model,
    residency: &mut Residency,
    layer: LayerIndex,
    experts: &[ExpertIndex],
) -> Result<(), StreamError> {
    residency.begin_experts(layer, experts)?;
    let (mut pass, mut seen) = (Vec::new(), Vec::new());
    while residency.next_experts(&mut pass)? {
        assert!(!pass.is_empty());
        for (expert, lease) in pass.drain(..) {
            assert_eq!(lease.block(), BlockId::Expert(layer, expert));
            model.check(residency, &lease);
            seen.push(expert);
        }
    }
    residency.end_experts();
    seen.sort_unstable();
    let mut wanted = experts.to_vec();
    wanted.sort_unstable();
    assert_eq!(seen, wanted);
    Ok(())
}

/// Returns the experts that a token or a prompt chooses in every layer.
pub fn routing(random: &mut Random, per_layer: usize) -> Vec<Vec<ExpertIndex>> {
    (0..LAYERS)
        .map(|layer| if layer == 0 { Vec::new() } else { random.experts(EXPERTS, per_layer) })
        .collect()
}
