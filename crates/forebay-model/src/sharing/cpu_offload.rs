//! CPU offload of experts: whether the CPU computes experts that are not in VRAM, and how many of a layer's.
//!
//! The two devices round differently. The decision therefore depends on the routing so far and on rates, never on
//! timing: the same tokens lead to the same decision.
//!
//! CPU offload costs time in every layer, even if no expert is missing there. Its output is not bit-identical to that
//! of a GPU that holds all experts. It is therefore off while few experts are missing. The decision is made for
//! several tokens at a time, from the misses of the tokens before.

use serde::Serialize;

/// Assumed cost of CPU offload per layer, for any number of missing experts. A kernel waits for the CPU's rows, and
/// CPU threads stay awake beside the thread that drives the GPU. An expert that the CPU computes does not reach VRAM
/// for later tokens. On an H200, tokens took 9 us per layer longer than their experts explain. The rest is the margin
/// by which CPU offload has to win.
const LAYER_SECONDS: f64 = 16e-6;

/// Number of tokens between two decisions. The misses of a layer are then averages of hundreds of counts. The many
/// misses after the start of a text or a change of subject are over by then.
const DECIDED_TOKENS: usize = 16;

/// Seconds for the experts of a layer that are not in VRAM, by computing device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MissSplit {
    /// Seconds to copy an expert to the GPU while the CPU computes others.
    pub copy_seconds: f64,
    /// Seconds in which the CPU computes one expert for one token.
    pub cpu_seconds: f64,
    /// Seconds to start and end the CPU's work, for any number of experts.
    pub cpu_start_seconds: f64,
    /// Least seconds per expert on either device, because both read the same memory; 0 if the other fields include it.
    pub both_seconds: f64,
}

impl MissSplit {
    /// Returns how many of `misses` experts are copied to the GPU so that both devices finish soonest. This is at
    /// least one, so that experts in use reach VRAM.
    pub fn brought(&self, misses: usize) -> usize {
        let seconds = |brought: &usize| self.seconds_with(*brought, misses);
        // The iteration is reversed, so equal times favour the GPU.
        (1..=misses).rev().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(0)
    }

    /// Returns the seconds until `misses` experts are computed.
    pub fn seconds(&self, misses: usize) -> f64 {
        self.seconds_with(self.brought(misses), misses)
    }

    fn seconds_with(&self, brought: usize, misses: usize) -> f64 {
        let copies = brought as f64 * self.copy_seconds;
        match misses - brought {
            0 => copies,
            left => (self.cpu_start_seconds + left as f64 * self.cpu_seconds)
                .max(copies)
                .max(misses as f64 * self.both_seconds),
        }
    }
}

/// The rates that decide about CPU offload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CpuOffloadRates {
    #[serde(flatten)]
    pub split: MissSplit,
    /// Seconds to copy an expert to the GPU while the CPU is idle.
    pub copy_alone_seconds: f64,
}

impl CpuOffloadRates {
    /// Returns the seconds for `misses` experts of a layer, without and with CPU offload.
    pub fn seconds(&self, misses: usize) -> [f64; 2] {
        let alone = misses as f64 * self.copy_alone_seconds;
        [alone, self.split.seconds(misses) + LAYER_SECONDS]
    }

    /// Returns the mean seconds that CPU offload saves per layer if `counts[m]` layers miss `m` experts. The result
    /// is negative if it costs time.
    pub fn saved(&self, counts: &[f64]) -> f64 {
        let layers: f64 = counts.iter().sum();
        let saved = counts.iter().enumerate().map(|(misses, layers)| {
            let [without, with] = self.seconds(misses);
            layers * (without - with)
        });
        saved.sum::<f64>() / layers.max(f64::MIN_POSITIVE)
    }
}

/// Rule that turns CPU offload on and off.
#[derive(Debug, Clone, PartialEq)]
pub enum CpuOffloadMode {
    /// CPU offload is always on.
    Always,
    /// CPU offload depends on misses. Until misses are counted, they are expected ones: `expected[m]` of the layers
    /// miss `m` experts.
    ByMisses { expected: Vec<f64> },
}

