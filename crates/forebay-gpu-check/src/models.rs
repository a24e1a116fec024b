//! Whole models on the GPU, compared with the recorded references of the fixtures. The limits are those of the
//! tolerance table in the fixtures' README.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow};
use forebay_engine::{DeviceChoice, KvCacheType, Session, SessionOptions};
use forebay_format::Catalog;
use forebay_model::Architecture;
use forebay_model::arch::Layer;
use forebay_model::sampling::argmax;
use forebay_store::{FileSet, IoKind, OutputFile};

use crate::harness::{Check, Outcome};
use crate::logits::{
    Distance, FEW_EXPERTS, GGUF, HUGGING_FACE, INDEXED, References, Widened,
    exact_against_llama_cpp, json, numbers, of_long_prompt, prompt, references_of, short_context,
};
use crate::sessions::generate;

/// Number of tokens that the mat-vec kernels process at once.
const FEW: usize = 8;

/// Context in positions. With more, the short context below would also be one part.
const CONTEXT: usize = 512;
/// Number of tokens that are computed one at a time: enough to increase the number of parts of the context on the way.
const ALONE: usize = 300;

/// Number of tokens that exceeds a small window plus a batch of 512 and the rounding of rows.
const WRAPPED: usize = 900;

/// Number of tokens generated from one.
const GENERATED: usize = 40;

/// Folders with integers of eight bits, or with weights of four bits, in experts or everywhere. Their products round
/// activations.
const ROUNDING: [&str; 10] = [
    "gpt_oss",
    "deepseek_v4",
    "deepseek_v4_mtp",
    "llama_nvfp4_modelopt",
    "qwen3_nvfp4_ct",
    "qwen3_int4_ct",
    "llama_gptq",
    "llama_awq",
    "qwen3_w8a16_ct",
    "llama_w8a8_ct",
];

/// A model file with its references.
#[derive(Clone)]
struct Model {
    name: String,
    path: PathBuf,
    /// File with the prompts and the expected continuations.
    prompts: PathBuf,
    /// File with reference logits.
    references: PathBuf,
    /// Names of the reference logits of the short prompt, best first.
    short: Vec<String>,
    /// Names of the reference logits of the long prompt, best first.
    long: Vec<String>,
    /// Name of the reference logits of the predicting layer for the short prompt, which few models have.
    predicted: String,
    /// True if weights are numbers of 16 or 32 bits.
    float: bool,
    /// Limits for f32 throughout.
    exact_limits: Limits,
    /// The same for the long prompt, if its references hold.
    long_limits: Option<Limits>,
    /// Limits for the default arithmetic if `float` is true.
    float_limits: Limits,
    /// Limits for the default arithmetic if weights or keys are quantised.
    rounded: Limits,
}

/// Fixtures for which the GPU has no kernels: one has two residual streams, where published models have four.
const CPU_ONLY: &[&str] = &["gguf/qwen4_exp_k"];

