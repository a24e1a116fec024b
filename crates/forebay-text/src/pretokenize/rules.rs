//! Pre-tokenizers by name.
//!
//! The patterns are those of the models' own `tokenizer.json`, with two changes. The ending
//! `\s+(?!\S)|\s+` is written as `\s+` and a [`Tail`]. Possessive quantifiers are written as greedy
//! ones; the adjacent classes are disjoint, so both match alike.

use super::Tail;

/// A pattern and the rule for its whitespace matches.
pub struct Pattern(pub &'static str, pub Tail);

/// One pre-tokenizer.
pub struct Rule {
    pub names: &'static [&'static str],
    pub patterns: &'static [Pattern],
    pub whole_words: bool,
    pub adds_bos: bool,
}

/// GPT-2. Other stages before it may cut out digits or punctuation.
const GPT_2: Pattern =
    Pattern(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", Tail::Any);

/// GPT-4 with digits in groups of three.
const LLAMA_3: Pattern = Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

/// GPT-4 with single digits.
const QWEN_2: Pattern = Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const QWEN_35: Pattern = Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const SEED_CODER: Pattern = Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const BAILING: Pattern = Pattern(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+",
    Tail::NotLineBreak,
);

const GPT_4O: Pattern = Pattern(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const TEKKEN: Pattern = Pattern(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const KIMI_K2: Pattern = Pattern(
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const DEEPSEEK_V3_WORDS: Pattern = Pattern(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::NotLineBreak,
);

const DEEPSEEK_LLM_LETTERS: Pattern = Pattern(
    concat!(
        r"\s?[",
        r"A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}",
        r"\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}",
        r"\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}",
        r"\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}",
        r"\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}",
        r"\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}",
        r"\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}",
        r"\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}",
        r"\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}",
        r"\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}",
        r"\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}",
        r"\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}",
        r"\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}",
        r"\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}",
        r"\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}",
        r"\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}",
        r"]+",
    ),
    Tail::Whole,
);

const fn whole(pattern: &'static str) -> Pattern {
    Pattern(pattern, Tail::Whole)
}

/// Creates a rule without extras.
const fn plain(names: &'static [&'static str], patterns: &'static [Pattern]) -> Rule {
    Rule { names, patterns, whole_words: false, adds_bos: false }
}

const PUNCTUATION_BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// The pre-tokenizer that works on plain characters with `▁` for the space, not on the byte
/// alphabet.
pub const GEMMA_4: &str = "gemma4";

pub const RULES: &[Rule] = &[
    plain(
        &["default"],
        &[whole(r"[\p{P}$+<=>^~|]+"), GPT_2, whole(r"\p{N}+"), whole(r"[0-9][0-9][0-9]")],
    ),
    plain(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT_2],
    ),
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        patterns: &[LLAMA_3],
        whole_words: true,
        adds_bos: true,
    },
    plain(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA_3]),
    plain(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN_2],
    ),
    plain(&["qwen35"], &[QWEN_35]),
    plain(&["seed-coder"], &[SEED_CODER]),
    plain(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    plain(
        &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[whole(r"\p{N}"), GPT_2],
    ),
    plain(&["falcon"], &[whole(r"[\p{P}$+<=>^~|`]+"), GPT_2, whole(r"[0-9][0-9][0-9]")]),
    plain(
        &["deepseek-llm"],
        &[
            whole(r"[\r\n]"),
            DEEPSEEK_LLM_LETTERS,
            whole(
                r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+",
            ),
            whole(r"\s+$"),
            whole(r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"),
            whole(r"\p{N}"),
        ],
    ),
    plain(
        &["deepseek-coder"],
        &[
            whole(r"[\r\n]"),
            whole(r"\s?\p{L}+"),
            whole(r"\s?\p{P}+"),
            whole(r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"),
            whole(r"\p{N}"),
        ],
    ),
    plain(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[
            whole(r"\p{N}{1,3}"),
            whole(r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"),
            DEEPSEEK_V3_WORDS,
        ],
    ),
    plain(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT_4O]),
    Rule { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, adds_bos: true },
    plain(&["kimi-k2"], &[KIMI_K2]),
    plain(&["bloom", "poro-chat", "gpt3-finnish"], &[whole(PUNCTUATION_BLOOM)]),
    plain(&["viking"], &[whole(PUNCTUATION_BLOOM), whole(r"\p{N}")]),
    // Merges cross words here; only line breaks are separated. A run of line breaks that is a token
    // also results from its merges, so `whole_words` is not needed.
    Rule {
        names: &[GEMMA_4],
        patterns: &[whole(r"[^\n]+|\n+")],
        whole_words: false,
        adds_bos: true,
    },
];
