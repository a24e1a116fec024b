//! Judges if the machine was idle while it was measured, and if its readings agree.

use std::fs;
use std::time::Instant;

use forebay_store::process_seconds;
use serde::{Deserialize, Serialize};

/// Runnable and waiting tasks per processor in the minute before the measurement. An idle desktop has less than a
/// tenth.
const BUSY_LOAD: f64 = 0.5;
/// Share of all processor time that the hypervisor gave to other virtual machines.
const BUSY_STEAL: f64 = 0.05;
/// Share of all processor time that other programs used.
const BUSY_OTHERS: f64 = 0.10;
/// Share of the time in which some task waited for a processor. The measurement's own threads wait a little, too.
const BUSY_CPU_PRESSURE: f64 = 0.30;
/// Share of the time in which some task waited for memory.
const BUSY_MEMORY_PRESSURE: f64 = 0.05;
/// Largest ratio of two readings of one case that still agree.
const AGREE: f64 = 1.15;

/// Trustworthiness of a machine profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QualityState {
    /// The machine was idle and readings agreed.
    Good,
    /// Other programs or other virtual machines used the processors or the memory.
    Busy,
    /// No other activity was seen, but readings of the same case disagreed.
    Unstable,
}

/// Quality of a machine profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileQuality {
    pub state: QualityState,
    /// Findings in words. Empty for a good profile.
    pub reasons: Vec<String>,
    /// Factor by which rates of the idle machine may differ from those of the profile, at least 1.
    pub spread: f64,
    /// True if only rates of the disk are in doubt. Older profiles do not have it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_disk: bool,
}

/// Rate that was measured more than once, seconds or minutes apart.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RepeatedReading {
    pub name: String,
    /// True if it is a rate of the disk.
    pub is_of_disk: bool,
    /// Readings in the order in which they were measured.
    pub bytes_per_second: Vec<f64>,
}

impl RepeatedReading {
    pub fn new(name: &str, bytes_per_second: Vec<f64>) -> RepeatedReading {
        RepeatedReading { name: name.to_owned(), is_of_disk: false, bytes_per_second }
    }

    pub fn of_disk(bytes_per_second: Vec<f64>) -> RepeatedReading {
        RepeatedReading { is_of_disk: true, ..RepeatedReading::new("the disk", bytes_per_second) }
    }

    /// Returns the largest reading divided by the smallest.
    fn spread(&self) -> f64 {
        let readings = self.bytes_per_second.iter().copied();
        let smallest = readings.clone().fold(f64::INFINITY, f64::min);
        let spread = readings.fold(0.0, f64::max) / smallest;
        if spread.is_finite() { spread.max(1.0) } else { 1.0 }
    }
}

/// Activity of the machine beside the measurement. Shares are from 0 to 1, and `None` if the system does not report
/// them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Activity {
    pub processors: usize,
    /// Load average of the minute before the measurement.
    pub load_before: Option<f64>,
    /// Share of processor time that the hypervisor gave to other virtual machines.
    pub steal_share: Option<f64>,
    /// Share of processor time that other programs used for their own code.
    pub others_share: Option<f64>,
    /// Share of the time in which some task waited for a processor.
    pub cpu_pressure_share: Option<f64>,
    /// Share of the time in which some task waited for memory.
    pub memory_pressure_share: Option<f64>,
}

impl ProfileQuality {
    /// Judges a measurement by the activity beside it and by its repeated readings.
    pub fn judge(activity: &Activity, readings: &[RepeatedReading]) -> ProfileQuality {
        let busy = activity.reasons();
        let spread = readings.iter().map(RepeatedReading::spread).fold(1.0, f64::max);
        let disagreeing = readings.iter().filter(|reading| reading.spread() > AGREE);
        let only_disk = busy.is_empty()
            && disagreeing.clone().count() > 0
            && disagreeing.clone().all(|reading| reading.is_of_disk);
        let unstable: Vec<String> = disagreeing
            .map(|reading| {
                let rates = reading.bytes_per_second.iter();
                let rates: Vec<String> = rates.map(|rate| format!("{:.1}", rate * 1e-9)).collect();
                format!("readings of {} disagree: {} GB/s", reading.name, rates.join(", "))
            })
            .collect();
        let state = match (busy.is_empty(), unstable.is_empty()) {
            (false, _) => QualityState::Busy,
            (true, false) => QualityState::Unstable,
            (true, true) => QualityState::Good,
        };
        let taken = if busy.is_empty() { 0.0 } else { activity.taken_share() };
        let reasons = busy.into_iter().chain(unstable).collect();
        let spread = spread.max(1.0 / (1.0 - taken));
        ProfileQuality { state, reasons, spread, only_disk }
    }