/// Returns the checks of every fixture model under `fixtures`, on GPU `ordinal`.
///
/// # Errors
/// Returns an error if the folder contains no fixtures.
pub fn checks(fixtures: &Path, ordinal: usize) -> Result<Vec<Check>> {
    let mut models = folder_models(fixtures);
    for name in GGUF {
        models.extend(gguf_models(fixtures, name));
    }
    if models.is_empty() {
        return Err(anyhow!("{}: no fixture models are there", fixtures.display()));
    }
    let mut checks = Vec::new();
    for model in models {
        if CPU_ONLY.iter().any(|name| model.name.starts_with(name)) {
            checks.push(Check::new(format!("model refused {}", model.name), move |_| {
                check_refused(&model, ordinal)
            }));
            continue;
        }
        let exact = model.clone();
        checks.push(Check::new(format!("model exact {}", model.name), move |_| {
            check_exact(&exact, ordinal).with_context(|| exact.path.display().to_string())
        }));
        let (fast, placed) = (model.clone(), model.clone());
        checks.push(Check::new(format!("model load {}", model.name), move |_| {
            check_load(&placed, ordinal).with_context(|| placed.path.display().to_string())
        }));
        checks.push(Check::new(format!("model fast {}", model.name), move |_| {
            check_fast(&fast, ordinal).with_context(|| fast.path.display().to_string())
        }));
        let (slots, split) = (model.clone(), model.clone());
        if slots.has_experts()? {
            // Under a watchdog, tokens of models that share choices are no graphs, which could give up.
            if !slots.shares_choices()? {
                let late = model.clone();
                checks.push(Check::new(format!("model late disk {}", late.name), move |context| {
                    let ids = prompt(&json(&late.prompts), "long");
                    crate::late::check(context, &late.path, &ids, ordinal)
                        .with_context(|| late.path.display().to_string())
                }));
            }
            checks.push(Check::new(format!("model slots {}", model.name), move |_| {
                let ids = slots.beginning(crate::slots::GENERATED);
                let checked = crate::slots::check(&slots.path, &ids, ordinal);
                checked.with_context(|| slots.path.display().to_string())
            }));
        } else {
            checks.push(Check::new(format!("model split {}", model.name), move |_| {
                let ids = prompt(&json(&split.prompts), "long");
                let fast = if split.float { split.float_limits } else { Limits::ROUNDED };
                let checked = crate::split::check(&split.path, &ids, &fast, ordinal);
                checked.with_context(|| split.path.display().to_string())
            }));
        }
        let (many, slots) = (model.clone(), model.has_experts()?);
        checks.push(Check::new(format!("model many {}", model.name), move |_| {
            let ids = prompt(&json(&many.prompts), "long");
            let checked = crate::many::check(&many.path, &ids, slots, ordinal);
            checked.with_context(|| many.path.display().to_string())
        }));
        let tiers = model.clone();
        if model.has_states()? {
            checks.push(Check::new(format!("model states {}", model.name), move |_| {
                let ids = prompt(&json(&tiers.prompts), "long");
                let checked = crate::states::check(&tiers.path, &ids, ordinal);
                checked.with_context(|| tiers.path.display().to_string())
            }));
        } else {
            checks.push(Check::new(format!("model tiers {}", model.name), move |_| {
                let ids = prompt(&json(&tiers.prompts), "long");
                let checked = crate::tiers::check(&tiers.path, &ids, ordinal);
                checked.with_context(|| tiers.path.display().to_string())
            }));
        }
        if let Some(expected) = References::open(&model.references).floats(&model.predicted) {
            let mtp = model.clone();
            checks.push(Check::new(format!("model mtp {}", model.name), move |_| {
                let reference = json(&mtp.prompts);
                let ids = prompt(&reference, "short");
                let next = reference["mtp"]["next"].as_u64().context("no token behind the text")?;
                let checked =
                    crate::mtp::check_references(&mtp.path, &ids, next as u32, &expected, ordinal);
                checked.with_context(|| mtp.path.display().to_string())
            }));
        }
        let beside = model.clone();
        checks.push(Check::new(format!("model beside {}", model.name), move |_| {
            let ids = beside.beginning(0);
            let checked = crate::beside::check(&beside.path, &ids, ordinal);
            checked.with_context(|| beside.path.display().to_string())
        }));
        if model.has_windows()? {
            let windows = model.clone();
            checks.push(Check::new(format!("model windows {}", model.name), move |_| {
                check_windows(&windows, ordinal).with_context(|| windows.path.display().to_string())
            }));
        }
        checks.push(Check::new(format!("model graphs {}", model.name), move |_| {
            let exact = check_graphs(&model, ordinal, true);
            let both =
                exact.and_then(|exact| Ok(exact.worse(check_graphs(&model, ordinal, false)?)));
            both.with_context(|| model.path.display().to_string())
        }));
    }
    checks.push(Check::new("model older synthetic", move |_| crate::older::check(ordinal)));
    checks.push(Check::new("model split synthetic", move |_| crate::split::check_deeper(ordinal)));
    checks.push(Check::new("model mtp", move |_| crate::mtp::check(ordinal)));
    Ok(checks)
}

fn folder_models(fixtures: &Path) -> Vec<Model> {
    let mut models = Vec::new();
    for name in HUGGING_FACE {
        let folders = ["models", "formulas"].map(|kind| fixtures.join(kind).join(name));
        if let Some(folder) = folders.into_iter().find(|folder| folder.exists()) {
            models.push(Model {
                name: format!("models/{name}"),
                prompts: folder.join("reference.json"),
                references: folder.join("reference.safetensors"),
                path: folder,
                short: vec![format!("{}.short.logits", references_of(name))],
                long: vec![format!("{}.long.logits_last8", references_of(name))],
                predicted: "mtp.short.logits".into(),
                float: !ROUNDING.contains(name),
                exact_limits: Limits::EXACT,
                long_limits: Some(Limits::EXACT),
                float_limits: match *name {
                    // A cache in f16 moves llama.cpp's logits as far (`kv_f16_vs_kv_f32` of the GGUF fixture): a row sees 8 keys.
                    "hy_v4" => Limits { max_abs: 2.0, kl: 1e-2, gap: 0.5, ..Limits::FLOAT },
                    _ => Limits::FLOAT,
                },
                rounded: rounded(name),
            });
        }
    }
    models
}

