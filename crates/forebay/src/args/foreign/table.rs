//! The options and commands of llama.cpp, Ollama and vLLM that people type, and what they mean here.

/// Names of an option elsewhere, with what it means here.
pub struct Row {
    pub names: &'static [&'static str],
    pub meaning: Meaning,
}

/// What an option of another program means here.
#[derive(Clone, Copy)]
pub enum Meaning {
    /// Its value is MODEL.
    Model,
    /// The same as this option, with the same values.
    Same(&'static str),
    /// The same as this option. These values mean what happens without it.
    SameUnless(&'static [&'static str], &'static str),
    /// The same as this flag.
    Flag(&'static str),
    /// Values with the words that mean the same; the sentence is about other values.
    Values(&'static [(&'static str, &'static [&'static str])], &'static str),
    /// `-ctk` (0) and `-ctv` (1).
    CacheType(usize),
    /// What always happens here.
    Always,
    /// What always happens here. One of these values may follow.
    AlwaysWith(&'static [&'static str]),
    /// There is no such thing; the sentence says what there is.
    Instead(&'static str),
}

const fn row(names: &'static [&'static str], meaning: Meaning) -> Row {
    Row { names, meaning }
}

const MEMORY: &str = "forebay decides what goes where: --vram SIZE and --ram SIZE are its limits, and --cpu-experts lets \
                      the CPU compute experts that VRAM lacks";
const ONE_GPU: &str = "forebay computes on one GPU: --device cuda:N chooses it";
const BATCH: &str = "forebay chooses the size of its passes from the memory that is free";
const SAMPLING: &str = "forebay samples with --temperature, --top-k, --top-p, --min-p and --repeat-penalty; requests to \
                        forebay serve may have more";
const ROPE: &str = "forebay takes this from the model's file";
const KEY: &str = "other users of the machine can read keys on a command line: --api-key-file FILE has one on each line";
const SCHEMA: &str = "forebay takes schemas and grammars in requests: `response_format` of forebay serve and forebay batch";
const DRAFT: &str =
    "forebay has no draft models: --mtp on uses the layer that some models have for this";
const TEMPLATE: &str = "forebay uses the template in the model's file: --template-arg sets its variables, --raw goes without it";

