//! Log on standard error, set by `--log LEVEL` or the environment variable `FOREBAY_LOG`.

use std::io::{self, Write};

use forebay_format::in_words;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::settings;

/// Environment variable that `--log` overrides.
const VARIABLE: &str = "FOREBAY_LOG";

/// A valid value of `--log` or `FOREBAY_LOG`: directives for [`EnvFilter`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter(String);

impl LogFilter {
    /// Reads a level, or a list of directives such as `forebay_store=debug,forebay_engine=trace`.
    ///
    /// A level alone applies to forebay's own crates. Libraries stay at warnings, so that `--log debug` shows only
    /// forebay's work.
    ///
    /// # Errors
    /// Returns an error if a word is not a level or a directive cannot be parsed.
    pub fn parse(text: &str) -> Result<LogFilter, String> {
        let text = text.trim();
        let level = text.parse::<LevelFilter>().ok();
        // An empty string would parse as a level.
        if let Some(level) = level.filter(|_| !text.is_empty()) {
            return Ok(LogFilter(match level {
                LevelFilter::OFF | LevelFilter::ERROR => level.to_string(),
                level => format!("warn,forebay={level}"),
            }));
        }
        // EnvFilter treats any other single word as the name of a target and logs all of it.
        let is_level_or_directive = |part: &str| {
            let part = part.trim();
            let is_level = !part.is_empty() && part.parse::<LevelFilter>().is_ok();
            is_level || part.contains(['=', '['])
        };
        if !text.split(',').all(is_level_or_directive) {
            return Err("use error, warn, info, debug, trace or off, or TARGET=LEVEL as in forebay_store=debug".into());
        }
        match EnvFilter::builder().parse(text) {
            Ok(_) => Ok(LogFilter(text.to_owned())),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Starts the log with the value of `--log`, otherwise of `FOREBAY_LOG`, otherwise with warnings.
///
/// # Errors
/// Returns an error if the value of `FOREBAY_LOG` is invalid.
pub fn start(option: Option<LogFilter>) -> Outcome {
    let of_file = || settings::global("log").and_then(|level| LogFilter::parse(level).ok());
    let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let option = option.or_else(|| of_file().filter(|_| named.is_none()));
    let filter = match (option, named) {
        (Some(filter), _) => filter,
        (None, Some(value)) if !value.is_empty() => {
            let text = value.to_string_lossy();
            LogFilter::parse(&text)
                .map_err(|why| Failure::Usage(format!("{VARIABLE}={text}: {why}")))?
        }
        (None, _) => LogFilter("warn".into()),
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.0))
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(|| PlainWords)
        .with_ansi(output::styled())
        .init();
    Ok(())
}

/// Writes lines of the log to standard error, with the system's errors in plain words. The subscriber writes each line
/// in one piece, and shows control characters as escapes by itself.
struct PlainWords;

impl Write for PlainWords {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let shown = in_words(&String::from_utf8_lossy(line));
        io::stderr().write_all(shown.as_bytes()).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_for_forebay_alone() {
        let parsed = |text: &str| LogFilter::parse(text).unwrap().0;
        assert_eq!(parsed("debug"), "warn,forebay=debug");
        assert_eq!(parsed("TRACE"), "warn,forebay=trace");
        assert_eq!(parsed("error"), "error");
        assert_eq!(parsed("off"), "off");
    }

    #[test]
    fn directives_stay_as_they_are() {
        for text in ["forebay_store=debug", "warn,forebay_store=trace", "info,[token]=trace"] {
            assert_eq!(LogFilter::parse(text), Ok(LogFilter(text.to_owned())));
        }
    }

    #[test]
    fn what_is_no_level_is_refused() {
        for text in ["", "debgu", "forebay_store", "forebay_store=loud", "debug,stor"] {
            assert!(LogFilter::parse(text).is_err(), "{text}");
        }
    }
}
