//! Names of options. A library says which option is meant, such as [`OptionName::Context`]; what a user reads is the name that the program gives
//! it: `--ctx` on the command line, `context=` in Python.
//!
//! A program sets its names once, with [`use_names`], before libraries make messages. Without names, messages have the words of [`OptionName::words`].

use std::fmt;
use std::sync::OnceLock;

/// Makes the options, with the words that name them where no program gives them a name.
macro_rules! options {
    ($($name:ident = $words:literal,)*) => {
        /// An option of some program.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum OptionName {
            $(#[doc = $words] $name,)*
        }

        impl OptionName {
            /// All options.
            pub const ALL: &[OptionName] = &[$(OptionName::$name,)*];

            /// Returns words that name the option in no program's form.
            pub const fn words(self) -> &'static str {
                match self {
                    $(OptionName::$name => $words,)*
                }
            }
        }
    };
}

options! {
    AllowedHost = "allowed host",
    ApiKeyFile = "file of API keys",
    Budget = "budget",
    Codec = "codec",
    Context = "context",
    Cors = "allowed origin",
    CpuExperts = "experts on the CPU",
    Decode = "decode",
    Device = "device",
    Exact = "exact arithmetic",
    ExpertsUsed = "number of experts for a token",
    File = "file",
    FileSize = "size of a file",
    Files = "folder for files",
    FilesSize = "size of all files",
    Force = "replacing files",
    Insecure = "access without a key",
    Io = "reader",
    KvDisk = "folder for keys and values",
    KvDiskType = "type of keys and values on disk",
    KvRam = "share of RAM for keys and values",
    KvTokens = "positions of the KV cache",
    KvType = "type of keys and values",
    KvVram = "share of VRAM for keys and values",
    MaxBody = "largest request",
    Models = "model library",
    Mtp = "multi-token prediction",
    NoCpuExperts = "no experts on the CPU",
    NoCudaGraph = "no graphs of kernels",
    NoLimit = "no measured limit",
    NoVerify = "no checksums",
    PinnedBytes = "bytes of pinned memory",
    Prefetch = "prefetching",
    Prompts = "prompts",
    Ram = "budget of RAM",
    Slices = "slices",
    Tensors = "tensors",
    Threads = "threads",
    ToGguf = "a GGUF file as the form",
    ToHuggingFace = "a Hugging Face folder as the form",
    Tokens = "number of tokens",
    TraceIo = "a trace of I/O",
    TraceRouting = "a trace of routing",
    TraceScores = "scores of routers",
    Verify = "checksums",
    Vram = "budget of VRAM",
}

/// Names that a program gives options.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// Returns the name of an option, or `None` if the program has no such option.
    pub name: fn(OptionName) -> Option<&'static str>,
    /// Returns an option with a value, given its name and the value.
    pub with_value: fn(&str, &str) -> String,
}

static NAMES: OnceLock<Names> = OnceLock::new();

/// Sets the names that messages of this process have from now on. Only the first call has an effect.
pub fn use_names(names: Names) {
    let _ = NAMES.set(names);
}

impl OptionName {
    /// Returns the option with a value, such as `--device cpu`.
    pub fn with(self, value: impl fmt::Display) -> String {
        let value = value.to_string();
        let named = NAMES.get().and_then(|names| Some((names, (names.name)(self)?)));
        match named {
            Some((names, name)) => (names.with_value)(name, &value),
            None => format!("{} {value}", self.words()),
        }
    }
}

impl fmt::Display for OptionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.get().and_then(|names| (names.name)(*self)).unwrap_or(self.words()))
    }
}

/// An option whose value cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadOption {
    pub name: OptionName,
    pub value: String,
    /// What would be right, or why this is not.
    pub expected: String,
}

impl fmt::Display for BadOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadOption { name, value, expected } = self;
        write!(f, "{name} is {value}, but {expected}")
    }
}

impl std::error::Error for BadOption {}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because names are those of the process.
    #[test]
    fn a_program_names_its_options() {
        let device = || format!("{} or {}", OptionName::Device, OptionName::Device.with("cpu"));
        assert_eq!(device(), "device or device cpu");
        let name = |option| (option == OptionName::Device).then_some("--device");
        use_names(Names { name, with_value: |name, value| format!("{name} {value}") });
        use_names(Names { name: |_| None, with_value: |_, _| String::new() });
        assert_eq!(device(), "--device or --device cpu");
        assert_eq!(OptionName::Ram.to_string(), "budget of RAM", "the program has no such option");
    }

    #[test]
    fn words_tell_options_apart() {
        for (at, option) in OptionName::ALL.iter().enumerate() {
            let others = &OptionName::ALL[at + 1..];
            assert!(others.iter().all(|other| other.words() != option.words()), "{option:?}");
        }
    }
}