#[rustfmt::skip]
pub const OPTIONS: &[Row] = &[
    // The model.
    row(&["-m", "--model", "-hf", "-hfr", "--hf-repo"], Meaning::Model),
    row(&["-mu", "--model-url", "-hff", "--hf-file", "-dr", "--docker-repo"], Meaning::Instead("forebay pull OWNER/REPO:QUANT downloads a model from Hugging Face, and its name then stands for MODEL")),
    row(&["-hft", "--hf-token"], Meaning::Instead("forebay takes the token from the environment variable HF_TOKEN")),
    row(&["-a", "--alias", "--served-model-name"], Meaning::Same("--name")),
    row(&["--lora", "--lora-scaled", "--enable-lora", "--lora-modules"], Meaning::Instead("forebay has no adapters: merge it into the model first")),
    row(&["-mm", "-mmu", "--mmproj", "--mmproj-url", "--image", "--audio"], Meaning::Instead("forebay reads text only")),
    row(&["-md", "--model-draft", "-hfd", "--hf-repo-draft", "-ngld", "--speculative-config", "--draft-max", "--spec-type"], Meaning::Instead(DRAFT)),
    row(&["--quantization", "-q", "--dtype", "--load-format"], Meaning::Values(&[("auto", &[])], "forebay computes with the types of the model's file: choose a file with another quantisation")),
    row(&["--tokenizer", "--hf-config-path", "--revision"], Meaning::Instead("forebay takes it from the model's file or folder; forebay pull has --revision")),
    row(&["--trust-remote-code"], Meaning::Instead("forebay never runs code of a model")),
    row(&["--download-dir"], Meaning::Instead("--models DIR, before or after the command, names the folder of the library")),
    // Memory and devices.
    row(&["-c", "--ctx-size", "--max-model-len", "--num-ctx"], Meaning::Same("--ctx")),
    row(&["-ngl", "--gpu-layers", "--n-gpu-layers"], Meaning::Values(&[("99", &[]), ("999", &[]), ("-1", &[]), ("100", &[]), ("all", &[]), ("auto", &[]), ("0", &["--device", "cpu"])], MEMORY)),
    row(&["-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor", "-fit", "--fit", "-fitt", "-fitc", "--gpu-memory-utilization", "--cpu-offload-gb", "-nkvo", "--no-kv-offload", "--swap-space", "-otd", "-ncmoed", "-cmoed"], Meaning::Instead(MEMORY)),
    row(&["-dev"], Meaning::Values(&[("none", &["--device", "cpu"]), ("CUDA0", &["--device", "cuda:0"]), ("CUDA1", &["--device", "cuda:1"]), ("CUDA2", &["--device", "cuda:2"]), ("CUDA3", &["--device", "cuda:3"])], ONE_GPU)),
    row(&["-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"], Meaning::Instead(ONE_GPU)),
    row(&["-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size"], Meaning::Values(&[("1", &[])], ONE_GPU)),
    row(&["-ctk", "--cache-type-k"], Meaning::CacheType(0)),
    row(&["-ctv", "--cache-type-v"], Meaning::CacheType(1)),
    row(&["--kv-cache-dtype"], Meaning::Values(&[("auto", &[])], "forebay keeps keys and values as --kv-type f16, q8_0 or q4_0")),
    row(&["-tb", "--threads-batch"], Meaning::Instead("--threads holds for prompts and answers")),
    row(&["--numa", "-C", "--cpu-mask", "--prio", "--poll"], Meaning::Instead("forebay has no such option: start it with numactl, taskset or nice")),
    row(&["-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens"], Meaning::Instead(BATCH)),
    row(&["-fa", "--flash-attn"], Meaning::AlwaysWith(&["on", "auto", "1"])),
    row(&["--no-mmap", "--no-warmup", "-nr", "-cb", "--cont-batching", "-kvu", "--kv-unified", "--enable-chunked-prefill"], Meaning::Always),
    row(&["--mmap"], Meaning::Instead("forebay reads weights into its own memory: --io mmap maps them, which is slower")),
    row(&["--mlock"], Meaning::Instead("forebay reserves its memory at the start: --ram SIZE says how much")),
    row(&["--enforce-eager"], Meaning::Flag("--no-cuda-graph")),
    row(&["--check-tensors"], Meaning::Instead("forebay verify checks a pack")),
    row(&["--list-devices"], Meaning::Instead("forebay doctor shows this machine's devices and how fast they are")),
    row(&["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor", "--override-kv", "--hf-overrides"], Meaning::Instead(ROPE)),
    // Prompts and chats.
    row(&["-sys", "--system-prompt"], Meaning::Same("--system")),
    row(&["-sysf", "--system-prompt-file"], Meaning::Same("--system-file")),
    row(&["-bf", "--binary-file", "--in-prefix", "--in-suffix", "--in-prefix-bos", "-r", "--reverse-prompt"], Meaning::Instead("forebay takes the prompt from --prompt, --file or standard input, and --stop TEXT ends an answer")),
    row(&["-e", "--escape"], Meaning::Instead("forebay takes a prompt as it is: the shell's $'a\\nb' has a line break in it")),
    row(&["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-st", "--single-turn", "--no-display-prompt", "-co", "--simple-io", "--no-escape", "--jinja"], Meaning::Always),
    row(&["--color"], Meaning::AlwaysWith(&["on", "auto"])),
    row(&["-no-cnv", "--no-conversation"], Meaning::Flag("--raw")),
    row(&["-mli", "--multiline-input"], Meaning::Instead("in a chat, \"\"\" begins and ends a message of several lines")),
    row(&["--chat-template", "--chat-template-file", "--no-jinja"], Meaning::Instead(TEMPLATE)),
    row(&["--chat-template-kwargs"], Meaning::Instead("--template-arg NAME=VALUE sets a variable of the chat template")),
    row(&["--reasoning-budget"], Meaning::Values(&[("-1", &[]), ("0", &["--think", "off"])], "--think low, medium or high says how much a model thinks")),
    row(&["--reasoning-format", "-rea", "--reasoning"], Meaning::Instead("forebay separates what a model thinks from its answer; --think on, off, low, medium or high says how much it thinks, --hide-thinking hides it")),
    row(&["--hidethinking"], Meaning::Flag("--hide-thinking")),
    row(&["--nowordwrap"], Meaning::Instead("forebay breaks lines on a terminal only: | cat shows them as they are")),
    row(&["--format"], Meaning::Instead(SCHEMA)),
    row(&["--verbose"], Meaning::Flag("--stats")),
    row(&["--context-shift"], Meaning::Always),
    row(&["--no-context-shift"], Meaning::Values(&[], "--on-full stop ends an answer when the context is full")),
    row(&["--prompt-cache", "--prompt-cache-all", "--slot-save-path"], Meaning::Instead("/save and /load in a chat keep the keys and values of a conversation, and --kv-disk DIR of forebay serve those of all")),
    row(&["--keep"], Meaning::Instead("when the context is full, the system message stays and the oldest turns leave")),
    // Sampling.
    row(&["--temp"], Meaning::Same("--temperature")),
    row(&["--predict", "--n-predict", "--num-predict"], Meaning::SameUnless(&["-1", "-2"], "--max-tokens")),
    row(&["--samplers", "--sampler-seq", "--sampling-seq", "--mirostat", "--mirostat-lr", "--mirostat-ent", "--typical", "--typical-p", "--xtc-probability", "--xtc-threshold", "--dry-multiplier", "--top-nsigma", "--dynatemp-range", "--presence-penalty", "--frequency-penalty", "--repeat-last-n", "-l", "--logit-bias", "--ignore-eos"], Meaning::Instead(SAMPLING)),
    row(&["--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file", "--guided-decoding-backend"], Meaning::Instead(SCHEMA)),
    // Servers.
    row(&["-np", "--max-num-seqs"], Meaning::Same("--parallel")),
    row(&["--keepalive"], Meaning::Same("--keep-alive")),
    row(&["--api-key"], Meaning::Instead(KEY)),
    row(&["--allowed-origins"], Meaning::Same("--cors")),
    row(&["--embedding", "--embeddings", "--metrics", "--slots", "--props", "--enable-prefix-caching", "--cache-prompt", "--enable-auto-tool-choice", "--webui"], Meaning::Always),
    row(&["--tool-call-parser", "--reasoning-parser"], Meaning::Instead("forebay recognises the form of tool calls and thinking from the model's template")),
    row(&["--no-webui", "--path", "--api-prefix", "--static-path", "-to", "--timeout", "--ssl-key-file", "--ssl-cert-file", "--ssl-keyfile", "--ssl-certfile"], Meaning::Instead("forebay serve has no such option: a proxy such as nginx or Caddy in front of it does this")),
    row(&["-lv", "--verbosity", "--log-verbosity", "-lf", "--log-file", "--log-disable", "--log-colors", "-v", "--log-verbose"], Meaning::Instead("--log LEVEL says how much is logged, on standard error")),
];

