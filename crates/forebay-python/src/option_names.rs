//! The names of options in messages of libraries: those of arguments in Python.

use forebay_options::{Names, OptionName, use_names};

/// Lets messages name options as Python's functions do.
pub fn use_arguments() {
    use_names(Names { name: argument, with_value });
}

/// Returns the argument that stands for an option. Options of the command line and the server alone have none.
fn argument(option: OptionName) -> Option<&'static str> {
    Some(match option {
        OptionName::Budget => "budget",
        OptionName::Context => "context",
        OptionName::CpuExperts => "cpu_experts=True",
        OptionName::Device => "device",
        OptionName::Exact => "exact",
        OptionName::Io => "io",
        OptionName::KvDisk => "kv_disk",
        OptionName::KvDiskType => "kv_disk_type",
        OptionName::KvRam => "kv_ram",
        OptionName::KvTokens => "kv_tokens",
        OptionName::KvType => "kv_type",
        OptionName::KvVram => "kv_vram",
        OptionName::Mtp => "mtp",
        OptionName::NoCpuExperts => "cpu_experts=False",
        OptionName::NoCudaGraph => "cuda_graphs=False",
        OptionName::NoVerify => "verify=False",
        OptionName::Prefetch => "prefetch",
        OptionName::Prompts => "prompts",
        OptionName::Ram => "ram",
        OptionName::Slices => "slices",
        OptionName::Tensors => "names",
        OptionName::Threads => "threads",
        OptionName::TraceRouting => "trace",
        OptionName::Tokens => "tokens",
        OptionName::Verify => "verify",
        OptionName::Vram => "vram",
        _ => return None,
    })
}

fn with_value(name: &str, value: &str) -> String {
    match value {
        "on" => format!("{name}=True"),
        "off" => format!("{name}=False"),
        _ if value.bytes().all(|byte| byte.is_ascii_digit()) => format!("{name}={value}"),
        _ => format!("{name}={value:?}"),
    }
}
