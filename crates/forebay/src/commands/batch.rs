//! The command `forebay batch`: a file of requests in, a file of answers out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use forebay_engine::engine::{EngineOptions, Latency, RequestEnd};
use forebay_engine::{Engine, EngineError, SessionOptions};
use forebay_model::ModelError;
use forebay_requests::{Choice, Identity, Prepared, Refusal, Update, sink};
use forebay_server::batches::{Journal, JournalError, Line, answered, is_error};
use forebay_store::{OutputError, Outputs};
use forebay_text::Tokenizer;
use serde_json::{Value, json};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::args::{BatchArgs, Parallel};
use crate::config;
use crate::failure::{Failure, Outcome, usage};
use crate::kv_disk;
use crate::open::{self, Sequences};
use crate::output;
use crate::outputs;
use crate::progress::StepProgress;
use crate::requests::{self, Defaults, endpoint};
use crate::session_plan;
use crate::tracing_file::TracingFile;

/// Longest time for which keys and values are written to `--kv-disk` at the end, and when the batch is interrupted.
const WRITE_KV: Duration = Duration::from_secs(60);
const WRITE_KV_INTERRUPTED: Duration = Duration::from_secs(2);

/// Least number of sequences that run together if `--parallel` is `auto` and memory has room for their contexts.
const PARALLEL: usize = 8;

/// A finished answer: number of the request, number of the choice, and the answer itself.
type Finished = (usize, usize, Choice);

pub fn run(args: BatchArgs) -> Outcome {
    args.mtp.refuse("batch")?;
    let mut options = config::session(&args.budget)?;
    options.kv_ram_bytes = args.kv.kv_ram;
    options.snapshot_every = args.kv.snapshot_every;
    if outputs::is_standard(&args.output) {
        return usage("-o - cannot be taken up again after an interrupt: name a file");
    }
    let (text, lines) = requests::read(&args.input)?;
    let mut path = args.output.as_os_str().to_owned();
    path.push(".partial");
    // Refuses an output that cannot be written, before any work. If a journal is beside an output, an earlier process may
    // have been killed between writing the one and removing the other.
    let exists = match outputs::create(&mut rules(&args)?, &args.output) {
        Ok(output) => {
            drop(output);
            None
        }
        Err(error @ OutputError::Exists { .. }) if Path::new(&path).exists() => Some(error),
        Err(error) => return Err(error.into()),
    };
    if args.output.metadata().is_ok_and(|about| !about.is_file()) {
        let out = args.output.display();
        return usage(format!(
            "-o {out} is no regular file: a batch that is interrupted needs one"
        ));
    }

    let hash = XxHash3_128::oneshot(text.as_bytes());
    let inspection = open::inspect(&args.model)?;
    // Choices count up from the seed, so seeds of neighbouring lines must be far apart.
    let seed =
        |number: usize| XxHash3_64::oneshot_with_seed(hash as u64, &(number as u64).to_le_bytes());
    let defaults = Defaults {
        max_tokens: args.max_tokens,
        context: options.context,
        special_tokens_in_messages: args.special_tokens_in_messages,
    };
    let all = requests::prepare(&inspection, &args.model, &lines, &defaults, seed)?;
    let longest = all.iter().flatten().map(Prepared::positions).max();
    options.context.get_or_insert(longest.unwrap_or(1).min(inspection.model.context_trained));

    let settings = settings(&args, &options, hash)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    // The answers are written when the trace is complete, so they would find its file.
    let absolute = |path: &Path| std::path::absolute(path).ok();
    if let Some(trace) = &args.trace_io
        && [args.output.as_path(), path.as_ref()].iter().any(|of| absolute(of) == absolute(trace))
    {
        return usage(format!("--trace-io {}: is the file for the answers", trace.display()));
    }
    let journal = Journal::open(path.as_ref(), settings, lines.len(), now, args.force);
    let mut journal = journal.map_err(refused_journal)?;
    if let Some(exists) = exists {
        if journal.answered() == lines.len() && is_written(&mut journal, &args.output)? {
            journal.remove()?;
            let answers = output::counted(lines.len(), "answer");
            output::tell!("{}: complete already, with {answers}", args.output.display());
            return Ok(());
        }
        journal.discard_if_empty();
        return Err(exists.into());
    }
    let before = journal.answered();
    if before > 0 {
        output::tell!("answered already: {before} of {} requests", lines.len());
    }
    let model = open::name(&args.model);
    let batch = Batch { lines: &lines, all: &all, hash, created: journal.created, model: &model };
    if journal.answered() < lines.len() {
        session_plan::follow(&args.model, &mut options);
        let done = batch.answer(&args, options, &mut journal);
        if let Err(failure) = done {
            let answered = journal.answered();
            if answered > 0 {
                output::tell!(
                    "answered: {answered} of {} requests; the same command continues from there",
                    lines.len()
                );
            }
            journal.discard_if_empty();
            return Err(failure);
        }
    }
    let errors = finish(journal, &args)?;
    let answers = output::counted(lines.len(), "answer");
    output::tell!("{}: {answers}", args.output.display());
    if errors > 0 {
        output::tell!(
            "note: {}, which say what is wrong with the request",
            if errors == 1 {
                "1 of them is an error".into()
            } else {
                format!("{errors} of them are errors")
            }
        );
    }
    Ok(())
}

