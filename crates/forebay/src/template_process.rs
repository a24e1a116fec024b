//! Processes for chat templates, whose memory and time the system bounds.
//!
//! Templates are programs inside model files. Every template runs in a process of its own: this program, started again.

use std::io;
use std::process::{Command, ExitCode};

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Argument with which the program is such a process.
const NAME: &str = "template-process";
/// Processor time for one prompt.
const SECONDS: u64 = 10;

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
    // A process that used up its memory is no reason for a core file.
    let _ = limit(Resource::Core, 0);
    let served = forebay_text::serve_template(io::stdin().lock(), io::stdout().lock(), allow);
    Some(if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Lets this process use so many more bytes of address space, and more time.
fn allow(bytes: u64) -> io::Result<()> {
    let damaged = || io::Error::from(io::ErrorKind::InvalidData);
    let memory = std::fs::read_to_string("/proc/self/statm")?;
    let pages = memory.split(' ').next().and_then(|size| size.parse::<u64>().ok());
    let used = pages.ok_or_else(damaged)? * page_size() as u64;
    limit(Resource::As, used + bytes)?;
    // The name of the program, in brackets, may have spaces. The 12th and 13th words behind it are times.
    let times = std::fs::read_to_string("/proc/self/stat")?;
    let (_, times) = times.rsplit_once(')').ok_or_else(damaged)?;
    let times = times.split_whitespace().skip(11).take(2);
    let ticks: Option<u64> = times.map(|time| time.parse::<u64>().ok()).sum();
    let seconds = ticks.ok_or_else(damaged)? / clock_ticks_per_second();
    limit(Resource::Cpu, seconds + 1 + SECONDS)
}

/// Sets a limit, unless the limit that the process has for good is lower.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}