fn gguf_models(fixtures: &Path, name: &str) -> Vec<Model> {
    let folder = fixtures.join("gguf").join(name);
    let kinds = ["gguf", "models"].map(|kind| fixtures.join(kind).join(name));
    let prompts = kinds.map(|folder| folder.join("reference.json"));
    let Some(prompts) = prompts.into_iter().find(|path| path.exists()) else { return Vec::new() };
    if !folder.join("llamacpp.json").exists() {
        return Vec::new();
    }
    let described = json(&folder.join("llamacpp.json"));
    let Some(files) = described["files"].as_object() else { return Vec::new() };
    let model = |(label, entry): (&String, &serde_json::Value)| {
        let file = &entry["file"];
        let file = if file.is_array() { &file[0] } else { file };
        let names = |which: &str| vec![format!("{label}.exact.{which}"), format!("F32.{which}")];
        let (max_abs, kl) = exact_against_llama_cpp(name);
        let exact_limits = Limits { max_abs: max_abs as f32, kl, ..Limits::EXACT };
        Model {
            name: format!("gguf/{name} {label}"),
            path: folder.join(file.as_str().unwrap_or_default()),
            prompts: prompts.clone(),
            references: folder.join("llamacpp.safetensors"),
            short: names("short.logits"),
            long: names("long.logits_last8"),
            predicted: format!("{label}.exact.mtp.short.logits"),
            float: ["BF16", "F16", "F32"].contains(&label.as_str()) && !ROUNDING.contains(&name),
            exact_limits,
            long_limits: of_long_prompt(name, exact_limits),
            // The error of 27 layers of random weights is larger.
            float_limits: match name {
                "deepseek_v2_lite" => Limits { kl: 1e-2, ..Limits::FLOAT },
                _ => Limits::FLOAT,
            },
            rounded: widened(rounded(name), name, entry),
        }
    };
    files.iter().map(model).filter(|model| model.path.exists()).collect()
}

/// Returns the limits for the default arithmetic on quantised weights. Another choice of one or two experts moves the logits far.
fn rounded(name: &str) -> Limits {
    match FEW_EXPERTS.contains(&name) {
        // Its random weights amplify every rounding (`default_arithmetic_stays_within_the_table`).
        _ if name == "kimi_k3" => Limits { max_abs: 6.0, gap: 2.0, kl: 2e-2, ..Limits::ROUNDED },
        true => Limits { max_abs: 5.0, gap: 1.0, kl: 1e-2, ..Limits::ROUNDED },
        false => Limits::ROUNDED,
    }
}

/// Returns the limits for a GGUF file. Where an indexer chooses other keys, single positions move far, so llama.cpp's own distance
/// is the measure (see README of the fixtures).
fn widened(limits: Limits, name: &str, entry: &serde_json::Value) -> Limits {
    if !INDEXED.contains(&name) && !FEW_EXPERTS.contains(&name) {
        return limits;
    }
    let of = |key: &str| entry[key]["max_abs"].as_f64().unwrap_or(0.0) as f32;
    let own = 1.5 * of("native_vs_exact").max(of("native_vs_exact_long_last8"));
    Limits { max_abs: limits.max_abs.max(own), ..limits }
}

impl Model {
    fn has_experts(&self) -> Result<bool> {
        let catalog = Catalog::open(&self.path)?;
        Ok(Architecture::from_catalog(&catalog)?.expert_layers().next().is_some())
    }

    /// Returns true if layers take the choice of keys of a layer before them.
    fn shares_choices(&self) -> Result<bool> {
        let catalog = Catalog::open(&self.path)?;
        Ok(Architecture::from_catalog(&catalog)?.shares_choices())
    }

    fn has_states(&self) -> Result<bool> {
        let catalog = Catalog::open(&self.path)?;
        Ok(Architecture::from_catalog(&catalog)?.has_states())
    }

