//! Metrics of what the engines and the server do: traffic of weights by tier, memory by use, KV blocks, statuses of answers.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use forebay_requests::Report;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::models::Status;

/// The model, and what the value is of.
type Labels = [(&'static str, String); 2];
type Totals = Family<Labels, Counter<f64, AtomicU64>>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// What is counted from the start of the server on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Total {
    Hits,
    Misses,
    Bytes,
    Evictions,
    WaitSeconds,
    DiskBusySeconds,
    KvPositions,
    KvDisk,
    KvSavedSeconds,
}

impl Total {
    const ALL: [Total; 9] = [
        Total::Hits,
        Total::Misses,
        Total::Bytes,
        Total::Evictions,
        Total::WaitSeconds,
        Total::DiskBusySeconds,
        Total::KvPositions,
        Total::KvDisk,
        Total::KvSavedSeconds,
    ];

    /// Returns the name, the label, and the explanation.
    fn describe(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Total::Hits => ("expert_hits", "tier", "Experts that were in this tier when needed"),
            Total::Misses => {
                ("expert_misses", "tier", "Experts that were not in this tier when needed")
            }
            Total::Bytes => (
                "weights",
                "tier",
                "Bytes of weights read from the disk, and copied from RAM to the GPU by PCIe",
            ),
            Total::Evictions => {
                ("evictions", "tier", "Experts, and KV blocks, that gave way to others")
            }
            Total::WaitSeconds => ("weights_wait", "cause", "Time that passes waited for weights"),
            Total::DiskBusySeconds => {
                ("disk_busy", "disk", "Time with at least one request at the disk")
            }
            Total::KvPositions => {
                ("kv_positions", "tier", "Positions of prompts that came from this tier")
            }
            Total::KvDisk => ("kv_disk", "direction", "Bytes of KV blocks read and written"),
            Total::KvSavedSeconds => (
                "kv_saved",
                "by",
                "Estimated time that computing reused positions again would have taken, less the time of reading them",
            ),
        }
    }

    fn unit(self) -> Option<Unit> {
        match self {
            Total::Bytes | Total::KvDisk => Some(Unit::Bytes),
            Total::WaitSeconds | Total::DiskBusySeconds | Total::KvSavedSeconds => {
                Some(Unit::Seconds)
            }
            _ => None,
        }
    }
}

/// What is true now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Now {
    HitRate,
    TokensPerSecond,
    Vram,
    Ram,
    KvBlocks,
    DiskBusy,
}

impl Now {
    const ALL: [Now; 6] =
        [Now::HitRate, Now::TokensPerSecond, Now::Vram, Now::Ram, Now::KvBlocks, Now::DiskBusy];

    /// Returns the name, the label, and the explanation.
    fn describe(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Now::HitRate => ("expert_hit_rate", "tier", "Hits by lookups since the model's load"),
            Now::TokensPerSecond => {
                ("tokens_per_second", "kind", "Rate of the last two seconds of work")
            }
            Now::Vram => ("vram_use_bytes", "use", "Bytes of device memory by use"),
            Now::Ram => ("ram_use_bytes", "use", "Bytes of RAM by use"),
            Now::KvBlocks => ("kv_blocks", "state", "Blocks of 16 positions of the KV cache"),
            Now::DiskBusy => (
                "disk_busy_ratio",
                "disk",
                "Part of the time since the model's load with a request at the disk",
            ),
        }
    }
}

