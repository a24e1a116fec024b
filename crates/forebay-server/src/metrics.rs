//! Metrics in the text format of Prometheus.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::openai::answer::Choice;
use crate::worker::Report;

/// Counters that requests add to. Copies count together.
#[derive(Clone)]
pub struct Counts {
    requests: Counter,
    failed: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    first_token: Histogram,
    gaps: Histogram,
    waited: Histogram,
}

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    pub counts: Counts,
    waiting: Gauge,
    running: Gauge,
    kv_bytes: Gauge,
    vram_bytes: Gauge,
    resident_bytes: Gauge,
    prompt_passes: Gauge,
    generate_passes: Gauge,
    suspended: Gauge,
}

impl Metrics {
    pub fn new() -> Metrics {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let counts = Counts {
            requests: Counter::default(),
            failed: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            first_token: seconds(),
            gaps: seconds(),
            waited: seconds(),
        };
        let mut registry = Registry::with_prefix("forebay");
        let counters = [
            ("requests", "Answers that ended", &counts.requests),
            ("requests_failed", "Answers that ended with an error", &counts.failed),
            ("prompt_tokens", "Tokens of prompts", &counts.prompt_tokens),
            (
                "cached_tokens",
                "Tokens of prompts whose keys and values were there",
                &counts.cached_tokens,
            ),
            ("generated_tokens", "Generated tokens", &counts.generated_tokens),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let histograms = [
            ("first_token", "Time to the first token", &counts.first_token),
            ("token_gap", "Time between two tokens of an answer", &counts.gaps),
            ("queue", "Time from the request to its beginning", &counts.waited),
        ];
        for (name, help, histogram) in histograms {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let waiting = gauge("requests_waiting", "Requests that wait");
        let running = gauge("requests_running", "Requests that run");
        let kv_bytes = gauge("kv_cache_bytes", "Bytes reserved for keys and values");
        let vram_bytes = gauge("vram_bytes", "Bytes of device memory in use");
        let resident_bytes = gauge("peak_resident_bytes", "Largest resident set of the process");
        let prompt_passes = gauge("prompt_passes", "Passes with prompt rows since the start");
        let generate_passes =
            gauge("generate_passes", "Passes with generated rows only, since the start");
        let suspended = gauge("suspensions", "Requests suspended for others, since the start");
        Metrics {
            registry,
            counts,
            waiting,
            running,
            kv_bytes,
            vram_bytes,
            resident_bytes,
            prompt_passes,
            generate_passes,
            suspended,
        }
    }

    /// Returns all metrics in the text format.
    ///
    /// # Errors
    /// Returns an error if a metric cannot be written, which has no known cause.
    pub fn text(&self, report: &Report) -> Result<String, std::fmt::Error> {
        let vram = report.session.vram.as_ref().map_or(0, |vram| vram.total_bytes);
        let resident = report.session.peak_resident_bytes.unwrap_or(0);
        for (gauge, value) in [
            (&self.waiting, report.waiting as u64),
            (&self.running, report.running as u64),
            (&self.kv_bytes, report.session.kv_cache_bytes),
            (&self.vram_bytes, vram),
            (&self.resident_bytes, resident),
            (&self.prompt_passes, report.engine.prompt_passes),
            (&self.generate_passes, report.engine.generate_passes),
            (&self.suspended, report.engine.suspended),
        ] {
            gauge.set(value as i64);
        }
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Counts {
    /// Counts the time between two tokens.
    pub fn note_gap(&self, seconds: f64) {
        self.gaps.observe(seconds);
    }

    /// Counts an answer that has ended.
    pub fn note_end(&self, choice: &Choice) {
        let statistics = &choice.statistics;
        self.requests.inc();
        if choice.has_failed() {
            self.failed.inc();
        }
        self.prompt_tokens.inc_by(statistics.prompt_tokens as u64);
        self.cached_tokens.inc_by(statistics.cached_tokens as u64);
        self.generated_tokens.inc_by(statistics.generated_tokens as u64);
        self.waited.observe(statistics.waited_seconds);
        if let Some(seconds) = statistics.first_token_seconds {
            self.first_token.observe(seconds);
        }
    }
}