    /// Returns true if some layers have a window that a text of [`WRAPPED`] positions exceeds, and the model takes such a text.
    fn has_windows(&self) -> Result<bool> {
        let catalog = Catalog::open(&self.path)?;
        let described = Architecture::from_catalog(&catalog)?;
        let fits = described.context_trained >= WRAPPED + GENERATED;
        let exceeded = |layer: &Layer| layer.window.is_some_and(|window| window < WRAPPED);
        Ok(fits && described.layers.iter().any(exceeded))
    }

    /// Returns the beginning of the long prompt for which small sessions have room, beside so many tokens.
    fn beginning(&self, tokens: usize) -> Vec<u32> {
        let mut ids = prompt(&json(&self.prompts), "long");
        ids.truncate(crate::sessions::CONTEXT - tokens);
        ids
    }

    /// Returns the context with which a prompt and its continuation are computed.
    fn context_for(&self, which: &str) -> usize {
        let context = short_context(&self.name).filter(|_| which == "short");
        context.unwrap_or(CONTEXT)
    }

    fn open(&self, device: DeviceChoice, exact: bool) -> Result<Session> {
        self.open_for(device, exact, CONTEXT)
    }

    fn open_for(&self, device: DeviceChoice, exact: bool, context: usize) -> Result<Session> {
        let context = Some(context);
        self.open_with(SessionOptions { device, exact, context, ..SessionOptions::default() })
    }

    fn open_with(&self, options: SessionOptions) -> Result<Session> {
        Ok(Session::open(&self.path, &options, &mut |_, _| {})?)
    }

    /// Returns reference logits of the short prompt, and of the long prompt's last positions if they hold, with the limits for
    /// f32 throughout.
    fn expected(&self) -> Result<Vec<(&'static str, Vec<f32>, Limits)>> {
        let references = References::open(&self.references);
        let find = |names: &[String]| {
            let found = names.iter().find_map(|name| references.floats(name));
            found.ok_or_else(|| anyhow!("no reference logits among {names:?}"))
        };
        let mut all = vec![("short", find(&self.short)?, self.exact_limits)];
        if let Some(limits) = self.long_limits {
            all.push(("long", find(&self.long)?, limits));
        }
        Ok(all)
    }
}

/// Largest distances from the reference that pass.
#[derive(Clone, Copy)]
pub struct Limits {
    max_abs: f32,
    kl: f64,
    /// Largest gap at which another token may be the likeliest.
    gap: f32,
    /// True if the median divergence is tested, because an expert choice may flip and move single positions.
    median: bool,
}

impl Widened for Limits {
    fn widened(self, max_abs: f64, kl: f64) -> Limits {
        Limits { max_abs: max_abs as f32, kl, ..self }
    }
}

impl Limits {
    /// Limits for f32 throughout.
    pub const EXACT: Limits = Limits { max_abs: 1e-3, kl: 1e-7, gap: 1e-9, median: false };
    /// Limits for the default arithmetic with weights of 16 or 32 bits.
    pub const FLOAT: Limits = Limits { max_abs: 0.3, kl: 1e-3, gap: 0.3, median: false };
    /// Limits for the default arithmetic with quantised weights of a dense model.
    pub const ROUNDED: Limits = Limits { max_abs: 1.5, kl: 5e-3, gap: 0.5, median: false };

    /// Returns limits that are met by what meets either.
    pub fn or(&self, other: &Limits) -> Limits {
        Limits {
            max_abs: self.max_abs.max(other.max_abs),
            kl: self.kl.max(other.kl),
            gap: self.gap.max(other.gap),
            median: self.median || other.median,
        }
    }

    fn divergence(&self, distance: &Distance) -> f64 {
        if self.median { distance.kl_median() } else { distance.kl_mean() }
    }

    /// Returns the distance as a fraction of the limit that it comes closest to.
    pub fn judge(&self, what: &str, distance: &Distance) -> Outcome {
        let kl = self.divergence(distance);
        let (max_abs, miss) = (distance.max_abs, distance.worst_miss());
        let shares = [
            f64::from(max_abs) / f64::from(self.max_abs),
            kl / self.kl,
            if distance.top1_misses.is_empty() { 0.0 } else { f64::from(miss / self.gap) },
        ];
        // NaN is worse than every number.
        let nan = shares.iter().any(|share| share.is_nan());
        let worst = if nan { f64::NAN } else { shares.into_iter().fold(0.0, f64::max) };
        let place =
            format!("{what}: max abs {max_abs:.1e}, KL {kl:.1e}, likeliest missed at {miss}");
        Outcome { worst, tolerance: 1.0, place }
    }
}