    pub fn is_good(&self) -> bool {
        self.state == QualityState::Good
    }
}

impl Activity {
    /// Returns the share of the processors that was not available to the measurement, at most nine tenths.
    fn taken_share(&self) -> f64 {
        let used = self.steal_share.unwrap_or(0.0) + self.others_share.unwrap_or(0.0);
        used.clamp(0.0, 0.9)
    }

    /// Returns the reasons why the machine counts as busy, in words.
    fn reasons(&self) -> Vec<String> {
        let processors = self.processors.max(1);
        let load = self.load_before.filter(|load| *load > BUSY_LOAD * processors as f64);
        let load = load.map(|load| {
            format!(
                "the load average was {load:.1} on {processors} processors before the measurement"
            )
        });
        let share = |share: Option<f64>, bound: f64, what: &str| {
            let share = share.filter(|share| *share > bound)?;
            Some(format!("{what} {:.0} % of the time", 100.0 * share))
        };
        let others = "other programs used the processors";
        let steal = "other virtual machines used this machine's processors";
        let reasons = [
            load,
            share(self.others_share, BUSY_OTHERS, others),
            share(self.steal_share, BUSY_STEAL, steal),
            share(self.cpu_pressure_share, BUSY_CPU_PRESSURE, "tasks waited for a processor"),
            share(self.memory_pressure_share, BUSY_MEMORY_PRESSURE, "tasks waited for memory"),
        ];
        reasons.into_iter().flatten().collect()
    }
}

/// Counters of the system at one moment.
struct Counters {
    at: Instant,
    /// Ticks of all processors together.
    ticks: Option<ProcessorTicks>,
    /// Processor time of this process in seconds.
    own_seconds: f64,
    cpu_pressure_seconds: Option<f64>,
    memory_pressure_seconds: Option<f64>,
}

/// Ticks since the start of the system, from the first line of `/proc/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessorTicks {
    /// Ticks that programs spent in their own code.
    user: u64,
    steal: u64,
    all: u64,
    processors: usize,
}

