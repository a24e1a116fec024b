//! Plans for the models of a repository on the hub, of which only headers are read.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use forebay_engine::ModelInfo;
use forebay_engine::plan::{Answered, PlanError, PlannedModel, PredictedRate};
use forebay_format::{Catalog, TensorType};
use forebay_library::{Headers, Name, RemoteHeader, RemoteModel, Repository, Unread};
use forebay_model::ModelError;
use serde::Serialize;
use serde_json::json;

use super::{Asked, rate_in_words};
use crate::args::PlanArgs;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Align};
use crate::{interrupt, library, size};

/// Generated tokens per second from which on a model is as fast as a person reads. The best model is at least as fast if any is.
const READING_TOKENS_PER_SECOND: f64 = 5.0;

/// Bytes of a model's weights in each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Tiers {
    #[serde(rename = "vram_bytes")]
    vram: u64,
    #[serde(rename = "ram_bytes")]
    ram: u64,
    #[serde(rename = "ssd_bytes")]
    ssd: u64,
}

/// A model of a repository with its plan.
struct Row {
    name: Name,
    model: RemoteModel,
    found: Found,
}

/// What is known about a model.
enum Found {
    Planned(Box<(ModelInfo, Answered)>),
    /// Its header was not read. The plan is scaled from that of another model.
    Estimated {
        tiers: Tiers,
        rate: PredictedRate,
    },
    /// Neither it nor a similar model was read.
    Unknown(String),
    /// It cannot run.
    Refused(Refusal),
    /// The repository lacks files of it.
    Incomplete,
}

/// Why a model cannot run.
struct Refusal {
    why: String,
    /// True if a smaller model of the same kind may run.
    is_about_memory: bool,
}

/// Runs `plan` for a repository. `models` is the folder of the library, if the user named it.
pub fn run(args: &PlanArgs, name: &Name, models: Option<PathBuf>) -> Outcome {
    let asked = Asked::new(args, &library::nearest_folder(models)?)?;
    let options = library::options(&args.revision);
    let token = interrupt::token();
    let cancelled = || token.is_requested();
    let repository = Repository::list(name, &options, &cancelled).map_err(library::failed)?;
    let models = repository.models().map_err(library::failed)?;
    let chosen = match repository.chosen() {
        Ok(chosen) => Some(chosen.key().to_owned()),
        Err(error) if name.quant().is_some() => return Err(library::failed(error)),
        // Without the usual quantisation, the list says which there are.
        Err(_) => None,
    };
    let first = models.iter().position(|model| Some(model.key()) == chosen.as_deref()).unwrap_or(0);
    let headers = repository.headers(&cancelled);
    let rows = rows(&repository, &headers, models, first, &asked)?;
    let best = best(&rows);
    let shown = match name.quant() {
        Some(_) => Some(first),
        None if rows.len() == 1 => Some(0),
        None => best,
    };
    let list = List { rows: &rows, best, asked: &asked, read_bytes: headers.read_bytes() };
    // A model that was asked for by name, or is alone, is planned or refused.
    let is_one = name.quant().is_some() || rows.len() == 1;
    if let Some(row) = shown.filter(|_| is_one).map(|at| &rows[at])
        && let Found::Refused(refusal) = &row.found
    {
        return Err(list.refused(&row.name, refusal));
    }
    if args.json {
        return list.document(name, shown);
    }
    if let Some(row) = shown.filter(|_| is_one).map(|at| &rows[at]) {
        match &row.found {
            Found::Planned(planned) => asked.tell(&planned.0, &planned.1)?,
            _ => output::tell!("note: {}: the header was not read: only estimated", row.name),
        }
    }
    match rows.len() {
        1 if matches!(rows[0].found, Found::Planned(_)) => Ok(()),
        _ => output::print(&list.text(is_one)),
    }
}

