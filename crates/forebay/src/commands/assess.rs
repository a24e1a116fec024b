//! The command `forebay assess`: measures how small an expert cache can be for a model.

mod prefixes;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use forebay_engine::{EngineError, SessionOptions};
use forebay_lab::assess::prompts::{self, Prompt};
use forebay_lab::assess::{self, Assessment, Figure, Machine, RecordOptions, Section, Subject};
use forebay_model::sampling::Sampling;
use forebay_store::{OutputFile, Outputs};
use serde::Serialize;

use crate::args::AssessArgs;
use crate::commands::plan;
use crate::config;
use crate::demo;
use crate::failure::{Outcome, usage};
use crate::open;
use crate::output::{self, Align, visible};
use crate::outputs;
use crate::progress::TokensProgress;
use crate::routing_file::RoutingFile;
use crate::size;

#[derive(Serialize)]
struct Document {
    models: Vec<Assessment>,
}

pub fn run(args: AssessArgs) -> Outcome {
    let options = config::session(&args.budget)?;
    if args.models.len() > 1 && args.routing.trace_routing.is_some() {
        return usage("--trace-routing records one model: assess the others without it");
    }
    let mut outputs = begin(&args)?;
    if let Some(log) = &args.kv {
        return prefixes::run(&args, log, &options, &mut outputs);
    }
    let page =
        args.output.as_deref().map(|path| outputs::create(&mut outputs, path)).transpose()?;
    let csv = args.csv.as_deref().map(|path| outputs::create(&mut outputs, path)).transpose()?;
    let routing_file = RoutingFile::create(&args.routing, &mut outputs)?;
    if let Some(folder) = &args.svg {
        check_folder(folder, &outputs)?;
    }
    let prompts = match &args.prompts {
        Some(path) => prompts::read(path)?,
        None => prompts::shipped(),
    };
    // Open all models before the first recording, because recordings can take minutes.
    for model in &args.models {
        if open::inspect(model)?.model.experts == 0 {
            return Err(EngineError::DenseModel { path: model.clone() }.into());
        }
    }
    let mut models = Vec::with_capacity(args.models.len());
    let mut routing_file = Some(routing_file);
    for model in &args.models {
        models.push(one(model, &prompts, &options, &args, routing_file.take())?);
    }
    let is_printed = write_page(page, || assess::page(&models))?;
    let is_printed = write_csv(csv, &models)? || is_printed;
    if let Some(folder) = &args.svg {
        let count = draw(folder, &models, &mut outputs)?;
        output::tell!("{}: {count} figures", folder.display());
    }
    match args.json {
        true => output::json(&Document { models }),
        false if is_printed => Ok(()),
        false => output::print(&text(&models)),
    }
}

/// Checks that figures can be written into a folder.
fn check_folder(folder: &Path, outputs: &Outputs) -> Outcome {
    outputs.check_folder(folder)?;
    if !folder.exists() {
        // Check that the folder can be created, then remove it again.
        Outputs::new(false).create(folder)?;
    }
    Ok(())
}

/// Writes the report, if there is to be one. Returns true if it went to standard output.
fn write_page(page: Option<OutputFile>, html: impl FnOnce() -> String) -> anyhow::Result<bool> {
    let Some(page) = page else { return Ok(false) };
    let path = page.path().to_owned();
    let mut file = page.into_stream();
    file.write_all(html().as_bytes())
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    file.commit()?;
    let is_printed = outputs::is_standard(&path);
    if !is_printed {
        output::tell!("{}: open it in a browser", path.display());
    }
    Ok(is_printed)
}

/// Writes the curves, if they are asked for. Returns true if they went to standard output.
fn write_csv(file: Option<OutputFile>, models: &[Assessment]) -> anyhow::Result<bool> {
    let Some(file) = file else { return Ok(false) };
    let path = file.path().to_owned();
    let mut file = file.into_stream();
    let lines = models.iter().map(Assessment::csv).collect::<String>();
    file.write_all((assess::CSV_HEAD.to_owned() + &lines).as_bytes())
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    file.commit()?;
    Ok(outputs::is_standard(&path))
}

