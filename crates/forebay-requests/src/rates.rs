//! Rates of an engine, what limits them, and the uses of experts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::engine::EngineStatistics;
use forebay_engine::{Engine, LayerUses, SessionStatistics};
use serde::Serialize;

/// Time over which rates are averaged.
const WINDOW: Duration = Duration::from_secs(2);

/// What the engine's thread collects.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    at: Option<Instant>,
    rates: Rates,
    pub experts: Arc<Vec<LayerUses>>,
}

impl Collected {
    /// Returns the rates: 0 if the engine `is_idle` and the last ones are old.
    pub fn rates(&self, is_idle: bool) -> Rates {
        let age = self.at.map_or(Duration::MAX, |at| at.elapsed());
        match is_idle && age > WINDOW {
            true => Rates::default(),
            false => self.rates.clone(),
        }
    }
}

/// Rates of the last two seconds, each per second of wall time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Rates {
    pub generated_tokens: f64,
    pub prompt_tokens: f64,
    pub disk_bytes: f64,
    /// Bytes copied from RAM to the GPU.
    pub pcie_bytes: f64,
    pub expert_hits: f64,
    pub expert_misses: f64,
    pub evictions: f64,
    /// Shares of the computing time, by what it was spent on. They are measured, not predicted.
    pub time: Vec<(&'static str, f64)>,
}

/// Sums since the start at one moment.
#[derive(Clone, Debug)]
struct Sample {
    at: Instant,
    generated_tokens: f64,
    prompt_tokens: f64,
    disk_bytes: f64,
    pcie_bytes: f64,
    hits: f64,
    misses: f64,
    evictions: f64,
    /// Seconds of passes.
    busy: f64,
    /// Seconds in which passes waited, by what they waited for.
    waits: Vec<(&'static str, f64)>,
    /// Name of what computes in the rest of the time.
    computes: &'static str,
}

impl Sample {
    fn new(engine: &EngineStatistics, session: &SessionStatistics) -> Sample {
        let mut sample = Sample {
            at: Instant::now(),
            generated_tokens: engine.generate_rows as f64,
            prompt_tokens: engine.prompt_tokens as f64,
            disk_bytes: 0.0,
            pcie_bytes: 0.0,
            hits: 0.0,
            misses: 0.0,
            evictions: 0.0,
            busy: engine.prompt_seconds + engine.generate_seconds,
            waits: Vec::new(),
            computes: if session.vram.is_some() { "GPU" } else { "CPU" },
        };
        if let Some(stream) = &session.stream {
            sample.disk_bytes = stream.bytes_read as f64;
            sample.hits = stream.hits as f64;
            sample.misses = stream.misses as f64;
            sample.evictions = stream.evictions as f64;
        }
        if let Some(device) = &session.device_experts {
            sample.pcie_bytes = device.bytes_copied as f64;
            sample.hits = device.tier.hits as f64;
            sample.misses = device.tier.misses as f64;
            sample.evictions = device.tier.evictions as f64;
            sample.waits.push(("disk and host", device.answer_wait_seconds));
            sample.waits.push(("PCIe", device.copy_seconds));
        } else if let Some(device) = &session.device_sub_layers {
            let layers = &device.sub_layers;
            let passes = [&layers.few_tokens, &layers.many_tokens];
            sample.pcie_bytes = layers.bytes_copied as f64;
            let disk = passes.iter().map(|times| times.disk_wait_seconds).sum();
            let copies = passes.iter().map(|times| times.copy_wait_seconds).sum();
            let cpu = passes.iter().map(|times| times.cpu_seconds).sum();
            sample.waits.extend([("disk", disk), ("PCIe", copies), ("CPU", cpu)]);
        } else if let Some(stream) = &session.stream {
            sample.waits.push(("disk", stream.wait_seconds));
        }
        sample
    }

    /// Returns the rates between an earlier sample and this one.
    fn rates_since(&self, from: &Sample) -> Rates {
        let seconds = (self.at - from.at).as_secs_f64();
        if seconds <= 0.0 {
            return Rates::default();
        }
        let rate = |to: f64, from: f64| (to - from).max(0.0) / seconds;
        Rates {
            generated_tokens: rate(self.generated_tokens, from.generated_tokens),
            prompt_tokens: rate(self.prompt_tokens, from.prompt_tokens),
            disk_bytes: rate(self.disk_bytes, from.disk_bytes),
            pcie_bytes: rate(self.pcie_bytes, from.pcie_bytes),
            expert_hits: rate(self.hits, from.hits),
            expert_misses: rate(self.misses, from.misses),
            evictions: rate(self.evictions, from.evictions),
            time: self.time_since(from),
        }
    }

    fn time_since(&self, from: &Sample) -> Vec<(&'static str, f64)> {
        let busy = self.busy - from.busy;
        if busy <= 0.0 {
            return Vec::new();
        }
        let waits = self.waits.iter().zip(&from.waits);
        let share = |to: f64, from: f64| ((to - from) / busy).clamp(0.0, 1.0);
        let mut time: Vec<_> = waits.map(|(to, from)| (to.0, share(to.1, from.1))).collect();
        let waited: f64 = time.iter().map(|(_, share)| share).sum();
        time.push((self.computes, (1.0 - waited).max(0.0)));
        time
    }
}

/// Samples of the last seconds.
#[derive(Default)]
pub struct History(VecDeque<Sample>);

impl History {
    /// Takes a sample, and returns the rates since the oldest one that is not too old.
    pub fn collect(&mut self, engine: &Engine, session: &SessionStatistics) -> Collected {
        let sample = Sample::new(&engine.statistics(), session);
        let is_old = |old: &Sample| sample.at - old.at > WINDOW;
        // One older sample stays, because a pass may take longer than the window.
        while self.0.len() > 1 && self.0.get(1).is_some_and(is_old) {
            self.0.pop_front();
        }
        let rates = self.0.front().map_or_else(Rates::default, |from| sample.rates_since(from));
        let at = Some(sample.at);
        self.0.push_back(sample);
        Collected { at, rates, experts: Arc::new(engine.session().expert_uses()) }
    }

    /// Begins to count time again after the engine had nothing to do, so that rates do not contain the idle time.
    pub fn resume(&mut self) {
        if let Some(mut last) = self.0.pop_back() {
            last.at = Instant::now();
            self.0.clear();
            self.0.push_back(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, tokens: f64, busy: f64, waited: f64) -> Sample {
        Sample {
            at,
            generated_tokens: tokens,
            prompt_tokens: 0.0,
            disk_bytes: 1000.0 * tokens,
            pcie_bytes: 0.0,
            hits: 0.0,
            misses: 0.0,
            evictions: 0.0,
            busy,
            waits: vec![("disk", waited)],
            computes: "CPU",
        }
    }

    #[test]
    fn rates_are_those_between_two_samples() {
        let start = Instant::now();
        let from = sample(start, 10.0, 1.0, 0.5);
        let to = sample(start + Duration::from_secs(2), 30.0, 3.0, 2.0);
        let rates = to.rates_since(&from);
        assert_eq!((rates.generated_tokens, rates.disk_bytes), (10.0, 10_000.0));
        assert_eq!(rates.time, [("disk", 0.75), ("CPU", 0.25)]);
        assert_eq!(to.rates_since(&to).generated_tokens, 0.0);
        // Nothing limits an engine that did nothing.
        let later = Sample { at: to.at + Duration::from_secs(1), ..to.clone() };
        assert!(later.rates_since(&to).time.is_empty());
    }
}