/// Reads headers and plans all models, that of number `first` before the others.
fn rows(
    repository: &Repository,
    headers: &Headers<'_>,
    models: Vec<RemoteModel>,
    first: usize,
    asked: &Asked,
) -> Outcome<Vec<Row>> {
    let read = headers.read(&models, first);
    let mut rows = Vec::with_capacity(models.len());
    let mut unread = Vec::new();
    for (model, header) in models.into_iter().zip(read) {
        let name = repository.name_of(&model).map_err(library::failed)?;
        let found = match header {
            _ if !model.is_complete() => Found::Incomplete,
            Ok(header) => planned(&header, &name, asked)?,
            Err(Unread::TooLarge) => {
                unread.push(rows.len());
                Found::Unknown("its header is beyond the 16 MiB that plan reads".into())
            }
            Err(Unread::NoRanges) => {
                unread.push(rows.len());
                Found::Unknown("the server sends whole files only".into())
            }
            Err(Unread::Failed(error)) => return Err(library::failed(error)),
        };
        rows.push(Row { name, model, found });
    }
    for at in unread {
        if let Some(estimate) = estimate(&rows, rows[at].model.size_bytes()) {
            rows[at].found = estimate;
        }
    }
    Ok(rows)
}

/// Plans a model by its header.
fn planned(header: &RemoteHeader, name: &Name, asked: &Asked) -> Outcome<Found> {
    let folder = tempfile::tempdir().context("a folder for the headers cannot be made")?;
    let path = header.write(folder.path())?;
    let opened = PlannedModel::open(&path);
    let answered = opened.and_then(|model| {
        let answered = asked.plan(&model)?;
        let mut info = model.info;
        info.path = name.to_string().into();
        Ok((info, answered))
    });
    match answered {
        Ok(planned) => Ok(Found::Planned(Box::new(planned))),
        Err(PlanError::Option(error)) => Err(Failure::Usage(error.to_string())),
        Err(error) if is_about_values(&error, &path) => {
            Ok(Found::Unknown("more than its header is needed for a plan".into()))
        }
        Err(error) => {
            // The model has no path yet.
            let place = format!("{}/", folder.path().display());
            let why = error.to_string().replace(&place, "");
            Ok(Found::Refused(Refusal { why, is_about_memory: is_about_memory(&error) }))
        }
    }
}

/// Returns true for an error that may be about values of tensors, which are no part of the header and read as zeros: tables of
/// integers, such as orders of columns.
fn is_about_values(error: &PlanError, model: &Path) -> bool {
    let PlanError::Model(error) = error else { return false };
    let is_about_names = matches!(
        error,
        ModelError::UnknownArchitecture { .. }
            | ModelError::FolderOnly { .. }
            | ModelError::NoNextToken { .. }
            | ModelError::GgufOnly { .. }
            | ModelError::MissingKey { .. }
            | ModelError::MissingTensor { .. }
    );
    let has_tables = |catalog: Catalog| {
        let mut types = catalog.tensors().iter().map(|tensor| tensor.ty);
        types.any(|ty| matches!(ty, TensorType::I32 | TensorType::I64))
    };
    !is_about_names && Catalog::open(model).is_ok_and(has_tables)
}

/// Returns the estimate for a model of `size_bytes`, by the planned model whose size is nearest.
fn estimate(rows: &[Row], size_bytes: u64) -> Option<Found> {
    let planned = rows.iter().filter_map(|row| match &row.found {
        Found::Planned(planned) => Some((row.model.size_bytes(), planned)),
        _ => None,
    });
    let (near, planned) = planned.min_by_key(|(size, _)| size.abs_diff(size_bytes))?;
    let (info, answered) = &**planned;
    let (plan, request) = (&answered.planned.plan, &answered.request);
    let of = tiers(info, answered);
    let vram_max = match &plan.vram {
        // What is left beside keys, values and activations.
        Some(vram) => vram.budget_bytes.saturating_sub(vram.total_bytes - vram.weights_bytes),
        None => 0,
    };
    let vram = size_bytes.min(vram_max.max(of.vram));
    let ram = (size_bytes - vram).min(request.ram_bytes);
    let tiers = Tiers { vram, ram, ssd: size_bytes - vram - ram };
    let share = near as f64 / size_bytes.max(1) as f64;
    let shown = &plan.prediction.generate.shown;
    // Only models that lie in the same tiers are as fast as their sizes say.
    let is_alike = (tiers.ssd == 0) == (of.ssd == 0) && (tiers.ram == 0) == (of.ram == 0);
    let rate = match shown.range().filter(|_| is_alike) {
        Some((low, high)) => PredictedRate {
            tokens_per_second: None,
            low_tokens_per_second: Some(low * share.min(1.0) * 0.8),
            high_tokens_per_second: Some(high * share.max(1.0) * 1.2),
            uncertain_because: Some("estimated from the sizes of the files".into()),
        },
        None => PredictedRate::none("only the sizes of the files are known"),
    };
    Some(Found::Estimated { tiers, rate })
}