/// Protects every input of the command from being overwritten by its outputs.
fn begin(args: &AssessArgs) -> Outcome<Outputs> {
    if let (true, Some(path)) = (args.json, &args.output) {
        outputs::not_standard("-o", path, "the JSON document")?;
    }
    if let Some(path) = &args.csv
        && (args.json || args.output.as_deref().is_some_and(outputs::is_standard))
    {
        outputs::not_standard("--csv", path, "another document")?;
    }
    let named = args.output.is_some()
        || args.csv.is_some()
        || args.svg.is_some()
        || args.routing.trace_routing.is_some();
    let mut outputs = outputs::begin(args.force, named)?;
    args.models.iter().for_each(|model| outputs::protect_model(&mut outputs, model));
    args.prompts.iter().chain(&args.profile).chain(&args.kv).for_each(|path| outputs.protect(path));
    Ok(outputs)
}

fn one(
    model: &Path,
    prompts: &[Prompt],
    options: &SessionOptions,
    args: &AssessArgs,
    routing_file: Option<RoutingFile>,
) -> Outcome<Assessment> {
    let machine = match (machine(args.profile.as_deref(), model), &args.profile) {
        (Err(why), Some(_)) => return Err(why.into()),
        // Without a profile the report has no predicted speeds and gives the reason.
        (found, _) => found.map_err(|why| format!("{why:#}")),
    };
    let mut session = open::session(model, options, "an assessment")?;
    if let Some(file) = &routing_file {
        file.record(&mut session)?;
    }
    let sampling = Sampling { seed: args.seed, ..Sampling::default() };
    let untrained = demo::is_demo(session.info());
    if untrained && !args.raw {
        output::tell!(
            "note: the demo model was not trained with the chat template in its file: as with --raw"
        );
    }
    let record = RecordOptions { tokens: args.tokens, sampling, raw: args.raw || untrained };
    let name = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy();
    let mut progress = TokensProgress::new(format!("recording {}", clean(&name)));
    let mut update = |done, total| progress.update(done, total);
    let recording = assess::record_prompts(&mut session, prompts, &record, &mut update)
        .map_err(|error| open::named(error, model))?;
    drop(progress);
    if let Some(file) = routing_file {
        file.finish(&mut session)?;
    }
    let machine = machine.as_ref().map_err(String::as_str);
    let subject = Subject { model, options, sampling_seed: args.seed, machine };
    assess::assess(&subject, &session, &recording).map_err(|error| open::named(error, model))
}

/// Returns the machine of the profile `file`, or this machine with the disk of `model`.
fn machine(file: Option<&Path>, model: &Path) -> anyhow::Result<Machine> {
    let profile = plan::profile(file, model)?;
    let name = match file {
        None => "this machine".to_owned(),
        Some(path) => {
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
            format!("the machine of {}", clean(&name))
        }
    };
    Ok(Machine { name, rates: plan::rates(&profile)?, is_here: file.is_none() })
}

/// Writes the figures of every model and the comparison. Returns the number of files.
fn draw(folder: &Path, models: &[Assessment], outputs: &mut Outputs) -> anyhow::Result<usize> {
    let mut drawn: Vec<(String, Figure)> = Vec::new();
    let mut used: Vec<String> = Vec::new();
    for model in models {
        let mut name = file_name(&model.name);
        // Two folders may hold models with the same name.
        if used.contains(&name) {
            name = format!("{name}-{}", used.len() + 1);
        }
        for figure in assess::figures(model) {
            drawn.push((format!("{name}-{}.svg", figure.id), figure));
        }
        used.push(name);
    }
    if models.len() > 1 {
        let compared = assess::comparison(models).into_iter();
        drawn.extend(compared.map(|figure| (format!("{}.svg", figure.id), figure)));
    }
    write_figures(folder, &drawn, outputs)?;
    Ok(drawn.len())
}

/// Writes figures to files of these names.
fn write_figures(
    folder: &Path,
    figures: &[(String, Figure)],
    outputs: &mut Outputs,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("{}: cannot be made", folder.display()))?;
    for (name, figure) in figures {
        let path = folder.join(name);
        let mut file = outputs.create(&path)?.into_stream();
        file.write_all(figure.standalone().as_bytes())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        file.commit()?;
    }
    Ok(())
}

/// Returns a name that is valid on every file system.
fn file_name(name: &str) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name = name.strip_suffix(".gguf").or(name.strip_suffix(".fbay")).unwrap_or(name);
    name.chars().take(80).map(|c| if good(c) { c } else { '-' }).collect()
}

fn clean(text: &str) -> String {
    visible::line(text).into_owned()
}

