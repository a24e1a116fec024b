//! Resolves typed arguments into a configuration. No other module does this.
//!
//! Options that cannot take effect are refused here, before any work.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_chat::{Format, Think};
use forebay_engine::{DeviceChoice, KvCacheType, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_store::IoKind;
use serde_json::{Map, Value};

use crate::args::{
    BudgetArgs, ChatArgs, Device, IoArg, KvTypeArg, OnFullArg, RoutingArgs, RunArgs, SamplingArgs,
    TracingArgs,
};
use crate::demo;
use crate::failure::{Outcome, usage};
use crate::interrupt;
use crate::text_input;

/// Configuration of `run`.
pub struct RunConfig {
    pub model: PathBuf,
    /// True if the user named no model, so that the demo model runs.
    pub demo: bool,
    pub prompt: PromptSource,
    pub raw: bool,
    pub template: TemplateConfig,
    pub hide_thinking: bool,
    /// Files that the prompt was read from. No output may replace them.
    pub inputs: Vec<PathBuf>,
    pub session: SessionOptions,
    pub answer: AnswerConfig,
    pub tracing: TracingArgs,
    pub routing: RoutingArgs,
    /// True to print statistics for people.
    pub stats: bool,
    pub json: bool,
}

/// Source of the prompt. If nothing is given and nothing piped, `run` starts a chat.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptSource {
    /// Text of `--prompt`, TEXT or `--file`.
    pub given: Option<String>,
    /// True if standard input is not a terminal. Its contents are then the prompt, or part of it.
    pub piped: bool,
}

/// Inputs of the chat template besides the conversation.
#[derive(Clone, Debug, Default)]
pub struct TemplateConfig {
    pub system: Option<String>,
    pub think: Option<Think>,
    pub variables: Vec<(String, Value)>,
    pub special_tokens_in_messages: bool,
}

impl TemplateConfig {
    /// Returns the first given option that only has an effect through a chat template.
    pub fn option(&self) -> Option<&'static str> {
        let options = [
            (self.system.is_some(), "--system"),
            (self.think.is_some(), "--think"),
            (!self.variables.is_empty(), "--template-arg"),
            (self.special_tokens_in_messages, "--special-tokens-in-messages"),
        ];
        options.into_iter().find(|(given, _)| *given).map(|(_, name)| name)
    }

    /// Returns the variables to set in a template of this format.
    pub fn variables(&self, format: &Format) -> Outcome<Map<String, Value>> {
        let mut variables = match self.think.map(|think| format.think(think)).transpose() {
            Ok(variables) => variables.unwrap_or_default(),
            Err(error) => return usage(format!("--think: {error}")),
        };
        for (name, value) in &self.variables {
            if let Err(error) = format.check_variable(name) {
                return usage(format!("--template-arg {name}: {error}"));
            }
            if variables.insert(name.clone(), value.clone()).is_some() {
                return usage(format!("--template-arg {name}: set twice, or by --think too"));
            }
        }
        Ok(variables)
    }
}

/// Behaviour of a chat when its context is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// Drops the oldest turns and processes the remaining ones again.
    #[default]
    Shift,
    Stop,
}

/// Sampling and limits of an answer.
#[derive(Clone)]
pub struct AnswerConfig {
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    pub stops: Vec<String>,
    pub on_full: OnFull,
}

/// Resolves the arguments of `run`.
pub fn run(args: RunArgs) -> Outcome<RunConfig> {
    let demo = args.model.is_none();
    let mut session = session(&args.budget)?;
    session.mtp = args.mtp.is_on();
    let mut answer = answer(&args.sampling, demo)?;
    let inputs = args.file.iter().chain(&args.chat.system_file).cloned().collect();
    let given = prompt_text(args.text, args.prompt, args.file)?;
    let prompt = PromptSource { given, piped: !std::io::stdin().is_terminal() };
    if args.json && !demo && prompt.given.is_none() && !prompt.piped {
        return usage("--json needs a prompt: give --prompt TEXT, or text on standard input");
    }
    if args.chat.on_full.is_some() && (demo || prompt.given.is_some() || prompt.piped) {
        return usage("--on-full is for chats: a single prompt has no turns to drop");
    }
    if let Some(OnFullArg::Stop) = args.chat.on_full {
        answer.on_full = OnFull::Stop;
    }
    if args.mtp.is_on() && args.routing.trace_routing.is_some() {
        return usage(
            "--mtp on: the routing of proposals is not recorded: leave out --trace-routing",
        );
    }
    let template = template(&args.chat)?;
    if let (true, Some(option)) = (demo, template.option()) {
        return usage(format!("{option}: the demo model was not trained to chat: name a MODEL"));
    }
    if demo {
        answer.max_tokens.get_or_insert(demo::TOKENS_MAX);
    }
    let model = match args.model {
        Some(path) => path,
        None => demo::find()?,
    };
    let stats = (args.stats || demo) && !args.json;
    Ok(RunConfig {
        model,
        demo,
        prompt,
        raw: args.chat.raw || demo,
        template,
        hide_thinking: args.chat.hide_thinking,
        inputs,
        session,
        answer,
        tracing: args.tracing,
        routing: args.routing,
        stats,
        json: args.json,
    })
}

