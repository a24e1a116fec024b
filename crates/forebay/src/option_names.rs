//! The names of options in messages of libraries: those of the command line.

use forebay_options::{Names, OptionName, use_names};

/// Lets messages name options as the command line does.
pub fn use_flags() {
    use_names(Names { name: flag, with_value: |flag, value| format!("{flag} {value}") });
}

/// Returns the flag of an option. Options of libraries alone have none.
fn flag(option: OptionName) -> Option<&'static str> {
    Some(match option {
        OptionName::AllowedHost => "--allowed-host",
        OptionName::ApiKeyFile => "--api-key-file",
        OptionName::Codec => "--codec",
        OptionName::Context => "--ctx",
        OptionName::Cors => "--cors",
        OptionName::CpuExperts => "--cpu-experts",
        OptionName::Device => "--device",
        OptionName::Exact => "--exact",
        OptionName::ExpertsUsed => "--experts-used",
        OptionName::File => "--file",
        OptionName::FileSize => "--file-size",
        OptionName::Files => "--files",
        OptionName::FilesSize => "--files-size",
        OptionName::Force => "--force",
        OptionName::Insecure => "--insecure",
        OptionName::Io => "--io",
        OptionName::KvDisk => "--kv-disk",
        OptionName::KvDiskType => "--kv-disk-type",
        OptionName::KvRam => "--kv-ram",
        OptionName::KvTokens => "--kv-tokens",
        OptionName::KvType => "--kv-type",
        OptionName::KvVram => "--kv-vram",
        OptionName::MaxBody => "--max-body",
        OptionName::Models => "--models",
        OptionName::Mtp => "--mtp",
        OptionName::NoCpuExperts => "--no-cpu-experts",
        OptionName::NoCudaGraph => "--no-cuda-graph",
        OptionName::NoLimit => "--no-limit",
        OptionName::NoVerify => "--no-verify",
        OptionName::Prefetch => "--prefetch",
        OptionName::Prompts => "--prompts",
        OptionName::Ram => "--ram",
        OptionName::Threads => "--threads",
        OptionName::ToGguf => "--to-gguf",
        OptionName::ToHuggingFace => "--to-huggingface",
        OptionName::Tokens => "--tokens",
        OptionName::TraceIo => "--trace-io",
        OptionName::TraceRouting => "--trace-routing",
        OptionName::TraceScores => "--trace-scores",
        OptionName::Vram => "--vram",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{Command, CommandFactory as _};

    use super::*;
    use crate::args::Cli;

    fn flags(of: &Command, found: &mut BTreeSet<String>) {
        found.extend(of.get_arguments().filter_map(|it| it.get_long()).map(str::to_owned));
        of.get_subcommands().for_each(|command| flags(command, found));
    }

    #[test]
    fn the_command_line_has_all_flags_that_messages_name() {
        let mut known = BTreeSet::new();
        flags(&Cli::command(), &mut known);
        let named: Vec<&str> = OptionName::ALL.iter().filter_map(|option| flag(*option)).collect();
        for flag in &named {
            assert!(known.contains(flag.trim_start_matches("--")), "{flag}");
        }
        assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), named.len(), "no two are the same");
    }
}
