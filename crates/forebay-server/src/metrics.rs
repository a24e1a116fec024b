//! Metrics in the text format of Prometheus.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use forebay_engine::engine::EngineStatistics;
use forebay_requests::{Choice, Report};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::machine_metrics::MachineMetrics;
use crate::models::Status;

/// The label that says which model a value belongs to.
type Labels = [(&'static str, String); 1];
type Counters = Family<Labels, Counter>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;
type Gauges = Family<Labels, Gauge>;

fn of_model(name: &str) -> Labels {
    [("model", name.to_owned())]
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

/// Counters of one model that its requests add to. They go on when the model leaves and comes again.
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
    requests: Counters,
    failed: Counters,
    prompt_tokens: Counters,
    cached_tokens: Counters,
    generated_tokens: Counters,
    first_token: Histograms,
    gaps: Histograms,
    waited: Histograms,
    loads: Counters,
    unloads: Counters,
    load_time: Histograms,
    waiting: Gauges,
    running: Gauges,
    kv_bytes: Gauges,
    vram_bytes: Gauges,
    ram_bytes: Gauges,
    prompt_passes: Gauges,
    generate_passes: Gauges,
    suspended: Gauges,
    waiting_for_models: Gauge,
    resident_bytes: Gauge,
    machine: MachineMetrics,
    /// Work of engines that have ended, by model.
    ended: Mutex<HashMap<String, Passes>>,
}

/// Work of engines.
#[derive(Clone, Copy, Default)]
struct Passes {
    prompt: u64,
    generate: u64,
    suspended: u64,
}

impl Passes {
    fn with(self, engine: &EngineStatistics) -> Passes {
        Passes {
            prompt: self.prompt + engine.prompt_passes,
            generate: self.generate + engine.generate_passes,
            suspended: self.suspended + engine.suspended,
        }
    }
}

/// Registers metrics as they are made.
struct Registering(Registry);

impl Registering {
    fn counters(&mut self, name: &str, help: &str) -> Counters {
        let counters = Counters::default();
        self.0.register(name, help, counters.clone());
        counters
    }

    fn histograms(&mut self, name: &str, help: &str) -> Histograms {
        let histograms = Histograms::new_with_constructor(seconds);
        self.0.register_with_unit(name, help, Unit::Seconds, histograms.clone());
        histograms
    }

    fn gauges(&mut self, name: &str, help: &str) -> Gauges {
        let gauges = Gauges::default();
        self.0.register(name, help, gauges.clone());
        gauges
    }

    fn gauge(&mut self, name: &str, help: &str) -> Gauge {
        let gauge = Gauge::default();
        self.0.register(name, help, gauge.clone());
        gauge
    }
}

impl Metrics {
    pub fn new() -> Metrics {
        let mut new = Registering(Registry::with_prefix("forebay"));
        Metrics {
            requests: new.counters("requests", "Answers that ended"),
            failed: new.counters("requests_failed", "Answers that ended with an error"),
            prompt_tokens: new.counters("prompt_tokens", "Tokens of prompts"),
            cached_tokens: new
                .counters("cached_tokens", "Tokens of prompts whose keys and values were there"),
            generated_tokens: new.counters("generated_tokens", "Generated tokens"),
            first_token: new.histograms("first_token", "Time to the first token"),
            gaps: new.histograms("token_gap", "Time between two tokens of an answer"),
            waited: new.histograms("queue", "Time from the request to its beginning"),
            loads: new.counters("model_loads", "Loads on request"),
            unloads: new.counters("model_unloads", "Times that the model left memory"),
            load_time: new.histograms("model_load", "Time to load the model on request"),
            waiting: new.gauges("requests_waiting", "Requests that wait in the engine"),
            running: new.gauges("requests_running", "Requests that run"),
            kv_bytes: new.gauges("kv_cache_bytes", "Bytes reserved for keys and values"),
            vram_bytes: new.gauges("vram_bytes", "Bytes of device memory of a loaded model"),
            ram_bytes: new.gauges("ram_bytes", "Bytes of RAM of a loaded model"),
            prompt_passes: new.gauges("prompt_passes", "Passes with prompt rows since the start"),
            generate_passes: new
                .gauges("generate_passes", "Passes with generated rows only, since the start"),
            suspended: new.gauges("suspensions", "Requests suspended for others, since the start"),
            waiting_for_models: new.gauge(
                "requests_waiting_for_models",
                "Requests that wait for a model to be loaded",
            ),
            resident_bytes: new.gauge("peak_resident_bytes", "Largest resident set of the process"),
            ended: Mutex::default(),
            machine: MachineMetrics::new(&mut new.0),
            registry: new.0,
        }
    }

    /// Returns the counters of a model.
    pub fn counts_of(&self, name: &str) -> Counts {
        let labels = of_model(name);
        let counter = |counters: &Counters| counters.get_or_create(&labels).clone();
        let histogram = |histograms: &Histograms| histograms.get_or_create(&labels).clone();
        Counts {
            requests: counter(&self.requests),
            failed: counter(&self.failed),
            prompt_tokens: counter(&self.prompt_tokens),
            cached_tokens: counter(&self.cached_tokens),
            generated_tokens: counter(&self.generated_tokens),
            first_token: histogram(&self.first_token),
            gaps: histogram(&self.gaps),
            waited: histogram(&self.waited),
        }
    }

    /// Counts a load on request.
    pub fn note_load(&self, name: &str, seconds: f64) {
        self.loads.get_or_create(&of_model(name)).inc();
        self.load_time.get_or_create(&of_model(name)).observe(seconds);
    }

    /// Counts a model that leaves memory, and keeps the work of its engine. `last` is the engine's last report.
    pub fn note_unload(&self, name: &str, last: &Report) {
        self.unloads.get_or_create(&of_model(name)).inc();
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let passes = ended.entry(name.to_owned()).or_default();
        *passes = passes.with(&last.engine);
        drop(ended);
        self.machine.note_unload(name, last);
    }

    /// Counts an answer with this status.
    pub fn note_response(&self, status: u16) {
        self.machine.note_response(status);
    }

    /// Returns all metrics in the text format. Models that are not loaded have no memory and no requests.
    ///
    /// # Errors
    /// Returns an error if a metric cannot be written, which has no known cause.
    pub fn text(
        &self,
        loaded: &[Status],
        waiting_for_models: usize,
    ) -> Result<String, std::fmt::Error> {
        for gauges in [
            &self.waiting,
            &self.running,
            &self.kv_bytes,
            &self.vram_bytes,
            &self.ram_bytes,
            &self.prompt_passes,
            &self.generate_passes,
            &self.suspended,
        ] {
            gauges.clear();
        }
        let mut passes = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for status in loaded {
            let report = &status.report;
            let all = passes.entry(status.name.clone()).or_default();
            *all = all.with(&report.engine);
            for (gauges, value) in [
                (&self.waiting, report.waiting as u64),
                (&self.running, report.running as u64),
                (&self.kv_bytes, report.session.kv_cache_bytes),
                (&self.vram_bytes, status.memory.vram_bytes),
                (&self.ram_bytes, status.memory.ram_bytes),
            ] {
                gauges.get_or_create(&of_model(&status.name)).set(value as i64);
            }
        }
        for (name, passes) in passes {
            for (gauges, value) in [
                (&self.prompt_passes, passes.prompt),
                (&self.generate_passes, passes.generate),
                (&self.suspended, passes.suspended),
            ] {
                gauges.get_or_create(&of_model(&name)).set(value as i64);
            }
        }
        self.machine.update(loaded);
        self.waiting_for_models.set(waiting_for_models as i64);
        self.resident_bytes.set(forebay_engine::peak_resident_bytes().unwrap_or(0) as i64);
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

    /// Counts the tokens of texts whose embeddings were computed.
    pub fn note_embeddings(&self, tokens: usize) {
        self.prompt_tokens.inc_by(tokens as u64);
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
