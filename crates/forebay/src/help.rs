//! Text below the options in `--help`: examples first, then notes for new users.

use clap::builder::styling::{AnsiColor, Styles};

/// Joins the lines of every paragraph of prose, so that the terminal can wrap them. Indented lines (examples) and the
/// line above them stay unchanged.
pub fn reflow(text: &str) -> String {
    let paragraph = |text: &str| match text.lines().any(|line| line.starts_with(' ')) {
        true => text.to_owned(),
        false => text.lines().collect::<Vec<_>>().join(" "),
    };
    text.split("\n\n").map(paragraph).collect::<Vec<_>>().join("\n\n")
}

/// Colours of help on a terminal. `NO_COLOR` turns them off.
pub const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Options that `-h` shows, of the commands that have many.
const FIRST: &[(&str, &[&str])] = &[
    ("run", &["model", "text", "prompt", "ram", "vram", "ctx"]),
    ("plan", &["model", "ram", "vram", "ctx", "json"]),
    ("batch", &["model", "input", "output", "ram", "vram", "parallel"]),
    ("serve", &["model", "host", "port", "api_key_file", "vram", "ctx"]),
    ("bench", &["model", "ram", "vram", "prompt_tokens", "gen_tokens"]),
    ("assess", &["models", "output", "ram", "vram", "prompts"]),
    ("replay", &["traces", "policy", "capacity", "phase", "json"]),
    ("load", &["model", "device", "cold", "repeat", "json"]),
    ("logits", &["model", "tokens", "output", "ram", "vram"]),
];

/// Hides all but the first options of a command from `-h`, which says how to see the others.
pub fn shortened(command: clap::Command) -> clap::Command {
    let name = command.get_name().to_owned();
    let examples = command.get_after_help().map(|text| examples(&text.to_string()));
    let Some((_, first)) = FIRST.iter().find(|(of, _)| *of == name) else {
        let all = command.get_after_help().map(|text| reflow(&text.to_string()));
        return command.after_help(all.unwrap_or_default());
    };
    let total = command.get_arguments().filter(|argument| !argument.is_positional()).count();
    let more = format!("forebay {name} --help shows all {total} options, and more examples.");
    command
        .mut_args(|argument| match first.contains(&argument.get_id().as_str()) {
            true => argument,
            false => argument.hide_short_help(true),
        })
        .after_help(format!("{}\n\n{more}", examples.unwrap_or_default()))
}

/// Returns the first examples of a command.
fn examples(text: &str) -> String {
    text.lines().take_while(|line| !line.is_empty()).take(4).collect::<Vec<_>>().join("\n")
}

pub const TOP: &str = "\
Start here:
  forebay run                    the demo model writes a story
  forebay pull OWNER/REPO        download a model from Hugging Face
  forebay run MODEL --ram 8GiB   chat with a model larger than 8 GiB
  forebay inspect MODEL          what the model is made of

Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 ended by Ctrl-C.
--log debug logs each step and its duration to standard error (docs/logging.md).";

pub const RUN: &str = "\
Examples:
  forebay run
  forebay run model.gguf 'Why is the sky blue?' --stats
  forebay run model.gguf --ram 8GiB
  forebay run model.gguf -p 'Summarise this text:' < report.txt
  forebay run model.gguf -f question.txt --system 'Be brief.' --think off
  echo 'def quicksort(xs):' | forebay run model.gguf --raw -n 200
  forebay render model.gguf < messages.json | forebay run model.gguf --raw
  forebay run model.gguf -p Hello --temperature 0 --json

The answer goes to standard output, the model's thinking to standard error. In a chat, /help lists
the commands. Your input is saved in forebay/chat-history below $XDG_STATE_HOME, else below
~/.local/state. Ctrl-C stops the answer; at the prompt it quits.";

pub const PLAN: &str = "\
Examples:
  forebay doctor && forebay plan unsloth/Qwen3-30B-A3B-GGUF
  forebay plan unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
  forebay plan --shape qwen3moe-30b
  forebay plan model.gguf --vram 8GiB --ram 32GiB
  forebay plan model.gguf --profile other.json --vram 16GiB --ram 64GiB
  forebay plan model.gguf --ram 8GiB --routing story.routing

No weights are read, and of a repository at most 16 MiB of headers. Speeds are predicted from a machine profile and from the hit rates of recorded
routing, usually within 20 % of the measured speed. If the machine was busy when it was measured,
speeds are ranges. There is no prediction for a model of a few megabytes.";

pub const BATCH: &str = "\
Examples:
  forebay batch model.gguf requests.jsonl -o answers.jsonl
  forebay batch model.gguf requests.jsonl -o answers.jsonl --vram 8GiB --parallel 4

