//! Processes for chat templates, whose memory and time the system bounds.
//!
//! Templates are programs inside model files. Every template runs in a process of its own: this program, started again.

use std::process::{Command, ExitCode};

/// Argument with which the program is such a process.
const NAME: &str = "template-process";

/// Makes all templates run in processes of their own.
pub fn isolate() {
    forebay_text::isolate_templates(|| {
        // The file may have been replaced since this process started, and this path still leads to the old one.
        let mut command = Command::new("/proc/self/exe");
        command.arg(NAME);
        command
    });
}

/// Runs the template of the parent process if this process was started for one.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != NAME || arguments.next().is_some() {
        return None;
    }
    let served = forebay_text::serve_template_within_limits();
    Some(if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