fn prompt_text(
    text: Option<String>,
    prompt: Option<String>,
    file: Option<PathBuf>,
) -> Outcome<Option<String>> {
    let (name, text) = match (text.or(prompt), file) {
        (Some(text), _) => ("--prompt".to_owned(), text),
        (None, Some(file)) => {
            let shown = format!("--file {}", file.display());
            let text = text_input::file(&file, &shown)?;
            (shown, text)
        }
        (None, None) => return Ok(None),
    };
    match text.trim().is_empty() {
        true => usage(format!("{name} is empty: write some text")),
        false => Ok(Some(text)),
    }
}

fn template(args: &ChatArgs) -> Outcome<TemplateConfig> {
    let system = match &args.system_file {
        None => args.system.clone(),
        Some(file) => Some(text_input::file(file, &format!("--system-file {}", file.display()))?),
    };
    Ok(TemplateConfig {
        system,
        think: args.think,
        variables: args.template_arg.clone(),
        special_tokens_in_messages: args.special_tokens_in_messages,
    })
}

/// Resolves budgets, devices and readers.
pub fn session(args: &BudgetArgs) -> Outcome<SessionOptions> {
    Ok(SessionOptions {
        device: device(args.device),
        vram_bytes: args.vram,
        ram_bytes: args.ram,
        context: args.ctx,
        threads: args.threads,
        exact: args.exact,
        kv_cache: kv_cache(args.kv_type),
        kv_in_vram: args.kv_vram.unwrap_or_default(),
        cuda_graphs: !args.no_cuda_graph,
        cpu_offload: args.cpu_offload.resolve(),
        policy: args.policy,
        prefetch: args.prefetch,
        io: io_kind(args.io),
        verify: !args.no_verify,
        interrupt: interrupt::token(),
        ..SessionOptions::default()
    })
}

pub fn device(device: Device) -> DeviceChoice {
    match device {
        Device::Auto => DeviceChoice::Auto,
        Device::Cpu => DeviceChoice::Cpu,
        Device::Cuda(ordinal) => DeviceChoice::Cuda(ordinal.unwrap_or(0) as usize),
    }
}

pub fn kv_cache(kv_type: KvTypeArg) -> KvCacheType {
    match kv_type {
        KvTypeArg::F16 => KvCacheType::F16,
        KvTypeArg::Q8_0 => KvCacheType::Q8_0,
        KvTypeArg::Q4_0 => KvCacheType::Q4_0,
    }
}

pub fn io_kind(io: IoArg) -> IoKind {
    match io {
        IoArg::Auto => IoKind::Auto,
        IoArg::Uring => IoKind::Uring,
        IoArg::Pread => IoKind::Pread,
        IoArg::Mmap => IoKind::Mmap,
    }
}

/// Resolves sampling and limits. Options that the user did not give have other defaults for the demo model.
fn answer(args: &SamplingArgs, demo: bool) -> Outcome<AnswerConfig> {
    if args.stop.iter().any(String::is_empty) {
        return usage("--stop is empty: write the text that shall end the answer");
    }
    let mut sampling = match demo {
        true => demo::sampling(),
        false => Sampling { seed: fresh_seed(), ..Sampling::default() },
    };
    sampling.top_k = args.top_k;
    sampling.top_p = args.top_p;
    sampling.min_p = args.min_p;
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.repeat_penalty = args.repeat_penalty.unwrap_or(sampling.repeat_penalty);
    sampling.seed = args.seed.unwrap_or(sampling.seed);
    Ok(AnswerConfig {
        max_tokens: args.max_tokens,
        sampling,
        stops: args.stop.clone(),
        on_full: OnFull::default(),
    })
}

/// Returns a seed that is short enough to retype.
fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64 ^ u64::from(std::process::id()) << 16) % 1_000_000_000
}