impl ProcessorTicks {
    fn parse(stat: &str) -> Option<ProcessorTicks> {
        let first = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = first.split_whitespace().map_while(|n| n.parse().ok()).collect();
        // The fields are user, nice, system, idle, iowait, irq, softirq and steal. The guest fields are already counted
        // in user and nice.
        let counted = ticks.get(..8)?;
        let is_processor = |line: &&str| {
            line.strip_prefix("cpu")
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        Some(ProcessorTicks {
            user: counted[0] + counted[1],
            steal: counted[7],
            all: counted.iter().sum(),
            processors: stat.lines().filter(is_processor).count(),
        })
    }
}

/// Returns the seconds that some task waited since the start of the system, from the text of a file in
/// `/proc/pressure`.
fn pressure_seconds(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split_whitespace().find_map(|field| field.strip_prefix("total="))?;
    Some(total.parse::<u64>().ok()? as f64 * 1e-6)
}

fn load_average(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

impl Counters {
    fn now() -> Counters {
        let read = |path: &str| fs::read_to_string(path).ok();
        let pressure = |path: &str| pressure_seconds(&read(path)?);
        Counters {
            at: Instant::now(),
            ticks: read("/proc/stat").and_then(|stat| ProcessorTicks::parse(&stat)),
            own_seconds: process_seconds(),
            cpu_pressure_seconds: pressure("/proc/pressure/cpu"),
            memory_pressure_seconds: pressure("/proc/pressure/memory"),
        }
    }
}

/// Watches the system from the start of a measurement to its end.
pub(super) struct Watch {
    load_before: Option<f64>,
    start: Counters,
}

impl Watch {
    pub fn start() -> Watch {
        let load_before =
            fs::read_to_string("/proc/loadavg").ok().and_then(|text| load_average(&text));
        Watch { load_before, start: Counters::now() }
    }

    /// Returns the other activity of the machine since the start.
    pub fn end(&self) -> Activity {
        let (start, end) = (&self.start, Counters::now());
        let seconds = end.at.duration_since(start.at).as_secs_f64().max(f64::MIN_POSITIVE);
        let own_seconds = end.own_seconds - start.own_seconds;
        let here = std::thread::available_parallelism().map_or(1, usize::from);
        let mut activity = Activity {
            processors: here,
            load_before: self.load_before,
            cpu_pressure_share: share(
                start.cpu_pressure_seconds,
                end.cpu_pressure_seconds,
                seconds,
            ),
            memory_pressure_share: share(
                start.memory_pressure_seconds,
                end.memory_pressure_seconds,
                seconds,
            ),
            ..Activity::default()
        };
        if let (Some(start), Some(end)) = (start.ticks, end.ticks) {
            activity.processors = end.processors.max(1);
            let all = end.all.saturating_sub(start.all).max(1) as f64;
            let user = end.user.saturating_sub(start.user) as f64 / all;
            // All time of this process counts as its own code, so that it is never attributed to other programs.
            let own = own_seconds / (seconds * activity.processors as f64);
            activity.others_share = Some((user - own).clamp(0.0, 1.0));
            activity.steal_share = Some(end.steal.saturating_sub(start.steal) as f64 / all);
        }
        activity
    }
}

fn share(start: Option<f64>, end: Option<f64>, seconds: f64) -> Option<f64> {
    Some(((end? - start?) / seconds).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle() -> Activity {
        Activity {
            processors: 4,
            load_before: Some(0.2),
            steal_share: Some(0.0),
            others_share: Some(0.02),
            cpu_pressure_share: Some(0.03),
            memory_pressure_share: None,
        }
    }

    fn readings(rates: &[f64]) -> [RepeatedReading; 1] {
        [RepeatedReading::new("memory", rates.to_vec())]
    }

    #[test]
    fn an_idle_machine_with_steady_readings_is_good() {
        let quality = ProfileQuality::judge(&idle(), &readings(&[10e9, 10.9e9, 10.2e9]));
        assert_eq!((quality.state, quality.reasons.len()), (QualityState::Good, 0));
        assert!((quality.spread - 1.09).abs() < 1e-9, "{quality:?}");
        assert!(ProfileQuality::judge(&Activity::default(), &[]).is_good());
    }

    #[test]
    fn every_sign_of_other_work_makes_a_profile_busy() {
        let steady = readings(&[10e9, 10e9]);
        for (activity, said) in [
            (Activity { load_before: Some(2.4), ..idle() }, "load average was 2.4 on 4 processors"),
            (Activity { steal_share: Some(0.2), ..idle() }, "virtual machines"),
            (
                Activity { others_share: Some(0.5), ..idle() },
                "other programs used the processors 50 %",
            ),
            (Activity { cpu_pressure_share: Some(0.6), ..idle() }, "waited for a processor 60 %"),
            (Activity { memory_pressure_share: Some(0.1), ..idle() }, "waited for memory 10 %"),
        ] {
            let quality = ProfileQuality::judge(&activity, &steady);
            assert_eq!(quality.state, QualityState::Busy);
            assert!(quality.reasons[0].contains(said), "{quality:?}");
        }
        let half = Activity { others_share: Some(0.5), ..idle() };
        assert_eq!(ProfileQuality::judge(&half, &steady).spread, 2.0);
    }

    #[test]
    fn readings_that_disagree_make_a_profile_unstable() {
        let quality = ProfileQuality::judge(&idle(), &readings(&[10e9, 16e9]));
        assert_eq!((quality.state, quality.spread), (QualityState::Unstable, 1.6));
        assert_eq!(quality.reasons, ["readings of memory disagree: 10.0, 16.0 GB/s"]);
        assert!(!quality.only_disk);
        let disk = [RepeatedReading::of_disk(vec![2e9, 3e9]), readings(&[10e9, 10.1e9])[0].clone()];
        let quality = ProfileQuality::judge(&idle(), &disk);
        assert_eq!((quality.state, quality.spread), (QualityState::Unstable, 1.5));
        assert!(quality.only_disk);
        let both = Activity { load_before: Some(9.0), ..idle() };
        let quality = ProfileQuality::judge(&both, &readings(&[10e9, 16e9]));
        assert_eq!((quality.state, quality.reasons.len()), (QualityState::Busy, 2));
        assert!(!ProfileQuality::judge(&both, &disk).only_disk);
    }

    #[test]
    fn the_systems_files_are_read() {
        let stat = "cpu  10 1 5 80 2 1 1 10 4 0\ncpu0 5 1 2 40 1 1 1 5 4 0\ncpu1 5 0 3 40 1 0 0 5 0 0\nintr 7\n";
        let ticks = ProcessorTicks::parse(stat).unwrap();
        assert_eq!(ticks, ProcessorTicks { user: 11, steal: 10, all: 110, processors: 2 });
        assert_eq!(ProcessorTicks::parse("cpu  1 2\n"), None);
        let pressure = "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull total=9\n";
        assert_eq!(pressure_seconds(pressure), Some(2.5));
        assert_eq!(pressure_seconds(""), None);
        assert_eq!(load_average("4.60 2.95 1.60 5/142 4346\n"), Some(4.6));
        let activity = Watch::start().end();
        assert!(activity.processors >= 1 && activity.others_share.is_none_or(|s| s <= 1.0));
    }
}