/// Values of options of this program as other programs write them: names, value, and the words that mean the same.
#[rustfmt::skip]
pub const VALUES: &[(&[&str], &str, &[&str])] = &[
    (&["-n", "--max-tokens"], "-1", &[]),
    (&["-n", "--max-tokens"], "-2", &[]),
    (&["-s", "--seed"], "-1", &[]),
    (&["--device"], "none", &["--device", "cpu"]),
    (&["--device"], "CUDA0", &["--device", "cuda:0"]),
    (&["--device"], "CUDA1", &["--device", "cuda:1"]),
    (&["--think"], "true", &["--think", "on"]),
    (&["--think"], "false", &["--think", "off"]),
];

/// Commands of other programs with what there is instead.
pub const COMMANDS: &[(&[&str], &str)] = &[
    (&["create"], "forebay runs GGUF files and Hugging Face folders as they are: forebay run FILE"),
    (
        &["push", "signin", "signout", "login"],
        "forebay uploads nothing: forebay pull OWNER/REPO downloads a model",
    ),
    (&["cp", "copy"], "a name of the library is that of its repository: forebay list shows them"),
    (
        &["stop", "unload"],
        "forebay serve --keep-alive TIME unloads a model that is not used, and Ctrl-C ends a server",
    ),
    (&["server", "start", "api"], "forebay serve MODEL answers requests of other programs"),
    (
        &["chat", "cli", "complete", "generate", "completion"],
        "forebay run MODEL is a chat, and forebay run MODEL TEXT answers once",
    ),
    (
        &["download", "install", "add", "get"],
        "forebay pull OWNER/REPO downloads a model from Hugging Face",
    ),
    (
        &["convert", "quantize"],
        "forebay runs a file with the types that it has; forebay pack makes a container for streaming",
    ),
    (&["run-batch"], "forebay batch MODEL IN.jsonl -o OUT.jsonl answers a file of requests"),
    (
        &["perplexity", "eval"],
        "forebay logits writes the logits of given tokens, forebay bench measures speed",
    ),
];