A line of IN.jsonl, with url /v1/completions or /v1/chat/completions:
  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 100}}

After an interrupt, the same command resumes where it ended. Without --ctx, the context is as long as the
longest request needs. A request without a seed gets one from the file and its line.";

pub const SERVE: &str = "\
Examples:
  forebay serve model.gguf
  forebay serve model.gguf --vram 8GiB --parallel 4 --ctx 16384
  forebay serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  forebay serve large.gguf small.gguf --vram 20GiB
  forebay serve --models ~/models --keep-alive 30m
  forebay serve model.gguf --kv-disk ~/kv --kv-disk-size 64GiB

Programs then use http://127.0.0.1:8080/v1 as the address of OpenAI, http://127.0.0.1:8080 as that of
Anthropic or Ollama. Models that do not fit together are loaded on request. Ctrl-C ends the server when its answers are finished, and at once if pressed again.";

pub const PS: &str = "\
Examples:
  forebay ps
  forebay ps --server http://gpu-machine:8080 --api-key-file keys.txt
  FOREBAY_HOST=gpu-machine:8080 forebay ps --json";

pub const PULL: &str = "\
Examples:
  forebay pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
  forebay pull hf.co/unsloth/Qwen3-0.6B-GGUF
  forebay run unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M --vram 8GiB
  forebay pull Qwen/Qwen3-0.6B --revision main --jobs 4

A model that cannot run here is refused before its first weight, and one that can is named. After
Ctrl-C or a failure, the same command resumes the pull. Every file is compared with
its checksum before it gets its name. HF_ENDPOINT names another hub; HF_TOKEN, or the file of
Hugging Face's own login, gives access to private and gated models.";

pub const LIST: &str = "\
Examples:
  forebay list
  forebay list --json
  forebay list --models models/";

pub const RM: &str = "\
Examples:
  forebay rm unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
  forebay rm unsloth/Qwen3-0.6B-GGUF Qwen/Qwen3-0.6B

A name whose pull is not finished is removed with what has arrived. Files that another name has, too,
stay.";

pub const KV: &str = "\
Examples:
  forebay kv list ~/kv
  forebay kv verify ~/kv
  forebay kv gc ~/kv --size 8GiB
  forebay kv wipe ~/kv

`forebay serve --kv-disk DIR` makes such a folder. A server that uses it continues with what it can read.";

pub const BENCH: &str = "\
Examples:
  forebay bench model.gguf
  forebay bench model.gguf --ram 4GiB --prompt-tokens 0 --gen-tokens 64
  forebay bench model.gguf --json

The first run warms up the caches and is not counted.";

pub const ASSESS: &str = "\
Examples:
  forebay assess model.gguf
  forebay assess a.gguf b.gguf -o report.html
  forebay assess model.gguf --prompts mine.jsonl --tokens 200 --json
  forebay assess model.gguf --ram 8GiB --svg figures/

A prompt file holds one JSON object per line with `text` and, if you like, `domain`, `language` and
`kind` (completion or chat); or plain texts with a line --- between them. --ram changes how long the
recording takes, but not the routing. Speeds are predicted if forebay doctor has saved a profile.";

pub const TRACE_IO: &str = "\
Examples:
  forebay run --trace-io demo.trace
  forebay trace-io demo.trace --html demo.html
  forebay bench model.gguf --ram 8GiB --trace-io bench.trace
  forebay trace-io bench.trace --limit 3.3GiB --json

A read is sequential when it begins where one of the 64 before it, in the same part of the model,
ended; a part is sequential from 80 % of such reads on, random up to 20 %, hybrid between.";

pub const REPLAY: &str = "\
Examples:
  forebay run model.gguf --prompt 'Hello' --trace-routing story.routing
  forebay replay story.routing
  forebay replay story.routing --policy layer-lfu --policy lru --capacity 25%
  forebay replay published.csv --phase generate --capacity 500MiB --json
  forebay replay story.routing --predict lag --policy layer-lfu
  forebay run model.gguf --trace-routing scored.routing --trace-scores
  forebay replay scored.routing --predict next-router --policy layer-lfu
  forebay replay published.csv --to-trace published.routing

Policies: recency (lru, slru), frequency (lfu, which forgets with time; lfu-unaged, which does not),
both (lfru), the order of layers (least-stale), any (random); each for all layers together or, with
layer- in front, for each layer by itself. hot-list and belady know the whole trace: they show the
hits of the best fixed set of experts and of the best possible cache.

A batch looks up each of its experts once. Experts are evicted after the batch.";

