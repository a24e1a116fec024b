//! Stop strings: the filter holds back text that may be the start of a stop string.

/// Passes generated text through until a stop string appears. Unless [`keep_stop`](StopFilter::keep_stop) was called, it never
/// returns a stop string or a part of one, if all text goes through [`push`](StopFilter::push).
pub struct StopFilter {
    stops: Vec<(usize, String)>,
    held: String,
    keeps_stop: bool,
}

/// Output of the filter.
#[derive(Debug, PartialEq, Eq)]
pub struct Passed {
    /// Text before any stop string.
    pub text: String,
    /// Index of the stop string that is complete. The answer ends here.
    pub stopped: Option<usize>,
}

impl StopFilter {
    /// Creates a filter for these stop strings. Empty strings are ignored.
    pub fn new(stops: &[String]) -> StopFilter {
        let stops =
            stops.iter().cloned().enumerate().filter(|(_, stop)| !stop.is_empty()).collect();
        StopFilter { stops, held: String::new(), keeps_stop: false }
    }

    /// Has the stop string that ends the text be a part of it.
    pub fn keep_stop(&mut self) {
        self.keeps_stop = true;
    }

    /// Adds text and returns the text that can be shown.
    pub fn push(&mut self, text: &str) -> Passed {
        self.held.push_str(text);
        let found =
            |(index, stop): &(usize, String)| Some((self.held.find(stop.as_str())?, *index));
        if let Some((at, index)) = self.stops.iter().filter_map(found).min() {
            let kept = self.stops.iter().find(|(own, _)| *own == index && self.keeps_stop);
            self.held.truncate(at + kept.map_or(0, |(_, stop)| stop.len()));
            return Passed { text: std::mem::take(&mut self.held), stopped: Some(index) };
        }
        let keep = self.stops.iter().map(|(_, stop)| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Passed { text: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// Returns the text still held back, which did not become a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length in bytes of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len());
    (1..=longest)
        .rev()
        .find(|&n| text.as_bytes()[text.len() - n..] == stop.as_bytes()[..n])
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut filter = StopFilter::new(&stops);
        let mut shown = String::new();
        for piece in pieces {
            let passed = filter.push(piece);
            shown.push_str(&passed.text);
            if passed.stopped.is_some() {
                return (shown, true);
            }
        }
        shown.push_str(&filter.finish());
        (shown, false)
    }

    #[test]
    fn a_stop_string_is_never_shown() {
        assert_eq!(run(&["END"], &["text E", "N", "D more"]), ("text ".into(), true));
        assert_eq!(run(&["END"], &["text EN", "E", "ND"]), ("text EN".into(), true));
        assert_eq!(run(&["\n\n", "xy"], &["a\n", "b x", "y"]), ("a\nb ".into(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
    }

    #[test]
    fn a_stop_string_can_be_kept() {
        let mut filter = StopFilter::new(&["aé".into(), "END".into()]);
        filter.keep_stop();
        assert_eq!(filter.push("text E").text, "text ");
        let passed = filter.push("ND more");
        assert_eq!((passed.text.as_str(), passed.stopped), ("END", Some(1)));
    }

    #[test]
    fn text_that_only_looks_like_one_is_shown() {
        assert_eq!(run(&["END"], &["the E", "N"]), ("the EN".into(), false));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
        assert_eq!(run(&[""], &["a"]), ("a".into(), false));
    }

    #[test]
    fn characters_stay_whole() {
        // "é" and "è" share their first byte; the filter must not split a character.
        assert_eq!(run(&["é!"], &["è", "é", "?"]), ("èé?".into(), false));
        assert_eq!(run(&["é"], &["è"]), ("è".into(), false));
    }
}
