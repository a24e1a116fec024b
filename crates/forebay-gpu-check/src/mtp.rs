//! The layer that predicts further tokens: its logits against the CPU's, and answers with its proposals against answers without.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use forebay_engine::{
    CpuOffload, DeviceChoice, GenerateOptions, MtpStatistics, Session, SessionOptions,
};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_model::sampling::Sampling;
use forebay_store::OutputFile;

use crate::harness::Outcome;
use crate::proposing::{GLM, QWEN, SOME, alike, formulas};
use crate::sessions::{CONTEXT, open, open_smallest};

/// Tokens of a prompt and of an answer. The first passes of an answer are queued kernel by kernel, and the later ones are CUDA graphs.
const PROMPT: [u32; 7] = [3, 17, 90, 41, 41, 5, 77];
const ANSWER: usize = 28;

/// Synthetic model with recurrent layers and experts.
const SHAPE: &str = "qwen3.6-tiny";

fn options(ordinal: usize) -> SessionOptions {
    SessionOptions {
        device: DeviceChoice::Cuda(ordinal),
        context: Some(CONTEXT),
        cpu_offload: CpuOffload::Never,
        mtp: true,
        ..SessionOptions::default()
    }
}

/// Compares logits of proposals in f32 with those of the CPU, and answers with proposals with those without: resident, and with slots
/// for only some of the experts.
///
/// # Errors
/// Returns an error if a model cannot be opened, or if no proposal or all of them were accepted.
pub fn check(ordinal: usize) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for name in [QWEN, GLM] {
        worst = worst.worse(check_logits(&formulas(name), ordinal)?.at(name));
        let model = alike(name, SOME);
        let with = options(ordinal);
        let resident = |options: &SessionOptions| open(model.path(), options.clone());
        worst = worst.worse(same(&with, &resident)?.at(name));
        let without_graphs = SessionOptions { cuda_graphs: false, ..with.clone() };
        worst = worst.worse(same(&without_graphs, &resident)?.at(name).at("without graphs"));
        let exact = SessionOptions { exact: true, ..with.clone() };
        worst = worst.worse(same(&exact, &resident)?.at(name).at("exact"));
        for more in [0, 60_000].into_iter().filter(|_| name == GLM) {
            let slots = |options: &SessionOptions| with_slots(model.path(), options, more);
            let compared = same(&with, &slots)?;
            worst = worst.worse(compared.at(name).at(&format!("slots in {more} bytes more")));
        }
    }
    // Recurrent layers and slots together. Random layers propose nothing that fits.
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let recipe = SynthOptions { mtp: true, ..SynthOptions::default() };
    synthesize(SHAPE, OutputFile::create(&path)?, &recipe, &mut |_, _| true)?;
    for more in [0, 2_000_000] {
        let slots = |options: &SessionOptions| with_slots(&path, options, more);
        let (compared, of) = answers(&options(ordinal), &slots)?;
        ensure!(of.rows > of.passes + of.proposals, "nothing was computed again: {of:?}");
        worst = worst.worse(compared.at(SHAPE).at(&format!("slots in {more} bytes more")));
    }
    Ok(worst)
}

/// Compares the layer's logits in f32 with references, of which the last row follows from the token `next`, and answers with proposals with those without: resident, and with slots for
/// few of the experts.
///
/// # Errors
/// Returns an error if the model cannot be opened.
pub fn check_references(
    path: &Path,
    ids: &[u32],
    next: u32,
    expected: &[f32],
    ordinal: usize,
) -> Result<Outcome> {
    let exact = SessionOptions { exact: true, ..options(ordinal) };
    let mut session = open(path, exact)?;
    let (_, mut predicted) = session.logits_and_predictions(ids, None)?;
    // The session's own last row follows from the likeliest token, which is another one for quantised weights.
    predicted.truncate(predicted.len() - session.vocab_size());
    predicted.extend(session.proposal_logits(&[ids, &[next]].concat(), ids.len())?);
    let expected: Vec<f64> = expected.iter().map(|value| f64::from(*value)).collect();
    let mut worst = Outcome::of(&predicted, &expected, |_| 1.0, 1e-3);
    let resident = |options: &SessionOptions| open(path, options.clone());
    worst = worst.worse(answers(&options(ordinal), &resident)?.0);
    let slots = |options: &SessionOptions| with_slots(path, options, 0);
    Ok(worst.worse(answers(&options(ordinal), &slots)?.0.at("slots")))
}

/// Opens a model with `more` bytes than the least VRAM, in which only some of the experts have slots.
fn with_slots(path: &Path, options: &SessionOptions, more: u64) -> Result<Session> {
    let (session, _) = open_smallest(path, options, more)?;
    let slots = session.slots().context("all experts fit")?;
    ensure!(more == 0 || slots.kept_slots() > 0, "{more} bytes keep no expert");
    Ok(session)
}

fn check_logits(path: &Path, ordinal: usize) -> Result<Outcome> {
    let ids: Vec<u32> = PROMPT.iter().copied().cycle().take(40).collect();
    let exact = SessionOptions { exact: true, ..options(ordinal) };
    let on_cpu = SessionOptions {
        device: DeviceChoice::Cpu,
        cpu_offload: CpuOffload::Auto,
        ..exact.clone()
    };
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for prompt in [1, 2, 33] {
        let expected = open(path, on_cpu.clone())?.proposal_logits(&ids, prompt)?;
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        let found = open(path, exact.clone())?.proposal_logits(&ids, prompt)?;
        worst = worst.worse(Outcome::of(&found, &expected, |_| 1.0, 1e-4));
    }
    Ok(worst)
}

/// Compares answers of sessions that `open` opens, in which some proposals must be accepted and some refused.
fn same(
    options: &SessionOptions,
    open: &dyn Fn(&SessionOptions) -> Result<Session>,
) -> Result<Outcome> {
    let (compared, of) = answers(options, open)?;
    ensure!(of.accepted > 0 && of.accepted < of.proposals, "{of:?}");
    Ok(compared)
}

/// Compares answers with proposals with those without, and returns what became of the proposals.
fn answers(
    options: &SessionOptions,
    open: &dyn Fn(&SessionOptions) -> Result<Session>,
) -> Result<(Outcome, MtpStatistics)> {
    let usual = Sampling { seed: 5, ..Sampling::default() };
    let penalties = Sampling { repeat_penalty: 1.2, presence_penalty: 0.4, ..usual.clone() };
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let mut all = MtpStatistics::default();
    for sampling in [Sampling::greedy(), usual, penalties] {
        let limits = GenerateOptions::exactly(ANSWER, sampling);
        let mut answers = Vec::new();
        for mtp in [true, false] {
            let mut session = open(&SessionOptions { mtp, ..options.clone() })?;
            let mut tokens = Vec::new();
            for prompt in [&PROMPT[..], &PROMPT[..2]] {
                let go_on = &mut |_| ControlFlow::Continue(());
                tokens.extend(session.generate(prompt, &limits, go_on)?.tokens);
            }
            let of = session.statistics().mtp.unwrap_or_default();
            all.proposals += of.proposals;
            all.accepted += of.accepted;
            all.passes += of.passes;
            all.rows += of.rows;
            answers.push(tokens);
        }
        worst = worst.worse(Outcome::same(&answers[0], &answers[1]));
    }
    Ok((worst, all))
}