/// State of CPU offload and the reasons for it, for statistics.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CpuOffloadStatistics {
    /// True if CPU offload is always on, for any number of misses.
    pub always: bool,
    pub is_on: bool,
    /// True if rates come from a machine profile, false if they were measured at the start.
    pub from_profile: bool,
    pub rates: CpuOffloadRates,
    /// Misses per layer on which the last decision was based.
    pub misses_per_layer: f64,
    /// Seconds per layer that CPU offload saves with these misses.
    pub saved_seconds_per_layer: f64,
    /// True if these misses were counted, false if they were expected.
    pub counted: bool,
    /// Number of decisions that differed from the previous one.
    pub changes: u64,
}

/// State of the decision about CPU offload.
pub struct CpuOffloadControl {
    statistics: CpuOffloadStatistics,
    /// Number of layers by their number of misses, for single tokens since the last decision.
    counts: Vec<f64>,
    /// Number of layers with experts.
    layers: usize,
}

impl CpuOffloadControl {
    /// Creates the state for tokens that choose `used` experts in each of `layers` layers.
    pub fn new(
        wanted: &CpuOffloadMode,
        (rates, from_profile): (CpuOffloadRates, bool),
        layers: usize,
        used: usize,
    ) -> CpuOffloadControl {
        let (always, expected): (bool, &[f64]) = match wanted {
            CpuOffloadMode::Always => (true, &[]),
            CpuOffloadMode::ByMisses { expected } => (false, expected),
        };
        let statistics = CpuOffloadStatistics {
            always,
            is_on: always,
            from_profile,
            rates,
            misses_per_layer: 0.0,
            saved_seconds_per_layer: 0.0,
            counted: false,
            changes: 0,
        };
        let mut cpu_offload = CpuOffloadControl { statistics, counts: vec![0.0; used + 1], layers };
        if !expected.is_empty() {
            cpu_offload.decide_by(expected);
            cpu_offload.statistics.changes = 0;
        }
        cpu_offload
    }

    pub fn statistics(&self) -> CpuOffloadStatistics {
        self.statistics
    }

    /// Returns how the devices share missing experts, or `None` if the GPU computes all of them.
    pub fn split(&self) -> Option<MissSplit> {
        self.statistics.is_on.then_some(self.statistics.rates.split)
    }

    /// Counts the misses in one layer of a single token.
    pub fn note(&mut self, misses: usize) {
        self.counts[misses] += 1.0;
    }

    /// Decides again if it is time, and returns true if CPU offload is on. The caller calls this before each batch.
    pub fn decide(&mut self) -> bool {
        if self.counts.iter().sum::<f64>() >= (DECIDED_TOKENS * self.layers) as f64 {
            let mut counts = std::mem::take(&mut self.counts);
            self.decide_by(&counts);
            self.statistics.counted = true;
            counts.fill(0.0);
            self.counts = counts;
        }
        self.statistics.is_on
    }