pub const INSPECT: &str = "\
Examples:
  forebay inspect model.gguf
  forebay inspect model-00001-of-00003.gguf --tensors
  forebay inspect folder/ --json";

pub const LOAD: &str = "\
Examples:
  forebay load model.gguf
  forebay load model.gguf --cold --repeat 3
  forebay load model.gguf --io mmap --cold --json
  forebay load model.gguf --device cuda --repeat 3
  forebay load folder/ --device cuda:1 --vram 24GiB --check
  forebay load model.gguf --device cuda --io cufile --cold

Several threads copy cached file ranges from the page cache. The others are read with direct I/O, so
a load does not evict other programs' data. The whole model must fit into free memory of the host or
the GPU. Weights for a GPU pass through a small ring of pinned memory.";

pub const DOCTOR: &str = "\
Examples:
  forebay doctor
  forebay doctor /models
  forebay doctor --file /models/model.gguf
  forebay doctor --no-save --json

The profile is saved in forebay below $XDG_STATE_HOME, else below ~/.local/state, and holds for this
machine and the disk of DIR. Each disk has its own. Nothing else is left on disk. Measure while the
machine is idle: if other programs are busy, doctor warns and marks the profile, and predictions from
it are ranges.";

pub const LOGITS: &str = "\
Examples:
  forebay logits model.gguf --tokens 1,2,3 -o logits.safetensors
  forebay logits model.gguf --tokens @ids.txt --routing -o out.safetensors
  forebay logits model.gguf --tokens 1,2,3 --ram 2GiB -o small.safetensors
  forebay logits model.gguf --tokens 1,2,3 --mtp -o predicted.safetensors

Row i of `mtp_logits` is about token i + 2, and follows from token i + 1. For the last row, this is the likeliest
token after the given ones.

The same model, tokens and arithmetic give the same bytes under every budget, policy and reader.";

pub const TOKENIZE: &str = "\
Examples:
  forebay tokenize model.gguf --text 'Once upon a time'
  forebay tokenize model.gguf --no-special < chapter.txt
  forebay tokenize model.gguf --parse-special --text '<|im_start|>user'";

pub const RENDER: &str = "\
Examples:
  echo '[{\"role\": \"user\", \"content\": \"Hi\"}]' | forebay render model.gguf
  forebay render model.gguf --no-generation-prompt < conversation.json

Standard input is a list of messages, or an object with `messages` and optionally `tools` and
`add_generation_prompt`; what else it holds is passed on as variables of the template.";

pub const COMPLETIONS: &str = "\
Examples:
  forebay completions bash > /etc/bash_completion.d/forebay
  forebay completions zsh > ~/.zfunc/_forebay
  forebay completions fish > ~/.config/fish/completions/forebay.fish

The script asks forebay itself, so it knows the names of models, too.";

pub const CONFIG: &str = "\
Examples:
  forebay config
  forebay config --json

The file is forebay/config.toml below $XDG_CONFIG_HOME, else below ~/.config, or $FOREBAY_CONFIG. Its
keys are long options: at the top for all commands, in a table for one.

For example:
  models = \"/models\"
  [run]
  ram = \"8GiB\"
  temperature = 0.7

The command line wins over environment variables, and these over the file.";

pub const SYNTH: &str = "\
Examples:
  forebay synth qwen3moe-30b out.gguf
  forebay synth llama-8b out.gguf --quantisation Q8_0 --layers 4
  forebay synth deepseek-v3 out.gguf --layers 8
  forebay synth mixtral-8x7b out.gguf --seed 7 --force

The weights are random: such a model has the speed of the real one, and writes nonsense. Their type is
that of published files, Q4_K_M for most and MXFP4 experts for gpt-oss.";

pub const PACK: &str = "\
Examples:
  forebay pack model.gguf -o model.fbay
  forebay pack folder/ -o model.fbay --force
  forebay pack model.fbay --to-gguf model.gguf
  forebay pack model.fbay --to-huggingface folder/

In a pack every block of weights is one piece, in the order in which blocks are used, and every
byte has a checksum. The weights and the model's answers stay bit-identical.";

pub const VERIFY: &str = "\
Examples:
  forebay verify model.fbay
  forebay verify model.fbay --json

If the pack is damaged, verify lists the damaged blocks and tensors and exits with status 1.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_joined_and_examples_stay() {
        let text = "Examples:\n  one\n  two\n\nFirst line\nsecond line.\n\nLast.";
        assert_eq!(reflow(text), "Examples:\n  one\n  two\n\nFirst line second line.\n\nLast.");
    }
}
