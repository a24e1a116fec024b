//! Option of layers that predict further tokens.

use clap::{Args, ValueEnum};

use crate::failure::{Outcome, usage};

/// Flattened into commands that generate.
#[derive(Args, Clone, Default)]
pub struct MtpArgs {
    /// Load the model's first layer for multi-token prediction, and check what it proposes together with
    /// the next token: the answer stays the same, and may be faster. One sequence only
    #[arg(long, value_enum, value_name = "on|off", default_value_t = MtpArg::Off)]
    #[arg(help_heading = "Memory and devices")]
    pub mtp: MtpArg,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum MtpArg {
    On,
    #[default]
    Off,
}

impl MtpArgs {
    pub fn is_on(&self) -> bool {
        self.mtp == MtpArg::On
    }

    /// Refuses the option in a command that answers several requests at a time.
    pub fn refuse(&self, command: &str) -> Outcome {
        match self.is_on() {
            true => usage(format!(
                "--mtp on: {command} answers several requests at a time, and proposals are checked for one sequence \
                 only: leave it out"
            )),
            false => Ok(()),
        }
    }
}
