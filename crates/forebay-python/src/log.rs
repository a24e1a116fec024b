//! Messages of the engine, which go to Python's logger `forebay`.
//!
//! They come from threads that never take the GIL. They wait in a queue, and a byte in a socket wakes the thread of Python that
//! hands them to the logger.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use pyo3::prelude::*;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{self, FmtSpan};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::Registry;
use tracing_subscriber::{EnvFilter, Layer as _, reload};

use crate::errors::raise;
use crate::mailbox::Mailbox;

/// Most messages that wait. More are dropped, and counted.
const WAITING_MAX: usize = 4096;

/// Level of Python, and a line.
type Line = (u32, String);

/// Messages that no thread of Python has taken yet.
struct Lines {
    waiting: Mailbox<Line>,
    dropped: AtomicU64,
}

/// What [`log_start`] has made.
struct Log {
    lines: Arc<Lines>,
    filter: reload::Handle<EnvFilter, Registry>,
}

static LOG: OnceLock<Log> = OnceLock::new();

impl Lines {
    fn add(&self, line: Line) {
        if !self.waiting.add(line, WAITING_MAX) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn take(&self) -> Vec<Line> {
        let mut lines = self.waiting.take();
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            lines
                .push((30, format!("{dropped} messages were not logged, because too many waited")));
        }
        lines
    }
}

/// Collects the bytes of one line.
struct Writer {
    lines: Arc<Lines>,
    level: u32,
    bytes: Vec<u8>,
}

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let line = String::from_utf8_lossy(&self.bytes).trim().to_owned();
        if !line.is_empty() {
            self.lines.add((self.level, line));
        }
    }
}

/// Adds no time to lines, because Python's logging does. Without a timer, spans would have no durations either.
struct NoTime;

impl FormatTime for NoTime {
    fn format_time(&self, _: &mut format::Writer<'_>) -> fmt::Result {
        Ok(())
    }
}

struct Writers(Arc<Lines>);

impl<'a> MakeWriter<'a> for Writers {
    type Writer = Writer;

    fn make_writer(&'a self) -> Writer {
        Writer { lines: self.0.clone(), level: 20, bytes: Vec::new() }
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Writer {
        let level = match *meta.level() {
            tracing::Level::ERROR => 40,
            tracing::Level::WARN => 30,
            tracing::Level::INFO => 20,
            tracing::Level::DEBUG => 10,
            tracing::Level::TRACE => 5,
        };
        let mut writer = self.make_writer();
        writer.level = level;
        writer
    }
}

impl Log {
    fn start(filter: EnvFilter) -> io::Result<Log> {
        let lines = Arc::new(Lines { waiting: Mailbox::new()?, dropped: AtomicU64::new(0) });
        let (filter, handle) = reload::Layer::new(filter);
        let format = tracing_subscriber::fmt::layer()
            .with_span_events(FmtSpan::CLOSE)
            .with_ansi(false)
            .with_timer(NoTime)
            .with_level(false)
            .with_writer(Writers(lines.clone()));
        let subscriber = Registry::default().with(format.with_filter(filter));
        // The subscriber is of this module alone, so there is no other one.
        let _ = tracing::subscriber::set_global_default(subscriber);
        Ok(Log { lines, filter: handle })
    }
}

/// Logs messages of forebay down to a level such as "debug" from now on. Returns the file descriptor that is readable while
/// messages wait.
#[pyfunction]
pub fn log_start(py: Python<'_>, level: &str) -> PyResult<i32> {
    let filter = || EnvFilter::new(format!("off,forebay={level}"));
    let log = match LOG.get() {
        Some(log) => log,
        None => {
            let log = Log::start(filter())?;
            LOG.get_or_init(|| log)
        }
    };
    let changed = log.filter.reload(filter());
    changed.map_err(|error| raise(py, "Error", error.to_string()))?;
    Ok(log.lines.waiting.fileno())
}

/// Returns the messages that have come: levels of Python's logging, and lines.
#[pyfunction]
pub fn log_take() -> Vec<Line> {
    LOG.get().map_or_else(Vec::new, |log| log.lines.take())
}

/// Logs a warning. The caller holds the GIL, so this is for calls of Python only.
pub fn warn(py: Python<'_>, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("forebay",))?;
    logger.call_method1("warning", ("%s", text)).map(drop)
}