/// Returns the ids in `1,2,3`, or in the file that `@FILE` names. Ids in a file are separated by commas or white space,
/// and the brackets of a JSON list are allowed.
pub fn token_ids(text: &str) -> Outcome<Vec<u32>> {
    let (source, text) = match text.strip_prefix('@') {
        None => ("--tokens".to_string(), text.to_string()),
        Some(path) => {
            (path.to_string(), text_input::file(Path::new(path), &format!("--tokens @{path}"))?)
        }
    };
    let mut ids = Vec::new();
    let is_separator = |c: char| c == ',' || c.is_whitespace();
    let inner = text.trim();
    let inner = inner.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(inner);
    for word in inner.split(is_separator).filter(|word| !word.is_empty()) {
        let Ok(id) = word.parse::<u32>() else {
            let shown: String = word.chars().take(20).collect();
            return usage(format!(
                "{source}: '{shown}' is not a token id: write ids as in 1,2,3 (see forebay tokenize)"
            ));
        };
        ids.push(id);
    }
    if ids.is_empty() {
        return usage(format!("{source}: holds no token ids: write them as in 1,2,3"));
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::failure::Failure;
    use clap::Parser as _;
    use forebay_stream::PolicyKind;

    fn resolve(arguments: &[&str]) -> Outcome<RunConfig> {
        let cli = Cli::try_parse_from(["forebay", "run"].iter().chain(arguments)).unwrap();
        match cli.command {
            Command::Run(args) => run(args),
            _ => unreachable!("parsed as run"),
        }
    }

    #[test]
    fn budgets_and_sampling_arrive() {
        let config = resolve(&[
            "m.gguf",
            "--prompt",
            "x",
            "--ram",
            "1GiB",
            "--policy",
            "lru",
            "--io",
            "pread",
            "--ctx",
            "64",
            "--threads",
            "2",
            "--exact",
            "--seed",
            "7",
            "--top-k",
            "3",
            "--stop",
            "a",
            "--stop",
            "b",
            "--stats",
        ])
        .unwrap_or_else(|_| panic!("must resolve"));
        assert_eq!(config.session.ram_bytes, Some(1 << 30));
        assert_eq!(config.session.policy, PolicyKind::LRU);
        assert_eq!(config.session.io, IoKind::Pread);
        assert_eq!((config.session.context, config.session.threads), (Some(64), Some(2)));
        assert_eq!((config.answer.sampling.seed, config.answer.sampling.top_k), (7, 3));
        assert_eq!(config.answer.stops, ["a", "b"]);
        assert_eq!(config.prompt.given.as_deref(), Some("x"));
        assert!(config.session.exact && config.stats && !config.demo && !config.raw);
    }

    #[test]
    fn the_help_tells_the_defaults() {
        let Ok(config) = resolve(&["m", "--prompt", "x"]) else { panic!("must resolve") };
        assert_eq!(config.session.device, DeviceChoice::Auto);
        let sampling = config.answer.sampling;
        let help = <Cli as clap::CommandFactory>::command()
            .find_subcommand_mut("run")
            .map(|run| run.render_help().to_string())
            .unwrap_or_default();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for value in [sampling.temperature, sampling.repeat_penalty, sampling.top_p, sampling.min_p]
        {
            assert!(help.contains(&format!("default: {value}]")), "{value}");
        }
        let library = Sampling::default();
        assert_eq!((sampling.temperature, sampling.top_k), (library.temperature, library.top_k));
        assert_eq!((sampling.top_p, sampling.min_p), (library.top_p, library.min_p));
    }

    #[test]
    fn what_cannot_take_effect_is_refused() {
        let status = |arguments: &[&str]| resolve(arguments).err().map(|f| f.status());
        assert_eq!(status(&["m", "--prompt", ""]), Some(2));
        assert_eq!(status(&["m", "--prompt", "x", "--stop", ""]), Some(2));
        assert_eq!(status(&["m", "--prompt", "x", "--device", "cpu"]), None);
    }

    #[test]
    fn ids_in_all_forms() {
        let ids = |text: &str| token_ids(text).ok();
        assert_eq!(ids("1,2,3"), Some(vec![1, 2, 3]));
        assert_eq!(ids("[1, 2 3]"), Some(vec![1, 2, 3]));
        for wrong in ["", ",", "a", "1,-2", "1;2", "4294967296", "@/no/such/file"] {
            assert!(ids(wrong).is_none(), "{wrong}");
        }
        assert!(matches!(token_ids("x"), Err(Failure::Usage(_))));
    }
}
