//! How long a request may wait between two of its tokens.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::shares::PASS_SHARE;

/// The time between two tokens of a request that an [`Engine`](super::Engine) aims for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Latency {
    /// All requests generate in every pass, and prompts of others are read in parts between these passes. A part takes so long
    /// that the time between two tokens grows to about three times at most. A part is some layers of a pass of the prompt, or
    /// few rows of the prompt where passes cannot pause: on the CPU, and on a GPU for a dense model that does not fit.
    /// Few rows take long if their pass streams weights. Such parts then have as many rows as take about a second.
    #[default]
    Automatic,
    /// Prompts are read in parts that are as short as this needs. If more tokens per second are generated when fewer
    /// requests share a pass, they take turns.
    AtMost(Duration),
    /// Most tokens per second. Requests that would wait for others to end do not begin before.
    Unbounded,
}

/// Prompt rows beside generated ones at first and at least, if passes cannot pause.
const ROWS_MIN: usize = 16;

/// With [`Latency::Automatic`]: most time between two tokens while a prompt is read, as a multiple of the usual time.
const SLOWER: f64 = 2.7;

/// With [`Latency::Automatic`]: most seconds of a pass with prompt rows that streams weights, and of all turns if passes of
/// generated rows stream weights.
const STREAMED_MAX: f64 = 1.0;

/// A pass streams weights if it copies or reads more than this share of the model.
const STREAMED_SHARE: f64 = 0.02;

/// Weight of the newest pass in the usual time of passes.
const NEWEST: f64 = 0.2;

/// Chooses how much of a prompt is read between two tokens of others, by the time that earlier passes took.
#[derive(Debug)]
pub struct Pace {
    latency: Latency,
    rows_max: usize,
    rows: f64,
    /// Usual seconds of a pass that has generated rows only.
    generate_seconds: Option<f64>,
    /// Usual seconds of one layer of a pass of prompt rows that may pause.
    layer_seconds: Option<f64>,
    /// True if the last pass of generated rows streamed weights.
    streams: bool,
    turn_began: Instant,
}

impl Pace {
    /// Begins with few rows, unless the latency is unbounded.
    pub fn new(latency: Latency, rows_max: usize) -> Pace {
        let least = ROWS_MIN.min(rows_max);
        let rows = if latency == Latency::Unbounded { rows_max } else { least };
        let (rows, turn_began) = (rows as f64, Instant::now());
        Pace {
            latency,
            rows_max,
            rows,
            generate_seconds: None,
            layer_seconds: None,
            streams: false,
            turn_began,
        }
    }

    /// Returns true if the time between two tokens matters: requests begin although they have to take turns, and passes of
    /// prompts pause for generated rows.
    pub fn is_bounded(&self) -> bool {
        self.latency != Latency::Unbounded
    }

    /// Returns the most seconds between two tokens. `automatic` is for [`Latency::Automatic`]. Returns `None` if there is no
    /// bound.
    fn seconds_max(&self, automatic: f64) -> Option<f64> {
        match self.latency {
            Latency::Automatic => Some(automatic),
            Latency::AtMost(most) => Some(most.as_secs_f64()),
            Latency::Unbounded => None,
        }
    }

    /// Returns true if the next ones of `turns` groups of requests should generate, and starts their turn. A turn is one pass,
    /// unless passes stream weights: others would then push the experts of these requests out of memory.
    pub fn ends_turn(&mut self, turns: usize) -> bool {
        let automatic = if self.streams { STREAMED_MAX } else { 0.0 };
        let Some(most) = self.seconds_max(automatic) else { return false };
        let elapsed = self.turn_began.elapsed().as_secs_f64();
        let ends = turns > 1 && elapsed * turns as f64 >= most;
        if ends {
            self.turn_began = Instant::now();
        }
        ends
    }

    /// Returns the most prompt rows of a pass that also has generated rows.
    pub fn prompt_rows(&self) -> usize {
        self.rows as usize
    }

    /// Returns the most prompt rows of such a pass if there are so many callers. With [`Latency::Automatic`], such a pass then
    /// takes less than so many times as long.
    pub fn prompt_rows_of(&self, callers: usize) -> usize {
        let share = (PASS_SHARE * callers as f64 - 1.0) / (SLOWER - 1.0);
        match self.latency {
            Latency::Automatic if callers > 1 && share < 1.0 => {
                (self.rows * share).max(1.0) as usize
            }
            _ => self.prompt_rows(),
        }
    }

    /// Returns through how many layers prompt rows should go between two passes of generated rows.
    pub fn layers(&self) -> usize {
        let usual = self.generate_seconds.unwrap_or(0.0);
        let Some(most) = self.seconds_max(SLOWER * usual) else { return usize::MAX };
        self.layer_seconds.map_or(1, |each| ((most - usual) / each.max(1e-9)).max(1.0) as usize)
    }

    /// Notes the time of a part of a pass of prompt rows.
    pub fn note_layers(&mut self, layers: usize, seconds: f64) {
        let each = seconds / layers.max(1) as f64;
        follow(&mut self.layer_seconds, each);
    }

    /// Notes the time of a pass that had generated rows only, and copied or read a share of the model.
    pub fn note_generate(&mut self, seconds: f64, streamed_share: f64) {
        self.streams = streamed_share > STREAMED_SHARE;
        follow(&mut self.generate_seconds, seconds);
    }

