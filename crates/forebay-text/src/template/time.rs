//! Dates for `strftime_now`.

use jiff::civil::DateTime;
use jiff::fmt::strtime;
use jiff::{Timestamp, tz};
use minijinja::{Error, ErrorKind};

/// A date and time of the Gregorian calendar, without a time zone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CivilTime(DateTime);

impl CivilTime {
    /// Returns the time of the system's clock in UTC.
    pub fn now() -> Self {
        Self::at(Timestamp::now())
    }

    fn at(moment: Timestamp) -> Self {
        Self(tz::Offset::UTC.to_datetime(moment))
    }

    /// Parses `YYYY-MM-DDTHH:MM:SS`. A space may replace the `T`.
    pub fn parse(text: &str) -> Option<Self> {
        let formats = ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"];
        formats.iter().find_map(|format| DateTime::strptime(format, text).ok()).map(Self)
    }

    /// Formats as Python's `strftime` does in the C locale. `%-d` drops leading zeros.
    ///
    /// # Errors
    /// Returns an error if a directive is not known.
    pub fn format(&self, format: &str) -> Result<String, Error> {
        strtime::format(as_in_python(format), self.0).map_err(|_| {
            let message = format!("strftime_now does not know a directive of {format:?}");
            Error::new(ErrorKind::InvalidOperation, message)
        })
    }
}

/// Translates the directives that Python formats differently, in the C locale and without a time
/// zone.
fn as_in_python(format: &str) -> String {
    let mut out = String::with_capacity(format.len() + 16);
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        let directive = if character == '%' { characters.next() } else { None };
        match (character, directive) {
            ('%', Some('c')) => out.push_str("%a %b %e %H:%M:%S %Y"),
            ('%', Some('x')) => out.push_str("%m/%d/%y"),
            ('%', Some('X')) => out.push_str("%H:%M:%S"),
            ('%', Some('r')) => out.push_str("%I:%M:%S %p"),
            ('%', Some('f')) => out.push_str("000000"),
            ('%', Some('Z' | 'z')) => {}
            (character, directive) => {
                out.push(character);
                out.extend(directive);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let cases = [
            (0, "1970-01-01 00:00:00 Thu 001"),
            (951_782_400, "2000-02-29 00:00:00 Tue 060"),
            (951_868_799, "2000-02-29 23:59:59 Tue 060"),
            (1_753_533_296, "2025-07-26 12:34:56 Sat 207"),
            (1_735_689_599, "2024-12-31 23:59:59 Tue 366"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon 060"),
        ];
        for (seconds, expected) in cases {
            let time = CivilTime::at(Timestamp::from_second(seconds).unwrap());
            assert_eq!(time.format("%F %T %a %j").unwrap(), expected);
        }
    }

    #[test]
    fn directives() {
        let time = CivilTime::parse("2025-07-06T00:04:05").unwrap();
        let text = time.format("%d %B %Y|%-d %b %y|%e|%I %-I %p|%A %w %u|%%|%-M").unwrap();
        assert_eq!(text, "06 July 2025|6 Jul 25| 6|12 12 AM|Sunday 0 7|%|4");
        let composed = time.format("%F %R|%T|%X|%D|%x|%c|%r|%f|%Z%z|%h%n%t").unwrap();
        let expected = "2025-07-06 00:04|00:04:05|00:04:05|07/06/25|07/06/25|Sun Jul  6 00:04:05 2025\
                        |12:04:05 AM|000000||Jul\n\t";
        assert_eq!(composed, expected);
        let unknown = ["%!", "%Ä"];
        assert!(unknown.iter().all(|format| time.format(format).is_err()));
        assert!(time.format("%").is_err());
        assert_eq!(CivilTime::parse("2025-13-06T00:04:05"), None);
        assert_eq!(CivilTime::parse("2025-07-06"), None);
    }
}