/// Returns where a planned model's weights go.
fn tiers(info: &ModelInfo, answered: &Answered) -> Tiers {
    let plan = &answered.planned.plan;
    let all = info.weights_bytes;
    let vram = plan.vram.as_ref().map_or(0, |vram| vram.weights_bytes.min(all));
    let Some(host) = &plan.host else { return Tiers { vram, ram: 0, ssd: 0 } };
    let ram = (host.arena_bytes + host.reserved_bytes).min(all - vram);
    match host.fully_resident {
        true => Tiers { vram, ram: all - vram, ssd: 0 },
        false => Tiers { vram, ram, ssd: all - vram - ram },
    }
}

/// Returns the best model: the largest that needs no SSD and is fast enough to read along, else the largest that needs no SSD,
/// else the fastest that runs.
fn best(rows: &[Row]) -> Option<usize> {
    let planned = || {
        rows.iter().enumerate().filter_map(|(at, row)| match &row.found {
            Found::Planned(planned) => Some((at, row.model.size_bytes(), &**planned)),
            _ => None,
        })
    };
    let rate = |of: &(ModelInfo, Answered)| of.1.planned.plan.prediction.generate.clone();
    let in_memory = |of: &(ModelInfo, Answered)| tiers(&of.0, &of.1).ssd == 0;
    let is_fast = |of: &(ModelInfo, Answered)| {
        let rate = rate(of);
        rate.shown.range().is_none() || rate.tokens_per_second >= READING_TOKENS_PER_SECOND
    };
    let largest = |good: &dyn Fn(&(ModelInfo, Answered)) -> bool| {
        let good = planned().filter(|found| good(found.2));
        good.max_by_key(|(_, size, _)| *size).map(|(at, ..)| at)
    };
    let fastest = || {
        let rate = |of| rate(of).tokens_per_second;
        planned().max_by(|a, b| rate(a.2).total_cmp(&rate(b.2))).map(|(at, ..)| at)
    };
    largest(&|of| in_memory(of) && is_fast(of)).or_else(|| largest(&in_memory)).or_else(fastest)
}

/// All models of a repository, as they are printed.
struct List<'a> {
    rows: &'a [Row],
    best: Option<usize>,
    asked: &'a Asked,
    read_bytes: u64,
}

/// A model as `--json` prints it.
#[derive(Serialize)]
struct Entry<'a> {
    name: String,
    quant: Option<&'a str>,
    size_bytes: u64,
    /// `planned`, `estimated`, `unknown` or `refused`.
    state: &'static str,
    device: Option<&'static str>,
    #[serde(flatten)]
    tiers: Option<Tiers>,
    generate: Option<&'a PredictedRate>,
    why: Option<String>,
    best: bool,
}

