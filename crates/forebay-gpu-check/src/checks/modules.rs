//! Weights of modules that come into VRAM a part at a time: from RAM and from a file, coded and plain, staged and not.

use std::io::Write as _;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use forebay_codec::{Float, Weights};
use forebay_format::{FileIndex, TensorType};
use forebay_modules::{
    CudaDevice, CudaOptions, CudaWeights, Device as _, Expansion, FileForm, GroupOptions,
    GroupTensor, Streamer, StreamerOptions, TensorFile, TensorFrom, WeightOptions,
    WeightSource as _, WeightsBuilder,
};
use forebay_store::{Extent, FileSet};

use crate::harness::{Check, Context, Outcome};
use crate::random::{Random, random_weights};

pub fn checks() -> Vec<Check> {
    let check = |name: &str, from_file, codes| {
        Check::new(name, move |context| streamed(context, from_file, codes))
    };
    vec![
        check("modules from RAM, coded", false, true),
        check("modules from RAM, plain", false, false),
        check("modules from a file, coded in RAM", true, true),
        check("modules from a file, plain", true, false),
        Check::new("modules from VRAM, coded", |context| kept(context, false)),
        Check::new("modules from VRAM, quantised", |context| kept(context, true)),
    ]
}

const MIB: usize = 1 << 20;
/// Passes over all modules.
const PASSES: usize = 4;