/// Compares f32 results: logits with the reference, and routing and greedy text with the CPU, whose routing equals the
/// reference's.
fn check_exact(model: &Model, ordinal: usize) -> Result<Outcome> {
    let prompts = json(&model.prompts);
    let open = |context| {
        let on = |device| model.open_for(device, true, context);
        Ok::<_, anyhow::Error>((on(DeviceChoice::Cuda(ordinal))?, on(DeviceChoice::Cpu)?))
    };
    let mut context = model.context_for("short");
    let (mut session, mut cpu) = open(context)?;
    let vocabulary = session.vocab_size();
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (which, expected, limits) in model.expected()? {
        if context != model.context_for(which) {
            context = model.context_for(which);
            (session, cpu) = open(context)?;
        }
        let ids = prompt(&prompts, which);
        let (mut routing, mut cpu_routing) = (Vec::new(), Vec::new());
        let logits = session.logits(&ids, Some(&mut routing))?;
        let tested = &logits[logits.len() - expected.len()..];
        let distance = Distance::between(&expected, tested, vocabulary);
        worst = worst.worse(limits.judge(which, &distance));
        cpu.logits(&ids, Some(&mut cpu_routing))?;
        worst = worst.worse(Outcome::same(&routing, &cpu_routing).at(&format!("{which} routing")));
        let count = continuation_len(&prompts[which]);
        let expected = generate(&mut cpu, &ids, count)?;
        let generated = generate(&mut session, &ids, count)?;
        worst = worst.worse(Outcome::same(&generated, &expected).at(&format!("{which} greedy")));
    }
    Ok(worst)
}

/// Returns how many tokens to generate: as many as the references have, if they have any.
fn continuation_len(prompt: &serde_json::Value) -> usize {
    match &prompt["greedy"] {
        serde_json::Value::Null => GENERATED,
        greedy => numbers(greedy).len(),
    }
}

/// Checks the default arithmetic: prompts, and a few tokens at once. Results must be the same bits twice. They must be
/// no farther from the reference than 1.2 times the CPU's distance.
fn check_fast(model: &Model, ordinal: usize) -> Result<Outcome> {
    let prompts = json(&model.prompts);
    let open = |context| {
        let on = |device| model.open_for(device, false, context);
        let device = DeviceChoice::Cuda(ordinal);
        let kv_cache = KvCacheType::Q8_0;
        let small = |device| {
            let context = Some(context);
            model.open_with(SessionOptions {
                device,
                kv_cache,
                context,
                ..SessionOptions::default()
            })
        };
        let cpu = DeviceChoice::Cpu;
        Ok::<_, anyhow::Error>(((on(device)?, on(cpu)?), (small(device)?, small(cpu)?)))
    };
    let mut context = model.context_for("short");
    let ((mut session, mut cpu), (mut small_cache, mut small_on_cpu)) = open(context)?;
    let vocabulary = session.vocab_size();
    let median = session.info().experts > 0 && !model.float;
    let limits = match model.float {
        true => Limits { median, ..model.float_limits },
        false => Limits { median, ..model.rounded },
    };
    let kl = model.rounded.kl.max(model.float_limits.kl);
    let median_of_rounded = session.info().experts > 0;
    let rounded = Limits { median: median_of_rounded, kl, ..model.rounded };
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (which, expected, _) in model.expected()? {
        if context != model.context_for(which) {
            context = model.context_for(which);
            ((session, cpu), (small_cache, small_on_cpu)) = open(context)?;
        }
        let ids = prompt(&prompts, which);
        let logits = session.logits(&ids, None)?;
        let from = logits.len() - expected.len();
        let distance = Distance::between(&expected, &logits[from..], vocabulary);
        let (mut limits, mut rounded) = (limits, rounded);
        let cpu = Distance::between(&expected, &cpu.logits(&ids, None)?[from..], vocabulary);
        if median {
            // If an expert flips on the CPU too, the likeliest token may differ.
            limits.gap = limits.gap.max(cpu.worst_miss());
            rounded.gap = rounded.gap.max(cpu.worst_miss());
        }
        worst = worst.worse(limits.judge(which, &distance));
        let again = session.logits(&ids, None)?;
        worst = worst.worse(Outcome::same(&again, &logits).at(&format!("{which} again")));
        if !model.float {
            let cpu = limits.divergence(&cpu);
            // Below a hundredth of the limit, it is random which of the two is closer.
            let relative = Limits { kl: (1.2 * cpu).max(limits.kl / 100.0), ..limits };
            worst = worst.worse(relative.judge(&format!("{which} against the CPU"), &distance));
        }
        // 8-bit keys and values lose no more than 8-bit weights, or little more than on the CPU, where random weights amplify every
        // rounding.
        let of_small = |session: &mut Session| {
            let logits = session.logits(&ids, None)?;
            Ok::<_, anyhow::Error>(Distance::between(&expected, &logits[from..], vocabulary))
        };
        let on_cpu = of_small(&mut small_on_cpu)?;
        rounded.max_abs = rounded.max_abs.max(1.5 * on_cpu.max_abs);
        rounded.kl = rounded.kl.max(1.5 * rounded.divergence(&on_cpu));
        rounded.gap = rounded.gap.max(1.5 * on_cpu.worst_miss());
        let distance = of_small(&mut small_cache)?;
        worst = worst.worse(rounded.judge(&format!("{which} with a q8_0 cache"), &distance));
        if which == "short" {
            let logits = session.logits(&ids[..FEW], None)?;
            let distance = Distance::between(&expected[..logits.len()], &logits, vocabulary);
            worst = worst.worse(limits.judge("few tokens", &distance));
        }
        let count = continuation_len(&prompts[which]);
        let generated = generate(&mut session, &ids, count)?;
        let again = generate(&mut session, &ids, count)?;
        worst = worst.worse(Outcome::same(&again, &generated).at(&format!("{which} text again")));
        let text = text(&prompts[which], &expected, vocabulary, &generated, model.float);
        worst = worst.worse(text.at(which));
    }
    Ok(worst)
}

