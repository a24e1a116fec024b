//! Weights of modules that come into VRAM a part at a time: from RAM and from a file, coded and plain, staged and not.

use std::io::Write as _;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use forebay_codec::{Float, Weights};
use forebay_format::FileIndex;
use forebay_modules::{
    CudaDevice, CudaOptions, GroupOptions, GroupTensor, Streamer, StreamerOptions, TensorFile,
    TensorFrom, WeightOptions, WeightsBuilder,
};
use forebay_store::{Extent, FileSet};

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    let check = |name: &str, from_file, codes| {
        Check::new(name, move |context| streamed(context, from_file, codes))
    };
    vec![
        check("modules from RAM, coded", false, true),
        check("modules from RAM, plain", false, false),
        check("modules from a file, coded in RAM", true, true),
        check("modules from a file, plain", true, false),
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

fn streamed(context: &Context, from_file: bool, codes: bool) -> Result<Outcome> {
    let mut random = Random::new(5);
    let kinds = [Some(Float::Bf16), Some(Float::F16), Some(Float::F8E4M3), None];
    // Larger than a slot of the ring, than a chunk, and smaller than what is read from files.
    let sizes = [11 * MIB, 5 * MIB + 6, MIB, 400 << 10, 1000];
    let groups: Vec<Vec<(Option<Float>, Vec<u8>)>> = (0..10)
        .map(|group| {
            let tensor = |index: usize| {
                let kind = kinds[(group + index) % kinds.len()];
                (kind, weights(&mut random, kind, sizes[(group + 3 * index) % sizes.len()]))
            };
            (0..1 + group % 2).map(tensor).collect()
        })
        .collect();
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
            (source.map(|source| TensorFile { source, extent, compact: None }), *kind)
        };
        let places: Vec<_> = group.iter().map(tensor).collect();
        let tensors = places.iter().zip(group).map(|((place, kind), (_, bytes))| GroupTensor {
            from: place.map_or(TensorFrom::Ram(bytes), TensorFrom::File),
            weights: kind.map(Weights::Plain),
        });
        builder.add(&tensors.collect::<Vec<_>>())?;
    }
    let places: Vec<Vec<u64>> = (0..groups.len())
        .map(|group| builder.tensors(group).iter().map(|tensor| tensor.at).collect())
        .collect();
    let weights = Arc::new(builder.finish()?);
    let bytes = 30 * MIB as u64;
    let options = CudaOptions { ordinal: 0, bytes, pinned_bytes: 0, threads: 2 };
    let device = Arc::new(CudaDevice::open(&options)?);
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
