//! CPU offload of experts: whether the CPU computes experts that are not in VRAM, and how many of a layer's.
//!
//! The two devices round differently. The decision therefore depends on the routing so far and on rates, never on timing: the
//! same tokens lead to the same decision. CPU offload costs time in every layer, even if no expert is missing there, and output
//! is then not bit-identical to a GPU that holds all experts. It is therefore off while few experts are missing. The decision is
//! made for several tokens at a time, from the misses of the tokens before.

use serde::Serialize;

/// The assumed cost of CPU offload per layer, whatever is missing there. A kernel waits for the CPU's rows, threads are awake
/// beside the one that drives the GPU, and an expert that the CPU computes does not reach VRAM for later tokens. On an H200,
/// tokens took 9 us longer than their experts explain. The rest is the margin by which CPU offload has to win.
const LAYER_SECONDS: f64 = 16e-6;

/// Tokens between two decisions. The misses of a layer are then averages of hundreds of counts, and the worst misses after the
/// start of a text or a change of subject are over.
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
    /// How many of `misses` are brought to the GPU, so that both are done soonest; one at least, so that what is used comes
    /// to be there.
    pub fn brought(&self, misses: usize) -> usize {
        let seconds = |brought: &usize| self.seconds_with(*brought, misses);
        // The last of equals: rather on the GPU.
        (1..=misses).rev().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(0)
    }

    /// Until `misses` experts are computed.
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
    /// Seconds for `misses` experts of a layer, without and with CPU offload.
    pub fn seconds(&self, misses: usize) -> [f64; 2] {
        let alone = misses as f64 * self.copy_alone_seconds;
        [alone, self.split.seconds(misses) + LAYER_SECONDS]
    }

    /// The mean seconds that CPU offload saves per layer if `counts[m]` layers miss `m` experts. Negative if it costs time.
    pub fn saved(&self, counts: &[f64]) -> f64 {
        let layers: f64 = counts.iter().sum();
        let saved = counts.iter().enumerate().map(|(misses, layers)| {
            let [without, with] = self.seconds(misses);
            layers * (without - with)
        });
        saved.sum::<f64>() / layers.max(f64::MIN_POSITIVE)
    }
}

/// How CPU offload is decided.
#[derive(Debug, Clone, PartialEq)]
pub enum CpuOffloadMode {
    /// It is always on.
    Always,
    /// By misses. At first they are expected ones: `expected[m]` of the layers miss `m` experts.
    ByMisses { expected: Vec<f64> },
}

/// Whether CPU offload is on, and why, for statistics.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CpuOffloadStatistics {
    /// It is on whatever is missing.
    pub always: bool,
    pub is_on: bool,
    /// True if rates come from a machine profile, false if they were measured at the start.
    pub from_profile: bool,
    pub rates: CpuOffloadRates,
    /// The basis of the last decision: misses per layer, and seconds that CPU offload saves per layer.
    pub misses_per_layer: f64,
    pub saved_seconds_per_layer: f64,
    /// True if these misses were counted, false if they were expected.
    pub counted: bool,
    /// Number of decisions that differed from the previous one.
    pub changes: u64,
}

/// The state of that decision.
pub struct CpuOffloadControl {
    statistics: CpuOffloadStatistics,
    /// Of single tokens since the last decision: layers by what they missed.
    counts: Vec<f64>,
    /// Layers with experts.
    layers: usize,
}

impl CpuOffloadControl {
    /// For tokens that choose `used` experts in each of `layers` layers.
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

    /// Who computes how many; `None`: the GPU all.
    pub fn split(&self) -> Option<MissSplit> {
        self.statistics.is_on.then_some(self.statistics.rates.split)
    }

    /// A layer of a single token missed so many experts.
    pub fn note(&mut self, misses: usize) {
        self.counts[misses] += 1.0;
    }

    /// Called before a batch: decides again if it is time, and returns whether CPU offload is on.
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
        // 2.8 MB at 50 GB/s, and at 70.
        let server = split(56e-6, 40e-6);
        assert_eq!(server.brought(0), 0);
        assert_eq!(server.brought(1), 1, "what is used comes to the GPU");
        assert_eq!(server.brought(2), 1);
        assert_eq!(server.brought(8), 3);
        // PCIe of a laptop: 12 GB/s.
        assert_eq!(split(230e-6, 60e-6).brought(8), 1);
        // A slow CPU is left alone.
        assert_eq!(split(56e-6, 1e-3).brought(8), 8);
        // Memory that is no faster than the bus alone leaves nothing to win.
        let narrow = MissSplit { both_seconds: 56e-6, ..server };
        assert_eq!((narrow.brought(8), narrow.seconds(8)), (8, 8.0 * 56e-6));
        for misses in 0..64 {
            let brought = server.brought(misses);
            assert!(brought <= server.brought(misses + 1) && brought <= misses, "{misses}");
            assert!(server.seconds(misses) <= server.seconds(misses + 1), "{misses}");
        }
    }

    /// An H200 and 8 threads beside it: what one of 48 layers misses of 6 experts with 37 % and 90 % of hits.
    const SERVER: CpuOffloadRates = CpuOffloadRates {
        split: MissSplit {
            copy_seconds: 74e-6,
            cpu_seconds: 47e-6,
            cpu_start_seconds: 20e-6,
            both_seconds: 0.0,
        },
        copy_alone_seconds: 68e-6,
    };
    const UNIFORM: [f64; 7] = [0.003, 0.029, 0.12, 0.26, 0.32, 0.21, 0.058];
    const RECORDED: [f64; 7] = [0.61, 0.22, 0.10, 0.045, 0.02, 0.005, 0.0];

    #[test]
    fn cpu_offload_pays_for_many_misses_and_not_for_few() {
        assert!(SERVER.saved(&UNIFORM) > 80e-6, "{}", SERVER.saved(&UNIFORM));
        assert!(SERVER.saved(&RECORDED) < 0.0, "{}", SERVER.saved(&RECORDED));
        // By a slow bus they are.
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
        // And back, also in the middle of a layer's count.
        for _ in 1..DECIDED_TOKENS {
            assert!(token(&mut cpu_offload, [1, 0]));
        }
        assert!(!token(&mut cpu_offload, [0, 0]));
        assert_eq!(cpu_offload.statistics().changes, 2);
        // Expected to be worth it from the beginning.
        assert!(by_misses(UNIFORM).decide());
        let mut always = CpuOffloadControl::new(&CpuOffloadMode::Always, (SERVER, false), 2, 6);
        for _ in 0..2 * DECIDED_TOKENS {
            assert!(token(&mut always, [0, 0]));
        }
        assert!(always.statistics().saved_seconds_per_layer < 0.0, "it is told all the same");
    }
}