/// Says what to do about a journal that cannot be used.
fn refused_journal(error: JournalError) -> Failure {
    let then = match error {
        JournalError::OtherBatch { .. } => "finish that one, remove the file, or give --force",
        JournalError::NoJournal { .. } => "remove it, or choose another -o",
        error => return error.into(),
    };
    Failure::Usage(format!("{error}: {then}"))
}

/// Writes all answers to the output, in the order of the requests, removes the journal and returns the number of errors.
fn finish(mut journal: Journal, args: &BatchArgs) -> Outcome<usize> {
    let mut stream = outputs::create(&mut rules(args)?, &args.output)?.into_stream();
    let mut errors = 0;
    journal.each(|answer| {
        errors += usize::from(is_error(answer));
        Ok::<_, anyhow::Error>(stream.write_all(answer)?)
    })?;
    stream.commit()?;
    journal.remove()?;
    Ok(errors)
}

/// Returns true if the output holds exactly the answers of the journal.
fn is_written(journal: &mut Journal, output: &Path) -> Outcome<bool> {
    let named = || output.display().to_string();
    let mut output = BufReader::new(File::open(output).with_context(named)?);
    let (mut is_same, mut found) = (true, Vec::new());
    journal.each(|answer| {
        found.clear();
        output.by_ref().take(answer.len() as u64).read_to_end(&mut found).with_context(named)?;
        is_same &= found == answer;
        Ok::<_, anyhow::Error>(())
    })?;
    Ok(is_same && output.read(&mut [0]).with_context(named)? == 0)
}

/// Returns the rules for the output.
fn rules(args: &BatchArgs) -> Outcome<Outputs> {
    let mut rules = outputs::begin(args.force, true)?;
    outputs::protect_model(&mut rules, &args.model);
    rules.protect(&args.input);
    Ok(rules)
}

/// Returns everything that the answers depend on. The number of sequences is not part of it, because a sequence's answer
/// does not depend on others.
fn settings(args: &BatchArgs, options: &SessionOptions, hash: u128) -> Outcome<Value> {
    let mut files = Vec::new();
    for file in forebay_format::model_files(&args.model) {
        let about = std::fs::metadata(&file).with_context(|| file.display().to_string())?;
        let changed = about.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let path = std::fs::canonicalize(&file).with_context(|| file.display().to_string())?;
        files.push(json!([path, about.len(), changed.map(|at| at.as_nanos().to_string())]));
    }
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "input": format!("{hash:032x}"),
        "model": files,
        "--max-tokens": args.max_tokens,
        "--special-tokens-in-messages": args.special_tokens_in_messages,
        "--ctx": options.context,
        "--device": format!("{:?}", options.device),
        "--kv-type": format!("{:?}", options.kv_cache),
        "--kv-disk-type": format!("{:?}", args.kv.kv_disk_type),
        "--exact": options.exact,
        "--cpu-experts": format!("{:?}", options.cpu_offload),
    }))
}

/// The requests of a batch.
struct Batch<'a> {
    lines: &'a [Line],
    all: &'a [Result<Prepared, Refusal>],
    hash: u128,
    created: u64,
    model: &'a str,
}