    /// Notes the time of a pass that had `rows` prompt rows and generated rows, and copied or read a share of the model.
    pub fn note_prompt(&mut self, rows: usize, seconds: f64, streamed_share: f64) {
        let usual = self.generate_seconds.unwrap_or(0.0);
        let streams = streamed_share > STREAMED_SHARE;
        let automatic = if streams { STREAMED_MAX } else { SLOWER * usual };
        let Some(most) = self.seconds_max(automatic) else { return };
        let factor = (most - usual).max(0.0) / (seconds - usual).max(1e-9);
        // The last rows of a prompt say little about the time of more rows.
        if rows < self.prompt_rows() && factor > 1.0 {
            return;
        }
        let least = ROWS_MIN.min(self.rows_max) as f64;
        self.rows = (rows as f64 * factor.clamp(0.5, 2.0)).clamp(least, self.rows_max as f64);
    }
}

/// Moves a usual value towards the newest one.
pub fn follow(usual: &mut Option<f64>, newest: f64) {
    let usual = usual.get_or_insert(newest);
    *usual += NEWEST * (newest - *usual);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs passes whose times grow linearly with prompt rows, and returns the last number of rows and its time.
    fn settled(pace: &mut Pace, fixed: f64, each: f64, streamed: f64) -> (usize, f64) {
        let seconds = |rows: usize| fixed + each * rows as f64;
        (0..10).for_each(|_| pace.note_generate(seconds(0).min(4e-3), 0.0));
        for _ in 0..100 {
            let rows = pace.prompt_rows();
            pace.note_prompt(rows, seconds(rows), streamed);
        }
        (pace.prompt_rows(), seconds(pace.prompt_rows()))
    }

    #[test]
    fn passes_with_prompt_rows_take_less_than_three_times_as_long_as_others() {
        let mut pace = Pace::new(Latency::Automatic, 2048);
        assert_eq!(pace.prompt_rows(), 16);
        let (rows, seconds) = settled(&mut pace, 4e-3, 0.1e-3, 0.0);
        assert!((60..=70).contains(&rows) && seconds < 3.0 * 4e-3, "{rows} {seconds}");
        // With two callers, 0.6 times the usual time is added. With four, as much as with one.
        let of_two = pace.prompt_rows_of(2);
        assert!(of_two * 3 > rows && of_two * 5 < rows * 2, "{of_two} of {rows}");
        assert_eq!([1, 4].map(|callers| pace.prompt_rows_of(callers)), [rows, rows]);
        // Slower rows.
        let (rows, _) = settled(&mut pace, 4e-3, 0.3e-3, 0.0);
        assert!((18..=24).contains(&rows), "{rows}");
        let (rows, _) = settled(&mut pace, 4e-3, 5e-3, 0.0);
        assert_eq!(rows, 16);
    }

    #[test]
    fn prompts_go_through_as_many_layers_as_there_is_time_for() {
        let mut pace = Pace::new(Latency::Automatic, 512);
        assert_eq!((pace.is_bounded(), pace.layers()), (true, 1));
        (0..20).for_each(|_| pace.note_generate(4e-3, 0.0));
        (0..20).for_each(|_| pace.note_layers(2, 2e-3));
        assert_eq!(pace.layers(), 6, "6.8 of 10.8 ms are left");
        (0..50).for_each(|_| pace.note_layers(1, 50e-3));
        assert_eq!(pace.layers(), 1);
        let mut pace = Pace::new(Latency::AtMost(Duration::from_millis(109)), 512);
        (0..20).for_each(|_| pace.note_generate(4e-3, 0.0));
        (0..20).for_each(|_| pace.note_layers(1, 10e-3));
        assert_eq!(pace.layers(), 10);
    }

    #[test]
    fn passes_that_stream_weights_have_many_rows() {
        let mut pace = Pace::new(Latency::Automatic, 2048);
        assert_eq!(settled(&mut pace, 0.2, 0.1e-3, 0.5).0, 2048);
        let (rows, seconds) = settled(&mut pace, 0.2, 1e-3, 0.5);
        assert!(rows > 700 && seconds < 1.01, "{rows} {seconds}");
        let mut bounded = Pace::new(Latency::AtMost(Duration::from_millis(300)), 2048);
        let (rows, seconds) = settled(&mut bounded, 0.2, 1e-3, 0.5);
        assert!(rows > 90 && seconds < 0.305, "{rows} {seconds}");
    }

    #[test]
    fn the_end_of_a_prompt_does_not_raise_the_number_of_rows() {
        let mut pace = Pace::new(Latency::AtMost(Duration::from_millis(100)), 512);
        settled(&mut pace, 10e-3, 1e-3, 0.0);
        let before = pace.prompt_rows();
        pace.note_prompt(1, 11e-3, 0.0);
        assert_eq!(pace.prompt_rows(), before);
    }

    #[test]
    fn turns_are_one_pass_long_unless_passes_stream_weights() {
        let mut pace = Pace::new(Latency::Automatic, 512);
        pace.note_generate(4e-3, 0.0);
        assert!(pace.ends_turn(2) && pace.ends_turn(2) && !pace.ends_turn(1));
        pace.note_generate(4e-3, 0.5);
        assert!(!pace.ends_turn(2));
    }

    #[test]
    fn without_a_bound_prompts_take_all_rows_and_nobody_takes_turns() {
        let mut pace = Pace::new(Latency::Unbounded, 512);
        pace.note_prompt(512, 100.0, 0.0);
        assert_eq!((pace.prompt_rows(), pace.is_bounded(), pace.ends_turn(5)), (512, false, false));
        let mut pace = Pace::new(Latency::AtMost(Duration::ZERO), 8);
        assert!(pace.is_bounded() && pace.ends_turn(2) && !pace.ends_turn(1));
    }
}