impl List<'_> {
    /// Returns the table. `after_plan` says that the plan of one model stands before it.
    fn text(&self, after_plan: bool) -> String {
        let mut text = String::new();
        if after_plan {
            text.push('\n');
        } else {
            text.push_str(&format!("on {}\n\n", self.asked.machine.in_words()));
        }
        let measured = self.asked.machine.rates.is_measured();
        let mut head = vec!["", "MODEL", "SIZE", "VRAM", "RAM", "SSD"];
        head.extend(measured.then_some("GENERATES"));
        let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
        let mut notes = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let mark = if self.best == Some(at) { "*" } else { "" };
            let label = row.name.quant().map_or_else(|| row.name.to_string(), str::to_owned);
            let mut line =
                vec![mark.to_owned(), label.clone(), size::format(row.model.size_bytes())];
            let of_tiers = |tiers: &Tiers| {
                [tiers.vram, tiers.ram, tiers.ssd].map(|bytes| match bytes {
                    0 => "-".to_owned(),
                    bytes => size::format(bytes),
                })
            };
            match &row.found {
                Found::Planned(planned) => {
                    line.extend(of_tiers(&tiers(&planned.0, &planned.1)));
                    let generate = &planned.1.planned.plan.prediction.generate;
                    line.extend(measured.then(|| in_range(&generate.shown)));
                }
                Found::Estimated { tiers, rate } => {
                    line.extend(of_tiers(tiers));
                    let rate = rate.range().map(|_| format!(", {}", rate_in_words(rate)));
                    line.push(format!("estimated{}", rate.unwrap_or_default()));
                }
                Found::Unknown(why) => notes.push(format!("{label}: not planned: {why}")),
                Found::Refused(why) => notes.push(format!("{label}: cannot run: {}", why.why)),
                Found::Incomplete => {
                    notes.push(format!("{label}: the repository lacks parts of it"));
                }
            }
            rows.push(line);
        }
        let columns = [
            Align::Left,
            Align::Left,
            Align::Right,
            Align::Right,
            Align::Right,
            Align::Right,
            Align::Left,
        ];
        text.push_str(&output::table(&columns, &rows));
        notes.dedup();
        if !notes.is_empty() {
            text.push_str(&format!("\n{}\n", notes.join("\n")));
        }
        if let Some(best) = self.best.map(|best| &self.rows[best]) {
            let why = self.why_best(best);
            text.push_str(&format!("\n* {why}: forebay pull {}\n", best.name));
        }
        if !measured {
            let why = self.asked.machine.why_not_measured();
            text.push_str(&format!("speed not predicted: {why}\n"));
        }
        text
    }

    fn why_best(&self, best: &Row) -> &'static str {
        match &best.found {
            Found::Planned(planned) if tiers(&planned.0, &planned.1).ssd == 0 => {
                "the largest that fits in memory"
            }
            _ => "the fastest that runs; none fits in memory",
        }
    }

    fn document(&self, name: &Name, shown: Option<usize>) -> Outcome {
        let entries: Vec<Entry<'_>> = (0..self.rows.len()).map(|at| self.entry(at)).collect();
        let repository = json!({
            "name": name.repository(),
            "best": self.best.map(|best| self.rows[best].name.to_string()),
            "measured": self.asked.machine.rates.is_measured(),
            "read_bytes": self.read_bytes,
            "models": entries,
        });
        let mut document = match shown.map(|at| &self.rows[at].found) {
            Some(Found::Planned(planned)) => self.asked.document(None, &planned.0, &planned.1)?,
            _ => json!({}),
        };
        document["repository"] = repository;
        output::json(&document)
    }

    fn entry(&self, at: usize) -> Entry<'_> {
        let row = &self.rows[at];
        let measured = self.asked.machine.rates.is_measured();
        let base = Entry {
            name: row.name.to_string(),
            quant: row.model.quant.as_deref(),
            size_bytes: row.model.size_bytes(),
            state: "unknown",
            device: None,
            tiers: None,
            generate: None,
            why: None,
            best: self.best == Some(at),
        };
        match &row.found {
            Found::Planned(planned) => Entry {
                state: "planned",
                device: Some(planned.1.planned.plan.device),
                tiers: Some(tiers(&planned.0, &planned.1)),
                generate: measured.then_some(&planned.1.planned.plan.prediction.generate.shown),
                ..base
            },
            Found::Estimated { tiers, rate } => Entry {
                state: "estimated",
                tiers: Some(*tiers),
                generate: Some(rate).filter(|_| measured),
                ..base
            },
            Found::Unknown(why) => Entry { why: Some(why.clone()), ..base },
            Found::Refused(refusal) => {
                Entry { state: "refused", why: Some(refusal.why.clone()), ..base }
            }
            Found::Incomplete => {
                Entry { why: Some("the repository lacks parts of it".into()), ..base }
            }
        }
    }

    /// Returns the failure for a model that cannot run, which names one that can.
    fn refused(&self, name: &Name, refusal: &Refusal) -> Failure {
        let instead = self.best.map(|best| &self.rows[best]).map(|best| {
            let bytes = size::format(best.model.size_bytes());
            format!("; {} ({bytes}) can run here", best.name)
        });
        anyhow!("{name} cannot run here: {}{}", refusal.why, instead.unwrap_or_default()).into()
    }
}