/// Returns weights of a type as a model has them: small numbers.
fn weights(random: &mut Random, of: Option<Float>, bytes: usize) -> Vec<u8> {
    match of {
        Some(Float::Bf16) => (0..bytes / 2)
            .flat_map(|_| ((random.unit().to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        Some(Float::F16) => {
            (0..bytes / 2).flat_map(|_| half::f16::from_f32(random.unit()).to_le_bytes()).collect()
        }
        _ => (0..bytes).map(|_| random.next() as u8).collect(),
    }
}

/// Returns groups of one or two tensors, and what their weights are.
fn groups(random: &mut Random) -> Vec<Vec<(Option<Float>, Vec<u8>)>> {
    let kinds = [Some(Float::Bf16), Some(Float::F16), Some(Float::F8E4M3), None];
    // Larger than a slot of the ring, than a chunk, and smaller than what is read from files.
    let sizes = [11 * MIB, 5 * MIB + 6, MIB, 400 << 10, 1000];
    let mut tensor = |group: usize, index: usize| {
        let kind = kinds[(group + index) % kinds.len()];
        (kind, weights(random, kind, sizes[(group + 3 * index) % sizes.len()]))
    };
    (0..10).map(|group| (0..1 + group % 2).map(|index| tensor(group, index)).collect()).collect()
}

fn device(bytes: u64) -> Result<Arc<CudaDevice>> {
    let options = CudaOptions { ordinal: 0, bytes, stage_bytes: 0, pinned_bytes: 0, threads: 2 };
    Ok(Arc::new(CudaDevice::open(&options)?))
}

/// Returns where the tensors of each group begin in it.
fn places(builder: &WeightsBuilder, groups: usize) -> Vec<Vec<u64>> {
    let of = |group| builder.tensors(group).iter().map(|tensor| tensor.at).collect();
    (0..groups).map(of).collect()
}

/// Weights of a file that become floats.
struct Quantised {
    expansion: Expansion,
    blocks: Vec<u8>,
    floats: Vec<u8>,
}

/// Returns weights of some types. Chunks of some are no multiples of 16 bytes.
fn quantised(random: &mut Random) -> Result<Vec<Quantised>> {
    use TensorType as T;
    let types = [T::Q4_K, T::Q3_K, T::Q8_0, T::IQ4_XS, T::F32];
    let types = types.iter().zip([T::BF16, T::F16, T::F32].iter().cycle());
    let tensor = |(from, to): (&TensorType, &TensorType)| {
        let blocks = random_weights(*from, 3 * MIB + 512, random);
        let expansion = Expansion::new(*from, *to).context("floats")?;
        let mut floats = vec![0; (3 * MIB + 512) * to.block_bytes()];
        expansion.decode(&blocks, &mut floats)?;
        Ok(Quantised { expansion, blocks, floats })
    };
    types.map(tensor).collect()
}

/// Weights that stay coded, or quantised, in VRAM, and are decoded from there.
fn kept(context: &Context, is_quantised: bool) -> Result<Outcome> {
    let mut random = Random::new(6);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let options = WeightOptions { ram: 60 * MIB as u64, threads: 2, codes: true };
    let mut builder = WeightsBuilder::new(options);
    let mut all: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut file = tempfile::NamedTempFile::new()?;
    if is_quantised {
        let tensors = quantised(&mut random)?;
        tensors.iter().try_for_each(|of| file.write_all(&of.blocks))?;
        file.flush()?;
        let source = builder.add_source(FileSet::open(&[file.path()])?);
        let mut offset = 0;
        for Quantised { expansion, blocks, floats } in tensors {
            let extent = Extent { file: FileIndex(0), offset, length: blocks.len() as u64 };
            let from = TensorFile { source, extent, form: FileForm::Other(expansion) };
            builder.add(&[GroupTensor { from: TensorFrom::File(from), weights: None }])?;
            offset += blocks.len() as u64;
            all.push(vec![floats]);
        }
    } else {
        for group in groups(&mut random) {
            let tensors = group.iter().map(|(kind, bytes)| GroupTensor {
                from: TensorFrom::Ram(bytes),
                weights: kind.map(Weights::Plain),
            });
            builder.add(&tensors.collect::<Vec<_>>())?;
            all.push(group.into_iter().map(|(_, bytes)| bytes).collect());
        }
    }
    let places = places(&builder, all.len());
    let weights = builder.finish()?;
    let device = device(60 * MIB as u64)?;
    let memory = device.memory().ptr::<u8>();
    for (group, tensors) in all.iter().enumerate() {
        let bytes = weights.group_bytes(group);
        let room = weights.coded_bytes(group).context("the chunks are known")?;
        let (first, second) = (0..bytes, 20 * MIB as u64..20 * MIB as u64 + bytes);
        let keep = |room| 40 * MIB as u64..40 * MIB as u64 + room;
        let mut staged = CudaWeights::from(weights.take(group)?);
        device.stage(&mut staged)?;
        let loaded = device.load(staged, first, Some(keep(room)), &[])?;
        let coded = loaded.coded.context("there is room")?;
        let ready = device.decode(&coded, second.clone(), &[loaded.ready])?;
        device.reach(&ready)?;
        for (place, expected) in places[group].iter().zip(tensors) {
            for from in [0, second.start] {
                let from = memory.offset((from + place) as usize);
                let found = context.gpu.download::<u8>(from, expected.len())?;
                let case = format!("group {group}");
                worst = worst.worse(Outcome::same(&found, expected).at(&case));
            }
        }
        let weights = weights.take(group)?.into();
        let loaded = device.load(weights, second, Some(keep(room / 2)), &[])?;
        ensure!(loaded.coded.is_none(), "weights stay coded without room for them");
        device.reach(&loaded.ready)?;
    }
    ensure!(!device.is_damaged()?, "weights are damaged");
    Ok(worst)
}

fn streamed(context: &Context, from_file: bool, codes: bool) -> Result<Outcome> {
    let mut random = Random::new(5);
    let groups = groups(&mut random);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let mut file = tempfile::NamedTempFile::new()?;
    let mut builder =
        WeightsBuilder::new(WeightOptions { ram: 60 * MIB as u64, threads: 2, codes });
    for tensor in groups.iter().flatten() {
        file.write_all(&tensor.1)?;
    }
    file.flush()?;
    let source = from_file.then(|| FileSet::open(&[file.path()])).transpose()?;
    let source = source.map(|files| builder.add_source(files));
    let mut offset = 0;
    for group in &groups {
        let tensor = |(kind, bytes): &(Option<Float>, Vec<u8>)| {
            let length = bytes.len() as u64;
            let extent = Extent { file: FileIndex(0), offset, length };
            offset += length;
            (source.map(|source| TensorFile { source, extent, form: FileForm::Plain }), *kind)
        };
        let places: Vec<_> = group.iter().map(tensor).collect();
        let tensors = places.iter().zip(group).map(|((place, kind), (_, bytes))| GroupTensor {
            from: place.map_or(TensorFrom::Ram(bytes), TensorFrom::File),
            weights: kind.map(Weights::Plain),
        });
        builder.add(&tensors.collect::<Vec<_>>())?;
    }
    let places = places(&builder, groups.len());
    let weights = Arc::new(builder.finish()?);
    let bytes = 30 * MIB as u64;
    let device = device(bytes)?;
    let count = groups.len();
    let stream = Streamer::new(
        Arc::clone(&device),
        weights.clone(),
        StreamerOptions {
            groups: (0..count)
                .map(|at| GroupOptions { bytes: weights.group_bytes(at), stays: false })
                .collect(),
            units: (0..count).map(|at| vec![at]).collect(),
            predictions: vec![(0..count).collect()],
            bytes,
        },
    )?;
    let queue = context.gpu.compute_stream();
    let memory = device.memory().ptr::<u8>();
    for pass in 0..PASSES {
        stream.begin(0);
        for step in 0..count {
            // The last pass is in another order.
            let unit = if pass + 1 == PASSES { count - 1 - step } else { step };
            let at = stream.acquire(unit, queue, &mut || true)?[0];
            for ((_, expected), place) in groups[unit].iter().zip(&places[unit]) {
                let from = memory.offset((at + place) as usize);
                let found = context.gpu.download::<u8>(from, expected.len())?;
                let case = format!("pass {pass}, module {unit}");
                worst = worst.worse(Outcome::same(&found, expected).at(&case));
            }
            stream.release(unit, queue)?;
        }
        stream.end();
    }
    let plan = stream.predict(0, 0, 0)?.context("a pass was measured")?;
    ensure!(plan.seconds > 0.0, "{plan:?}");
    stream.close()?;
    ensure!(!device.is_damaged()?, "weights are damaged");
    ensure!(stream.statistics().loads > count as u64, "all weights stayed in VRAM");
    Ok(worst)
}