fn text(models: &[Assessment]) -> String {
    let mut text = String::new();
    if models.len() > 1 {
        text.push_str(&compared(models));
        text.push('\n');
    }
    for model in models {
        let _ = writeln!(
            text,
            "{}: {} layers of {} experts, {} per token, {} of experts",
            clean(&model.name),
            model.expert_layers,
            model.experts,
            model.experts_per_token,
            size::format(model.expert_bytes)
        );
        text.push('\n');
        if let Some((command, why)) = model.command() {
            let _ = writeln!(text, "{}      {why}\n", clean(&command));
        }
        text.push_str(&domains(model));
        text.push('\n');
        text.push_str(&policies(model));
        text.push('\n');
        for line in &model.verdict {
            let _ = writeln!(text, "- {line}");
        }
        for about in model.about_predictions() {
            let _ = writeln!(text, "- {about}");
        }
        if let Some(measured) = model.about_measured() {
            let _ = writeln!(text, "- {measured}");
        }
        let _ = writeln!(text, "- {}", model.about_prompts());
        if model.prompt_tokens_cut > 0 {
            let _ = writeln!(
                text,
                "- Left out, because prompts did not fit the context: {}.",
                output::counted(model.prompt_tokens_cut, "token")
            );
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn rows(head: &[&str], body: Vec<Vec<String>>) -> String {
    let mut columns = vec![Align::Right; head.len()];
    columns[0] = Align::Left;
    let mut rows = vec![head.iter().map(|name| name.to_string()).collect::<Vec<String>>()];
    rows.extend(body);
    output::table(&columns, &rows)
}

fn miss_at(section: &Section, policy: usize, share: f64) -> String {
    let point = section.curves.get(policy).and_then(|curve| curve.at(share));
    let Some(point) = point else { return "-".to_owned() };
    let misses = percent(1.0 - point.hit_rate);
    match point.hit_rate_interval {
        Some([low, high]) => format!("{misses} ± {:.1}", 50.0 * (high - low)),
        None => misses,
    }
}

fn compared(models: &[Assessment]) -> String {
    let row = |model: &Assessment| {
        let at = |share| miss_at(&model.mixed, 0, share);
        vec![
            clean(&model.name),
            at(0.25),
            at(0.5),
            at(0.75),
            percent(model.mixed.locality.token_overlap),
            size::format(model.cycle_bytes),
        ]
    };
    let head = ["model", "misses at 25 % of the experts", "50 %", "75 %", "kept", "one token uses"];
    rows(&head, models.iter().map(row).collect())
}

fn domains(model: &Assessment) -> String {
    let row = |section: &Section| {
        let locality = &section.locality;
        let window = |index: usize| {
            let found = locality.windows.get(index).and_then(|window| window.experts_per_layer);
            found.map_or("-".to_owned(), |experts| format!("{experts:.1}"))
        };
        vec![
            section.name.clone(),
            output::grouped((locality.prompt_tokens + locality.generated_tokens) as u64),
            miss_at(section, 0, 0.25),
            miss_at(section, 0, 0.5),
            miss_at(section, 0, 0.75),
            window(0),
            window(1),
            window(2),
            percent(locality.token_overlap),
            percent(locality.usage_entropy_share),
        ]
    };
    let head = [
        "domain",
        "tokens",
        "misses at 25 %",
        "50 %",
        "75 %",
        "experts in 16",
        "64",
        "256 tokens",
        "kept",
        "entropy",
    ];
    rows(&head, std::iter::once(&model.mixed).chain(&model.domains).map(row).collect())
}

fn policies(model: &Assessment) -> String {
    let row = |index: usize| {
        let curve = &model.mixed.curves[index];
        let at = |share| miss_at(&model.mixed, index, share);
        let steady = curve.at(0.25).and_then(|point| point.faulted_experts_per_token.steady);
        vec![
            curve.policy.clone(),
            at(0.125),
            at(0.25),
            at(0.5),
            at(0.75),
            at(1.0),
            steady.map_or("-".to_owned(), |steady| format!("{steady:.2}")),
        ]
    };
    let head = [
        "policy (mixed)",
        "misses at 12.5 %",
        "25 %",
        "50 %",
        "75 %",
        "100 %",
        "faults/token at 25 %",
    ];
    rows(&head, (0..model.mixed.curves.len()).map(row).collect())
}
