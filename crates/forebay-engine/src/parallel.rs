//! Measurement of several sequences that run together.

use std::ops::ControlFlow;
use std::time::Instant;

use forebay_model::sampling::Sampling;
use forebay_ops::RowKind;
use forebay_stream::Residency;
use serde::Serialize;

use crate::engine::{Event, Request};
use crate::kv::SequenceId;
use crate::runner::{Logits, Outputs, Rows};
use crate::statistics::WeightUse;
use crate::{Engine, EngineError, GenerateOptions, Session};

/// Measurements of one run of several sequences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ParallelRun {
    pub sequences: usize,
    /// Tokens of the prompt of each sequence.
    pub prompt_tokens: usize,
    /// Tokens that each sequence generates.
    pub generate_tokens: usize,
    pub prompt_seconds: f64,
    pub generate_seconds: f64,
    /// Prompt tokens of all sequences per second.
    pub prompt_tokens_per_second: f64,
    /// Generated tokens of all sequences per second.
    pub generate_tokens_per_second: f64,
    /// Generated tokens of one sequence per second.
    pub generate_tokens_per_second_each: f64,
    /// Seconds from the start until the prompt of a sequence is processed, on average over the sequences.
    pub first_token_seconds: f64,
    /// Experts that a pass of generated tokens uses, and those of them that were not in memory, over all layers. `None` if
    /// no residency counts them.
    pub experts_per_pass: Option<f64>,
    pub missing_experts_per_pass: Option<f64>,
    /// Sequences that generate in one pass, on average: fewer than run together if an [`Engine`] chose so.
    pub generating_per_pass: f64,
}

impl Engine<'_> {
    /// Measures `sequences` requests that come at once, with the engine's choice of how many of them generate in a pass.
    /// Rates of generated tokens are those of passes without prompt tokens. Ids of prompts are pseudo-random.
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the context or if a read fails.
    pub fn bench_parallel(
        &mut self,
        sequences: usize,
        prompt_tokens: usize,
        generate_tokens: usize,
        seed: u64,
    ) -> Result<ParallelRun, EngineError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let (sender, firsts) = std::sync::mpsc::channel();
        for _ in 0..sequences {
            let prompt = self.session().random_ids(prompt_tokens.max(1), &mut random);
            let options = GenerateOptions::exactly(generate_tokens, Sampling::greedy());
            let sender = sender.clone();
            let sink = Box::new(move |event| {
                if let Event::Finished { statistics, .. } = event {
                    let _ = sender.send(statistics.first_token_seconds.unwrap_or(0.0));
                }
                ControlFlow::Continue(())
            });
            self.submit(Request { prompt, options, ..Request::default() }, sink)?;
        }
        let (before, experts_before) = (self.statistics(), self.session().experts_so_far());
        self.drain()?;
        let now = self.statistics();
        let passes = (now.generate_passes - before.generate_passes) as f64;
        let rows = (now.generate_rows - before.generate_rows) as f64;
        let generate_seconds = now.generate_seconds - before.generate_seconds;
        let prompt_seconds = now.prompt_seconds - before.prompt_seconds;
        let prompts = (now.prompt_tokens - before.prompt_tokens) as f64;
        let experts = experts_before.zip(self.session().experts_so_far());
        let counted = |of: usize| experts.map(|(before, now)| per(now[of] - before[of], passes));
        Ok(ParallelRun {
            sequences,
            prompt_tokens,
            generate_tokens,
            prompt_seconds,
            generate_seconds,
            prompt_tokens_per_second: per(prompts, prompt_seconds),
            generate_tokens_per_second: per(rows, generate_seconds),
            generate_tokens_per_second_each: per(passes, generate_seconds),
            first_token_seconds: firsts.try_iter().sum::<f64>() / sequences.max(1) as f64,
            experts_per_pass: counted(0),
            missing_experts_per_pass: counted(1),
            generating_per_pass: per(rows, passes),
        })
    }
}

impl Session {
    /// Measures `sequences` sequences that run together: the time of their prompts, then of `generate_tokens` passes with one
    /// row for each. Ids are pseudo-random, as in [`Session::bench`].
    ///
    /// # Errors
    /// Returns an error if the tokens do not fit the context or if a read fails.
    ///
    /// # Panics
    /// Panics if the session has no room for so many sequences ([`Session::sequences`]), or if there are none.
    pub fn bench_parallel(
        &mut self,
        sequences: usize,
        prompt_tokens: usize,
        generate_tokens: usize,
        seed: u64,
    ) -> Result<ParallelRun, EngineError> {
        assert!((1..=self.sequences()).contains(&sequences), "{sequences} sequences");
        self.end_sequence();
        let ids: Vec<SequenceId> = (0..sequences).map(|_| self.runner.begin_empty()).collect();
        let measured = self.measure(&ids, prompt_tokens, generate_tokens, seed);
        for id in ids {
            self.runner.end(id);
        }
        self.begin_sequence();
        measured
    }

    /// Returns the number of sequences that can run together.
    pub fn sequences(&self) -> usize {
        let backend = self.runner.decoder.backend();
        backend.tables().min(backend.decode_rows())
    }

    fn measure(
        &mut self,
        ids: &[SequenceId],
        prompt_tokens: usize,
        generate_tokens: usize,
        seed: u64,
    ) -> Result<ParallelRun, EngineError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let backend = self.runner.decoder.backend();
        let (batch, few) = (backend.batch_tokens(), backend.largest_count().min(1));
        let (mut logits, mut largest) = (Vec::new(), Vec::new());
        let mut run = |session: &mut Session, rows: &[Rows<'_>]| {
            logits.clear();
            largest.clear();
            let mut output = match few {
                0 => Outputs::Logits(&mut logits),
                count => Outputs::Largest(count, &mut largest),
            };
            session.runner.pass(rows, &mut output, None, None)
        };

