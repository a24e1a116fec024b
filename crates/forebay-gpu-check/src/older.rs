//! DeepSeek files from older converters, which store the matrices for a head's keys and values in one tensor. The GPU
//! must split it as the CPU does.

use anyhow::Result;
use forebay_engine::{DeviceChoice, SessionOptions};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::OutputFile;

use crate::harness::Outcome;
use crate::logits::Distance;
use crate::models::Limits;
use crate::sessions::{CONTEXT, logits, open};

const SHAPE: &str = "deepseek-v3-tiny";
/// Quantisations to test: types stored as plain numbers, and types that are decoded.
const TYPES: [&str; 4] = ["BF16", "Q8_0", "Q4_K_M", "Q5_0"];

/// Compares logits, computed in f32 throughout, with those of the CPU.
///
/// # Errors
/// Returns an error if a model cannot be synthesised, opened or run.
pub fn check(ordinal: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let ids: Vec<u32> = (1..40).collect();
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for ty in TYPES {
        let path = folder.path().join(ty).with_extension("gguf");
        let recipe = SynthOptions {
            quantisation: Some(ty.into()),
            heads_in_one_tensor: true,
            ..SynthOptions::default()
        };
        synthesize(SHAPE, OutputFile::create(&path)?, &recipe, &mut |_, _| true)?;
        let [expected, found] = [DeviceChoice::Cpu, DeviceChoice::Cuda(ordinal)].map(|device| {
            let context = Some(CONTEXT);
            let options = SessionOptions { device, context, exact: true, ..Default::default() };
            let mut session = open(&path, options)?;
            Ok::<_, anyhow::Error>((logits(&mut session, &ids)?, session.vocab_size()))
        });
        let ((expected, vocabulary), (found, _)) = (expected?, found?);
        let distance = Distance::between(&expected, &found, vocabulary);
        worst = worst.worse(Limits::EXACT.judge(ty, &distance));
    }
    Ok(worst)
}
