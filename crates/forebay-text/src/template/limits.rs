//! Limits of a process for a template, which the system enforces.

use std::io;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::process::serve_template;

/// Processor time for one prompt.
const SECONDS: u64 = 10;

/// Runs one template for the parent process, which writes to the standard input and reads the standard output of this one.
/// Limits the memory and the processor time of this process, which should do nothing else.
///
/// # Errors
/// Returns an error if the parent says something wrong, or if the limits cannot be set.
pub fn serve_template_within_limits() -> io::Result<()> {
    // A process that used up its memory is no reason for a core file.
    let _ = limit(Resource::Core, 0);
    serve_template(io::stdin().lock(), io::stdout().lock(), allow)
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