/// Checks that a model is refused in words before anything is computed.
fn check_refused(model: &Model, ordinal: usize) -> Result<Outcome> {
    let device = DeviceChoice::Cuda(ordinal);
    let options = SessionOptions { device, context: Some(CONTEXT), ..SessionOptions::default() };
    match Session::open(&model.path, &options, &mut |_, _| {}) {
        Err(why) if why.to_string().contains("the GPU has no kernels for") => {
            Ok(Outcome::same::<u8>(&[], &[]))
        }
        Err(why) => Err(why.into()),
        Ok(_) => Err(anyhow!("{} runs on a GPU: check it as the others", model.name)),
    }
}

/// Loads the model in every way: from the page cache, with direct I/O, with threads, and from a pack, which has another
/// layout and checksums. The logits must be bit-identical.
fn check_load(model: &Model, ordinal: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let pack = folder.path().join("model.fbay");
    let out = OutputFile::create(&pack)?;
    forebay_engine::pack::pack(&model.path, out, IoKind::Auto, &mut |_, _| true)?;
    let ids = prompt(&json(&model.prompts), "short");
    let logits = |path: &Path, io, cold: bool| {
        if cold {
            FileSet::of_catalog(&Catalog::open(path)?, false)?.drop_cached()?;
        }
        let device = DeviceChoice::Cuda(ordinal);
        let context = Some(CONTEXT);
        // With this option, a wrong byte is an error.
        let options = SessionOptions { device, context, io, ..SessionOptions::default() };
        let options = SessionOptions { check_weights: true, ..options };
        let mut session = Session::open(path, &options, &mut |_, _| {})?;
        Ok::<_, anyhow::Error>(session.logits(&ids, None)?)
    };
    let expected = logits(&model.path, IoKind::Mmap, false)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (what, path, io, cold) in [
        ("warm", &model.path, IoKind::Auto, false),
        ("cold", &model.path, IoKind::Auto, true),
        ("by threads", &model.path, IoKind::Pread, true),
        ("pack", &pack, IoKind::Auto, false),
        ("cold pack", &pack, IoKind::Auto, true),
    ] {
        let found = logits(path, io, cold).with_context(|| what.to_owned())?;
        worst = worst.worse(Outcome::same(&found, &expected).at(what));
    }
    Ok(worst)
}

