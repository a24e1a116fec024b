//! DeepSeek's files of older converters, with what makes a head's keys and values in one tensor: taken apart on the GPU as on the
//! CPU.

use anyhow::Result;
use forebay_engine::{DeviceChoice, SessionOptions};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::OutputFile;

use crate::harness::Outcome;
use crate::logits::Distance;
use crate::models::Limits;
use crate::sessions::{CONTEXT, logits, open};

const SHAPE: &str = "deepseek-v3-tiny";
/// Of bytes as they are, and of types that are decoded.
const TYPES: [&str; 4] = ["BF16", "Q8_0", "Q4_K_M", "Q5_0"];

/// In f32 throughout, logits are the CPU's.
///
/// # Errors
/// Whatever goes wrong.
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