        let started = Instant::now();
        let mut first_tokens = 0.0;
        let prompts: Vec<Vec<u32>> =
            ids.iter().map(|_| self.random_ids(prompt_tokens, &mut random)).collect();
        // All prompts, one after the other, cut into passes.
        let mut done = vec![0; ids.len()];
        while done.iter().any(|done| *done < prompt_tokens) {
            let mut left = batch;
            let mut rows = Vec::new();
            for ((id, prompt), done) in ids.iter().zip(&prompts).zip(&mut done) {
                let count = (prompt_tokens - *done).min(left);
                if count == 0 {
                    continue;
                }
                let tokens = &prompt[*done..*done + count];
                *done += count;
                left -= count;
                let logits = if *done == prompt_tokens { Logits::Last } else { Logits::None };
                rows.push(Rows { sequence: *id, kind: RowKind::Prompt, tokens, logits });
            }
            run(self, &rows)?;
            let ended = rows.iter().filter(|rows| rows.logits == Logits::Last).count();
            first_tokens += ended as f64 * started.elapsed().as_secs_f64();
        }
        let prompt_seconds = started.elapsed().as_secs_f64();
        if prompt_tokens > 0 {
            self.runner.decoder.end_prompt(prompt_tokens * ids.len());
        }

        let before = self.experts_so_far();
        let started = Instant::now();
        for _ in 0..generate_tokens {
            let tokens = self.random_ids(ids.len(), &mut random);
            let row = |(id, token): (&SequenceId, _)| Rows {
                sequence: *id,
                kind: RowKind::Decode,
                tokens: std::slice::from_ref(token),
                logits: Logits::Last,
            };
            let rows: Vec<Rows<'_>> = ids.iter().zip(&tokens).map(row).collect();
            run(self, &rows)?;
            self.runner.decoder.end_token();
        }
        let generate_seconds = started.elapsed().as_secs_f64();
        let per_pass = before.zip(self.experts_so_far()).filter(|_| generate_tokens > 0);
        let per_pass = per_pass.map(|(before, now)| {
            [now[0] - before[0], now[1] - before[1]].map(|x| x / generate_tokens as f64)
        });
        Ok(ParallelRun {
            sequences: ids.len(),
            prompt_tokens,
            generate_tokens,
            prompt_seconds,
            generate_seconds,
            prompt_tokens_per_second: per((prompt_tokens * ids.len()) as f64, prompt_seconds),
            generate_tokens_per_second: per((generate_tokens * ids.len()) as f64, generate_seconds),
            generate_tokens_per_second_each: per(generate_tokens as f64, generate_seconds),
            first_token_seconds: first_tokens / ids.len() as f64,
            experts_per_pass: per_pass.map(|of| of[0]),
            missing_experts_per_pass: per_pass.map(|of| of[1]),
            generating_per_pass: ids.len() as f64,
        })
    }

    /// Returns pseudo-random ids of tokens.
    pub(crate) fn random_ids(&self, count: usize, random: &mut fastrand::Rng) -> Vec<u32> {
        let vocabulary = self.vocab_size().max(1) as u32;
        (0..count).map(|_| random.u32(..vocabulary)).collect()
    }

    /// Returns the number of experts that passes have used so far, and how many of them were not in memory. Returns `None` if
    /// there are no experts, or if all are in VRAM.
    pub(crate) fn experts_so_far(&self) -> Option<[f64; 2]> {
        let decoder = &self.runner.decoder;
        decoder.architecture().expert_layers().next()?;
        decoder.residency()?;
        let WeightUse { expert_hits, expert_misses, .. } = self.weight_use();
        Some([expert_hits + expert_misses, expert_misses])
    }

    /// Returns the use of weights so far.
    pub(crate) fn weight_use(&self) -> WeightUse {
        let backend = self.runner.decoder.backend();
        let residency = backend.residency();
        let [hits, misses, read] = residency.map_or([0; 3], Residency::hits_misses_and_bytes);
        let mut used = WeightUse {
            expert_hits: hits as f64,
            expert_misses: misses as f64,
            bytes_from_disk: read as f64,
            ..WeightUse::default()
        };
        if let Some(experts) = backend.device_experts() {
            used.expert_hits = experts.tier.hits as f64;
            used.expert_misses = experts.tier.misses as f64;
            used.bytes_from_ram = experts.bytes_copied as f64;
            used.disk_wait_seconds = experts.answer_wait_seconds;
            used.copy_wait_seconds = experts.copy_seconds;
        } else if let Some(sub_layers) = backend.device_sub_layers() {
            let passes = [sub_layers.few_tokens, sub_layers.many_tokens];
            used.bytes_from_ram = sub_layers.bytes_copied as f64;
            used.disk_wait_seconds = passes.iter().map(|of| of.disk_wait_seconds).sum();
            used.copy_wait_seconds = passes.iter().map(|of| of.copy_wait_seconds).sum();
        } else {
            used.disk_wait_seconds = residency.map_or(0.0, Residency::wait_seconds);
        }
        used
    }
}

/// Returns an amount per second or pass, or 0 if there were none.
fn per(amount: f64, of: f64) -> f64 {
    if of > 0.0 { amount / of } else { 0.0 }
}