/// Runs a text that is longer than the rows of layers with a window. The caches wrap, and results must equal the CPU's.
fn check_windows(model: &Model, ordinal: usize) -> Result<Outcome> {
    let ids = prompt(&json(&model.prompts), "long");
    // Shifts the ids in each repetition, so that tokens get other neighbours.
    let turn = |i: usize| ids[(i + i / ids.len() * 7) % ids.len()];
    let ids: Vec<u32> = (0..WRAPPED).map(turn).collect();
    let open = |device| {
        let context = Some(WRAPPED + GENERATED);
        let options = SessionOptions { device, exact: true, context, ..SessionOptions::default() };
        model.open_with(options)
    };
    let (mut session, mut cpu) = (open(DeviceChoice::Cuda(ordinal))?, open(DeviceChoice::Cpu)?);
    let vocabulary = session.vocab_size();
    let last = |session: &mut Session, ids: &[u32]| {
        let mut logits = session.logits(ids, None)?;
        logits.drain(..logits.len() - 8 * vocabulary);
        Ok::<_, anyhow::Error>(logits)
    };
    let expected = last(&mut cpu, &ids)?;
    let distance = Distance::between(&expected, &last(&mut session, &ids)?, vocabulary);
    let worst = Limits::EXACT.judge("beyond the rows", &distance);
    let generated = generate(&mut session, &ids, GENERATED)?;
    let expected = generate(&mut cpu, &ids, GENERATED)?;
    let worst = worst.worse(Outcome::same(&generated, &expected).at("greedy"));
    // Truncating by less than a batch keeps the positions, except where layers have states. Truncating to a position that the window
    // no longer holds leaves none.
    let expected = if model.has_states()? { 0 } else { WRAPPED - 100 };
    session.truncate(WRAPPED - 100);
    let kept = Outcome::same(&[session.cached_tokens().len()], &[expected]).at("positions left");
    let none = Outcome::same(&[session.truncate(20)], &[0]).at("positions left of few");
    Ok(worst.worse(kept).worse(none))
}

/// Checks that single tokens give the same bits with and without CUDA graphs, and when repeated.
fn check_graphs(model: &Model, ordinal: usize, exact: bool) -> Result<Outcome> {
    let device = DeviceChoice::Cuda(ordinal);
    let mut session = model.open(device, exact)?;
    let ids = prompt(&json(&model.prompts), "long");
    let ids: Vec<u32> = ids.iter().copied().cycle().take(ALONE).collect();
    let logits = session.logits_one_by_one(&ids)?;
    let again = session.logits_one_by_one(&ids)?;
    // When text is generated, only the largest logits are copied to the host.
    let text = generate(&mut session, &ids[..1], GENERATED)?;
    let whole = session.logits_of_answer(&ids[..1], &text)?;
    let likeliest: Vec<u32> = whole.chunks(session.vocab_size()).map(argmax).collect();
    let chosen = Outcome::same(&text[..], &likeliest[..GENERATED]).at("largest");
    drop(session);
    let context = Some(CONTEXT);
    let without = SessionOptions { device, exact, context, ..SessionOptions::default() };
    let mut session = model.open_with(SessionOptions { cuda_graphs: false, ..without })?;
    let direct = session.logits_one_by_one(&ids)?;
    let same = Outcome::same(&again, &logits).at("again");
    Ok(same.worse(Outcome::same(&direct, &logits).at("direct")).worse(chosen))
}

/// Compares the greedy text of float weights with the reference, as far as the reference was certain. The text is not
/// compared if another program computed the reference logits `[positions, vocabulary]` differently from the reference
/// text, or if there is none.
fn text(
    reference: &serde_json::Value,
    logits: &[f32],
    vocabulary: usize,
    generated: &[u32],
    float: bool,
) -> Outcome {
    if reference["greedy"].is_null() {
        return Outcome::same::<u32>(&[], &[]);
    }
    let expected = numbers(&reference["greedy"]);
    let last = &logits[logits.len() - vocabulary..];
    let likeliest = (0..vocabulary).max_by(|a, b| last[*a].total_cmp(&last[*b]));
    let same = likeliest == expected.first().map(|token| *token as usize);
    let margins = reference["greedy_margins"].as_array();
    let margins = margins.into_iter().flatten().filter_map(serde_json::Value::as_f64);
    let sure = if float && same { margins.take_while(|margin| *margin > 0.3).count() } else { 0 };
    Outcome::same(&generated[..sure], &expected[..sure])
}
