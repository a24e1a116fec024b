//! The names of options in messages of libraries: those of fields and arguments in C.

use forebay_options::{Names, OptionName, use_names};

/// Lets messages name options as the header does.
pub fn use_fields() {
    use_names(Names { name: field, with_value: |field, value| format!("{field} {value:?}") });
}

/// Returns the field or argument that stands for an option. Options of other programs have none here.
fn field(option: OptionName) -> Option<&'static str> {
    Some(match option {
        OptionName::Device => "device",
        OptionName::Io => "engine",
        OptionName::NoVerify => "verify = 0",
        OptionName::PinnedBytes => "pinned_bytes",
        OptionName::Threads => "threads",
        OptionName::Verify => "verify",
        OptionName::Vram => "vram_bytes",
        _ => return None,
    })
}