/// The metrics.
pub struct MachineMetrics {
    responses: Family<[(&'static str, u16); 1], Counter>,
    totals: HashMap<Total, Totals>,
    now: HashMap<Now, Gauges>,
    /// Totals of engines that have ended, by model and label.
    ended: Mutex<HashMap<(Total, String, &'static str), f64>>,
}

impl MachineMetrics {
    pub fn new(registry: &mut Registry) -> MachineMetrics {
        let responses = Family::default();
        registry.register("http_responses", "Answers by status", responses.clone());
        let mut totals = HashMap::new();
        for total in Total::ALL {
            let ((name, _, help), family) = (total.describe(), Totals::default());
            match total.unit() {
                None => registry.register(name, help, family.clone()),
                Some(unit) => registry.register_with_unit(name, help, unit, family.clone()),
            }
            totals.insert(total, family);
        }
        let mut now = HashMap::new();
        for of in Now::ALL {
            let ((name, _, help), family) = (of.describe(), Gauges::default());
            registry.register(name, help, family.clone());
            now.insert(of, family);
        }
        MachineMetrics { responses, totals, now, ended: Mutex::default() }
    }

    /// Counts an answer.
    pub fn note_response(&self, status: u16) {
        self.responses.get_or_create(&[("status", status)]).inc();
    }

    /// Keeps the totals of an engine that ends.
    pub fn note_unload(&self, name: &str, last: &Report) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        for (total, label, value) in totals(last) {
            *ended.entry((total, name.to_owned(), label)).or_default() += value;
        }
    }

    /// Brings the metrics up to date. Models that are not loaded keep their totals.
    pub fn update(&self, loaded: &[Status]) {
        let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for status in loaded {
            for (total, label, value) in totals(&status.report) {
                *all.entry((total, status.name.clone(), label)).or_default() += value;
            }
        }
        self.totals.values().for_each(Family::clear);
        for ((total, name, label), value) in all {
            let labels = [("model", name), (total.describe().1, label.to_owned())];
            self.totals[&total].get_or_create(&labels).inc_by(value);
        }
        self.now.values().for_each(Family::clear);
        for status in loaded {
            for (of, label, value) in values(&status.report) {
                let labels = [("model", status.name.clone()), (of.describe().1, label.to_owned())];
                self.now[&of].get_or_create(&labels).set(value);
            }
        }
    }
}

/// Returns the totals of an engine.
fn totals(report: &Report) -> Vec<(Total, &'static str, f64)> {
    let mut all = vec![(Total::Evictions, "kv", report.kv.evictions as f64)];
    let session = &report.session;
    if let Some(stream) = &session.stream {
        all.extend([
            (Total::Hits, "ram", stream.hits as f64),
            (Total::Misses, "ram", stream.misses as f64),
            (Total::Evictions, "ram", stream.evictions as f64),
            (Total::Bytes, "disk", stream.bytes_read as f64),
            (Total::DiskBusySeconds, "weights", stream.io.busy_seconds),
        ]);
    }
    if let Some(device) = &session.device_experts {
        all.extend([
            (Total::Hits, "vram", device.tier.hits as f64),
            (Total::Misses, "vram", device.tier.misses as f64),
            (Total::Evictions, "vram", device.tier.evictions as f64),
            (Total::Bytes, "pcie", device.bytes_copied as f64),
        ]);
    }
    if let Some(device) = &session.device_sub_layers {
        all.push((Total::Bytes, "pcie", device.sub_layers.bytes_copied as f64));
    }
    let kv = &report.kv_tiers;
    all.extend([
        (Total::Evictions, "kv_ram", kv.ram_evicted_blocks as f64),
        (Total::KvPositions, "device", kv.pool_positions as f64),
        (Total::KvPositions, "ram", kv.ram_positions as f64),
        (Total::KvPositions, "disk", kv.disk_positions as f64),
        (Total::KvDisk, "read", kv.disk_read_bytes as f64),
        (Total::KvDisk, "written", kv.disk_written_bytes as f64),
        // Reading may take longer than was estimated, and a counter never falls.
        (Total::KvSavedSeconds, "reuse", kv.saved_seconds.max(0.0)),
    ]);
    all.push((Total::WaitSeconds, "disk", report.weights.disk_wait_seconds));
    all.push((Total::WaitSeconds, "pcie", report.weights.copy_wait_seconds));
    all
}

/// Returns what is true of an engine now.
fn values(report: &Report) -> Vec<(Now, &'static str, f64)> {
    let session = &report.session;
    let rates = report.live.rates(report.running == 0);
    let (generated, prompt) = (rates.generated_tokens, rates.prompt_tokens);
    let kv = &report.kv;
    let mut all = vec![
        (Now::TokensPerSecond, "generated", generated),
        (Now::TokensPerSecond, "prompt", prompt),
        (Now::KvBlocks, "free", kv.free as f64),
        (Now::KvBlocks, "cached", kv.cached as f64),
        (Now::KvBlocks, "in_use", kv.referenced as f64),
        (Now::KvBlocks, "ram", report.kv_tiers.ram_blocks as f64),
        (Now::Ram, "weights", session.arena_bytes as f64),
        (Now::Ram, "kv_tier", report.kv_tiers.ram_bytes as f64),
    ];
    match &session.vram {
        None => all.push((Now::Ram, "kv_cache", session.kv_cache_bytes as f64)),
        Some(vram) => all.extend([
            (Now::Vram, "weights", vram.weights_bytes as f64),
            (Now::Vram, "kv_cache", vram.kv_cache_bytes as f64),
            (Now::Vram, "activations", vram.activation_bytes as f64),
            (Now::Vram, "context", vram.context_bytes as f64),
        ]),
    }
    if let Some(stream) = &session.stream {
        all.push((Now::DiskBusy, "weights", stream.io.busy_fraction));
        if stream.lookups > 0 {
            all.push((Now::HitRate, "ram", stream.hit_rate));
        }
    }
    if let Some(device) = session.device_experts.as_ref().filter(|of| of.tier.lookups > 0) {
        all.push((Now::HitRate, "vram", device.tier.hit_rate));
    }
    all
}