impl Batch<'_> {
    /// Answers all requests that the journal lacks.
    fn answer(&self, args: &BatchArgs, options: SessionOptions, journal: &mut Journal) -> Outcome {
        for (number, refusal) in self.all.iter().enumerate() {
            if let (Err(refusal), false) = (refusal, journal.has(number)) {
                self.refuse(number, refusal, journal)?;
            }
        }
        let left = (0..self.lines.len()).filter(|&number| !journal.has(number));
        let left: Vec<usize> = left.collect();
        if left.is_empty() {
            return Ok(());
        }
        let prepared = left.iter().filter_map(|number| self.all[*number].as_ref().ok());
        let answers = prepared.flat_map(|of| std::iter::repeat_n(of.positions(), of.choices));
        let mut answers: Vec<usize> = answers.collect();
        answers.sort_unstable_by_key(|positions| Reverse(*positions));
        // The KV cache has room for the largest of the answers, by the positions that each needs at most.
        let least = options.context.unwrap_or(0);
        let kv_tokens = |sequences| {
            let largest: usize = answers.iter().take(sequences).sum();
            Some(args.kv_tokens.unwrap_or(largest.max(least)))
        };
        let parallel = match args.parallel {
            Parallel::Auto => {
                let best = session_plan::best_sequences(&args.model, &options);
                Sequences::AtMost(best.unwrap_or(PARALLEL).max(PARALLEL).min(answers.len().max(1)))
            }
            Parallel::Fixed(number) => Sequences::Exactly(number),
        };
        let tracing = TracingFile::create(args.trace_io.as_deref(), &mut rules(args)?)?;
        let options = SessionOptions { recorder: tracing.recorder().cloned(), ..options };
        let kv_disk = kv_disk::open(&args.kv, &options)?;
        let session = open::for_engine(&options, parallel, &kv_tokens, &|options| {
            open::session(&args.model, options, "the longest request")
        })?;
        let mut engine = Engine::new(
            session,
            &EngineOptions { latency: Latency::Unbounded, ..EngineOptions::default() },
        );
        if let Some(disk) = kv_disk {
            engine.set_kv_disk(disk, self.model)?;
        }
        let answered = self.answer_with(&mut engine, left, journal);
        let limit = if answered.is_ok() { WRITE_KV } else { WRITE_KV_INTERRUPTED };
        let written = engine.write_kv(true, limit);
        let rounding_error = engine.kv_tiers().disk_rounding_error;
        let traced = tracing.finish(engine.into_session(), "batch");
        answered?;
        traced?;
        if rounding_error > 0.0 {
            output::tell!(
                "rounding for --kv-disk: errors of {:.2} % of the values (root mean square)",
                100.0 * rounding_error
            );
        }
        // All answers are there, so a device that fails now is no failure of the batch.
        if let Err(error) = written {
            output::tell!("warning: --kv-disk: {error}");
        }
        Ok(())
    }

    /// Answers these requests.
    fn answer_with(&self, engine: &mut Engine, left: Vec<usize>, journal: &mut Journal) -> Outcome {
        let tokenizer = engine.session().shared_tokenizer()?;
        // A few requests wait, so that the place of one that ends is taken at once.
        let queued = 2 * engine.running_max();
        let (sender, finished) = mpsc::channel::<Finished>();
        let mut open: HashMap<usize, Vec<Option<Choice>>> = HashMap::new();
        let progress = StepProgress::new("answered", left.len() as u64);
        let mut left = left.into_iter();
        let mut has_work = true;
        while has_work {
            while engine.load().0 < queued
                && let Some(number) = left.next()
            {
                let Ok(prepared) = &self.all[number] else { continue };
                match submit(engine, &tokenizer, number, prepared, &sender) {
                    Ok(()) => {
                        open.insert(number, (0..prepared.choices).map(|_| None).collect());
                    }
                    Err(refusal) => {
                        self.refuse(number, &refusal, journal)?;
                        progress.step();
                    }
                }
            }
            let stepped = engine.step();
            self.write_finished(&finished, &mut open, journal, &progress)?;
            has_work = stepped? || left.len() > 0;
        }
        Ok(())
    }

    /// Writes the answers of requests all of whose choices are finished.
    fn write_finished(
        &self,
        finished: &Receiver<Finished>,
        open: &mut HashMap<usize, Vec<Option<Choice>>>,
        journal: &mut Journal,
        progress: &StepProgress,
    ) -> Outcome {
        for (number, index, choice) in finished.try_iter() {
            let Some(choices) = open.get_mut(&number) else { continue };
            choices[index] = Some(choice);
            if choices.iter().any(Option::is_none) {
                continue;
            }
            let choices: Vec<Choice> =
                open.remove(&number).into_iter().flatten().flatten().collect();
            let wanted = self.all[number].as_ref().ok().and_then(|of| of.model.as_deref());
            let line = &self.lines[number];
            let unique = self.unique(number);
            let identity = self.identity(&unique);
            journal.add(number, &answered(line, endpoint(line), wanted, &identity, &choices))?;
            progress.step();
        }
        Ok(())
    }

    fn refuse(&self, number: usize, refusal: &Refusal, journal: &mut Journal) -> Outcome {
        let unique = self.unique(number);
        Ok(journal.add(number, &self.lines[number].answered(&unique, 400, refusal.to_json()))?)
    }

    fn unique(&self, number: usize) -> String {
        format!("{:016x}_{}", self.hash as u64, number + 1)
    }

    fn identity<'a>(&'a self, unique: &'a str) -> Identity<'a> {
        Identity { unique, created: self.created, model: self.model }
    }
}

/// Submits every choice of a request.
fn submit(
    engine: &mut Engine,
    tokenizer: &Arc<Tokenizer>,
    number: usize,
    prepared: &Prepared,
    finished: &Sender<Finished>,
) -> Result<(), Refusal> {
    for index in 0..prepared.choices {
        let (finished, mut tokens) = (finished.clone(), Vec::new());
        let sink = sink(index, tokenizer, prepared, move |update| {
            match update {
                Update::Token { token, .. } => tokens.extend(token),
                Update::Done { mut answer, .. } if answer.end != RequestEnd::Cancelled => {
                    answer.tokens = std::mem::take(&mut tokens);
                    // The receiver is gone only if the batch has failed.
                    let _ = finished.send((number, index, *answer));
                }
                Update::Done { .. } => {}
            }
            true
        });
        let submitted = engine.submit(prepared.request_of(index), sink);
        if let Err(error) = submitted {
            let too_long = matches!(error, EngineError::Model(ModelError::ContextFull { .. }));
            return Err(Refusal {
                message: error.to_string(),
                param: None,
                code: too_long.then_some("context_length_exceeded"),
            });
        }
    }
    Ok(())
}