/// Formats a prediction with the range to expect.
fn in_range(rate: &PredictedRate) -> String {
    match (rate.tokens_per_second, rate.range()) {
        (Some(_), Some((low, high))) => {
            let tokens = super::words::tokens;
            format!("{}, {} to {}", rate_in_words(rate), tokens(low), tokens(high))
        }
        _ => rate_in_words(rate),
    }
}

/// What a download would bring.
pub struct Offer {
    pub repository: Repository,
    pub model: RemoteModel,
    pub name: Name,
    /// Predicted speed in words, if there is a prediction.
    pub speed: Option<String>,
}

/// Finds the model of a name on the hub and checks that it can run here, before any weight is read. A model whose header cannot
/// be read is not refused.
pub fn offer(
    name: &Name,
    revision: &str,
    models: Option<PathBuf>,
    is_checked: bool,
) -> Outcome<Offer> {
    let options = library::options(revision);
    let token = interrupt::token();
    let cancelled = || token.is_requested();
    let repository = Repository::list(name, &options, &cancelled).map_err(library::failed)?;
    let model = repository.chosen().map_err(library::failed)?;
    let name = repository.name_of(&model).map_err(library::failed)?;
    let speed = match is_checked {
        true => check(&repository, &model, &name, &library::nearest_folder(models)?)?,
        false => None,
    };
    Ok(Offer { repository, model, name, speed })
}

/// Checks that a model can run here. Returns its predicted speed in words.
fn check(
    repository: &Repository,
    model: &RemoteModel,
    name: &Name,
    folder: &Path,
) -> Outcome<Option<String>> {
    let token = interrupt::token();
    let cancelled = || token.is_requested();
    let headers = repository.headers(&cancelled);
    let asked = Asked::usual(folder)?;
    let found = match headers.read(std::slice::from_ref(model), 0).pop() {
        Some(Ok(header)) => planned(&header, name, &asked)?,
        Some(Err(Unread::Failed(error))) => return Err(library::failed(error)),
        _ => return Ok(None),
    };
    match found {
        Found::Planned(planned) => {
            let shown = &planned.1.planned.plan.prediction.generate.shown;
            let is_known = asked.machine.rates.is_measured() && shown.range().is_some();
            Ok(is_known.then(|| in_range(shown)))
        }
        Found::Refused(refusal) => {
            // Other quantisations share the architecture and the format.
            let models = match refusal.is_about_memory {
                true => repository.models().map_err(library::failed)?,
                false => Vec::new(),
            };
            let rows = rows(repository, &headers, models, 0, &asked)?;
            let list = List { rows: &rows, best: best(&rows), asked: &asked, read_bytes: 0 };
            Err(list.refused(name, &refusal))
        }
        _ => Ok(None),
    }
}

/// Returns true if a smaller model of the same kind may run.
fn is_about_memory(error: &PlanError) -> bool {
    match error {
        PlanError::NoPlan { gpu, cpu } => is_about_memory(gpu) || is_about_memory(cpu),
        error => {
            error.needed_bytes().is_some() || matches!(error, PlanError::CacheDoesNotFit { .. })
        }
    }
}