    fn decide_by(&mut self, counts: &[f64]) {
        let CpuOffloadStatistics { always, is_on, rates, changes, .. } = &mut self.statistics;
        let saved = rates.saved(counts);
        let offloads = *always || saved > 0.0;
        *changes += u64::from(offloads != *is_on);
        *is_on = offloads;
        let missing = counts.iter().enumerate().map(|(misses, layers)| misses as f64 * layers);
        self.statistics.misses_per_layer = missing.sum::<f64>() / counts.iter().sum::<f64>();
        self.statistics.saved_seconds_per_layer = saved;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(copy_seconds: f64, cpu_seconds: f64) -> MissSplit {
        MissSplit { copy_seconds, cpu_seconds, cpu_start_seconds: 20e-6, both_seconds: 0.0 }
    }

    #[test]
    fn both_are_done_about_together() {
        // 2.8 MB at 50 GB/s for copies, and at 70 GB/s for the CPU.
        let server = split(56e-6, 40e-6);
        assert_eq!(server.brought(0), 0);
        assert_eq!(server.brought(1), 1, "what is used comes to the GPU");
        assert_eq!(server.brought(2), 1);
        assert_eq!(server.brought(8), 3);
        // The PCIe bus of a laptop: 12 GB/s.
        assert_eq!(split(230e-6, 60e-6).brought(8), 1);
        // A slow CPU computes no experts.
        assert_eq!(split(56e-6, 1e-3).brought(8), 8);
        // If memory is no faster than the bus, CPU offload saves nothing.
        let narrow = MissSplit { both_seconds: 56e-6, ..server };
        assert_eq!((narrow.brought(8), narrow.seconds(8)), (8, 8.0 * 56e-6));
        for misses in 0..64 {
            let brought = server.brought(misses);
            assert!(brought <= server.brought(misses + 1) && brought <= misses, "{misses}");
            assert!(server.seconds(misses) <= server.seconds(misses + 1), "{misses}");
        }
    }

    /// Rates of an H200 with 8 CPU threads.
    const SERVER: CpuOffloadRates = CpuOffloadRates {
        split: MissSplit {
            copy_seconds: 74e-6,
            cpu_seconds: 47e-6,
            cpu_start_seconds: 20e-6,
            both_seconds: 0.0,
        },
        copy_alone_seconds: 68e-6,
    };
    /// Fraction of layers by their number of misses of 6 experts, with 37 % of hits in 48 layers.
    const UNIFORM: [f64; 7] = [0.003, 0.029, 0.12, 0.26, 0.32, 0.21, 0.058];
    /// The same with 90 % of hits.
    const RECORDED: [f64; 7] = [0.61, 0.22, 0.10, 0.045, 0.02, 0.005, 0.0];

    #[test]
    fn cpu_offload_pays_for_many_misses_and_not_for_few() {
        assert!(SERVER.saved(&UNIFORM) > 80e-6, "{}", SERVER.saved(&UNIFORM));
        assert!(SERVER.saved(&RECORDED) < 0.0, "{}", SERVER.saved(&RECORDED));
        // With a slow bus, CPU offload pays for few misses too.
        let copy = 230e-6;
        let split = MissSplit { copy_seconds: copy, ..SERVER.split };
        let slow = CpuOffloadRates { split, copy_alone_seconds: copy };
        assert!(slow.saved(&RECORDED) > 0.0);
    }

    fn by_misses(expected: [f64; 7]) -> CpuOffloadControl {
        let wanted = CpuOffloadMode::ByMisses { expected: expected.to_vec() };
        CpuOffloadControl::new(&wanted, (SERVER, true), 2, 6)
    }

    fn token(cpu_offload: &mut CpuOffloadControl, misses: [usize; 2]) -> bool {
        let offloads = cpu_offload.decide();
        misses.into_iter().for_each(|misses| cpu_offload.note(misses));
        offloads
    }

    #[test]
    fn what_is_counted_corrects_what_was_expected() {
        let mut cpu_offload = by_misses(RECORDED);
        assert_eq!(cpu_offload.split(), None);
        for _ in 0..DECIDED_TOKENS {
            assert!(!token(&mut cpu_offload, [4, 3]), "not before it is time");
        }
        assert!(token(&mut cpu_offload, [1, 0]));
        assert_eq!(cpu_offload.split(), Some(SERVER.split));
        let said = cpu_offload.statistics();
        assert!(said.counted && said.misses_per_layer == 3.5 && said.changes == 1, "{said:?}");
        // The decision is reversed when misses become few.
        for _ in 1..DECIDED_TOKENS {
            assert!(token(&mut cpu_offload, [1, 0]));
        }
        assert!(!token(&mut cpu_offload, [0, 0]));
        assert_eq!(cpu_offload.statistics().changes, 2);
        // CPU offload is expected to pay from the start.
        assert!(by_misses(UNIFORM).decide());
        let mut always = CpuOffloadControl::new(&CpuOffloadMode::Always, (SERVER, false), 2, 6);
        for _ in 0..2 * DECIDED_TOKENS {
            assert!(token(&mut always, [0, 0]));
        }
        assert!(always.statistics().saved_seconds_per_layer < 0.0, "it is told all the same");
    }
}
