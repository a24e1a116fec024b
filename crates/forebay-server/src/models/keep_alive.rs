//! How long a model stays in memory after its last request.

use std::str::FromStr;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time for which an idle model stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    /// The model leaves when nobody has used it for so long.
    For(Duration),
    /// The model leaves only when another one needs its room.
    Forever,
}

/// What to write instead of a time that cannot be read.
const EXPECTED: &str = "must be seconds or a time such as 30s, 5m or 1h30m; 0 unloads the model after its answer, and a negative \
    number keeps it";

impl KeepAlive {
    /// Five minutes, as in Ollama.
    pub const USUAL: KeepAlive = KeepAlive::For(Duration::from_secs(300));

    /// Reads the field of a request: a number of seconds, or a text. `null` is none.
    ///
    /// # Errors
    /// Returns what is expected instead.
    pub fn of_json(value: &Value) -> Result<Option<KeepAlive>, String> {
        match value {
            Value::Null => Ok(None),
            Value::Number(seconds) => {
                KeepAlive::of_seconds(seconds.as_f64().unwrap_or(f64::NAN)).map(Some)
            }
            Value::String(text) => text.parse().map(Some),
            _ => Err(EXPECTED.to_owned()),
        }
    }

    fn of_seconds(seconds: f64) -> Result<KeepAlive, String> {
        if seconds < 0.0 {
            return Ok(KeepAlive::Forever);
        }
        // A time that is too long for the clock is for ever.
        match seconds.is_nan() {
            true => Err(EXPECTED.to_owned()),
            false => Ok(Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|time| Instant::now().checked_add(*time).is_some())
                .map_or(KeepAlive::Forever, KeepAlive::For)),
        }
    }

    /// Returns when a model that is idle since `idle_since` leaves. `None` is never.
    pub fn ends(self, idle_since: Instant) -> Option<Instant> {
        match self {
            KeepAlive::For(time) => idle_since.checked_add(time),
            KeepAlive::Forever => None,
        }
    }
}

impl FromStr for KeepAlive {
    type Err = String;

    /// Reads a number of seconds, or a sum of numbers with units as in `1h30m`.
    fn from_str(text: &str) -> Result<KeepAlive, String> {
        let text = text.trim();
        if let Ok(seconds) = text.parse() {
            return KeepAlive::of_seconds(seconds);
        }
        let (is_negative, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let mut seconds = 0.0;
        if rest.is_empty() {
            return Err(EXPECTED.to_owned());
        }
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
            let (number, after) = rest.split_at(digits.ok_or(EXPECTED)?);
            let letters = after.find(|c: char| c.is_ascii_digit() || c == '.');
            let (unit, after) = after.split_at(letters.unwrap_or(after.len()));
            let number: f64 = number.parse().map_err(|_| EXPECTED)?;
            seconds += number
                * match unit {
                    "ns" => 1e-9,
                    "us" | "µs" => 1e-6,
                    "ms" => 1e-3,
                    "s" => 1.0,
                    "m" => 60.0,
                    "h" => 3600.0,
                    _ => return Err(EXPECTED.to_owned()),
                };
            rest = after;
        }
        KeepAlive::of_seconds(if is_negative { -seconds } else { seconds })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_that_clients_send() {
        let of = |value: Value| KeepAlive::of_json(&value);
        let seconds = |seconds| Ok(Some(KeepAlive::For(Duration::from_secs_f64(seconds))));
        assert_eq!(of(json!(null)), Ok(None));
        assert_eq!(of(json!(300)), seconds(300.0));
        assert_eq!(of(json!(1.5)), seconds(1.5));
        assert_eq!(of(json!(0)), seconds(0.0));
        for (text, expected) in [
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("300ms", 0.3),
            ("0", 0.0),
            ("10", 10.0),
            ("1.5s", 1.5),
        ] {
            assert_eq!(of(json!(text)), seconds(expected), "{text}");
        }
        for forever in [json!(-1), json!("-1"), json!("-1m"), json!(1e300), json!("1e300")] {
            assert_eq!(of(forever.clone()), Ok(Some(KeepAlive::Forever)), "{forever}");
        }
        for wrong in [
            json!(""),
            json!("-"),
            json!("5 minutes"),
            json!("m"),
            json!([]),
            json!(true),
            json!("nan"),
        ] {
            assert!(of(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
