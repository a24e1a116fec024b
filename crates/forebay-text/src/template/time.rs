//! Dates for `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

/// A date and time of the Gregorian calendar, without a time zone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CivilTime {
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

const DAY_NAMES: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTH_NAMES: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl CivilTime {
    /// The system's clock, in UTC.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from_unix_seconds(since.as_secs())
    }

    /// The UTC time so many seconds after the beginning of 1970.
    pub fn from_unix_seconds(seconds: u64) -> Self {
        // Years that begin in March put the leap day at their end: the day of the year then gives
        // the month by a line (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms").
        const DAYS_PER_ERA: u64 = 146_097;
        const DAYS_TO_1970: u64 = 719_468;
        let days = seconds / 86_400 + DAYS_TO_1970;
        let (era, day_of_era) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let second_of_day = (seconds % 86_400) as u32;
        Self {
            year: i32::try_from(year).unwrap_or(i32::MAX),
            month: month as u32,
            day: (day_of_year - (153 * march_month + 2) / 5 + 1) as u32,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    /// Reads `YYYY-MM-DDTHH:MM:SS`.
    pub fn parse(text: &str) -> Option<Self> {
        let (date, time) = text.split_once(['T', ' '])?;
        let mut date = date.split('-').map(|part| part.parse::<u32>().ok());
        let mut time = time.split(':').map(|part| part.parse::<u32>().ok());
        let year = i32::try_from(date.next()??).ok()?;
        let (month, day) = (date.next()??, date.next()??);
        let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
        let is_valid = date.next().is_none()
            && time.next().is_none()
            && (1..=9999).contains(&year)
            && (1..=12).contains(&month)
            && (1..=31).contains(&day)
            && hour < 24
            && minute < 60
            && second < 60;
        is_valid.then_some(Self { year, month, day, hour, minute, second })
    }

    /// Days since January 1st.
    fn day_of_year(&self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let is_leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = BEFORE.get(self.month as usize - 1).copied().unwrap_or(0);
        before + self.day - 1 + u32::from(is_leap && self.month > 2)
    }

    /// 0 for Sunday (T. Sakamoto's method).
    fn weekday(&self) -> usize {
        const SHIFT: [i64; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = i64::from(self.year) - i64::from(self.month < 3);
        let shift = SHIFT.get(self.month as usize - 1).copied().unwrap_or(0);
        let days = year + year / 4 - year / 100 + year / 400 + shift + i64::from(self.day);
        days.rem_euclid(7) as usize
    }

    /// Formats as Python's `strftime` does in the C locale; `%-d` drops leading zeros.
    ///
    /// # Errors
    /// A directive that is not known.
    pub fn format(&self, format: &str) -> Result<String, Error> {
        let mut out = String::with_capacity(format.len() + 16);
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let mut directive = characters.next();
            let without_zeros = directive == Some('-');
            if without_zeros {
                directive = characters.next();
            }
            let text = directive.and_then(|directive| self.directive(directive));
            let text = text.ok_or_else(|| {
                let message = format!("strftime_now does not know a directive of {format:?}");
                Error::new(ErrorKind::InvalidOperation, message)
            })?;
            let trimmed = text.trim_start_matches(['0', ' ']);
            match (without_zeros, trimmed) {
                (false, _) => out.push_str(&text),
                (true, "") => out.push('0'),
                (true, _) => out.push_str(trimmed),
            }
        }
        Ok(out)
    }

    fn directive(&self, directive: char) -> Option<String> {
        let month_name = MONTH_NAMES.get(self.month as usize - 1)?;
        let day_name = DAY_NAMES[self.weekday()];
        let hour_of_12 = (self.hour + 11) % 12 + 1;
        let composed = match directive {
            'F' => "%Y-%m-%d",
            'T' | 'X' => "%H:%M:%S",
            'R' => "%H:%M",
            'D' | 'x' => "%m/%d/%y",
            'c' => "%a %b %e %H:%M:%S %Y",
            'r' => "%I:%M:%S %p",
            _ => "",
        };
        if !composed.is_empty() {
            return self.format(composed).ok();
        }
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour_of_12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'f' => "000000".to_owned(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => (*month_name).to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'j' => format!("{:03}", self.day_of_year() + 1),
            'w' => self.weekday().to_string(),
            'u' => ((self.weekday() + 6) % 7 + 1).to_string(),
            // Without a time zone Python writes nothing here.
            'Z' | 'z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
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
            let time = CivilTime::from_unix_seconds(seconds);
            assert_eq!(time.format("%F %T %a %j").unwrap(), expected);
        }
    }

    #[test]
    fn directives() {
        let time = CivilTime::parse("2025-07-06T00:04:05").unwrap();
        let text = time.format("%d %B %Y|%-d %b %y|%e|%I %-I %p|%A %w %u|%%|%-M").unwrap();
        assert_eq!(text, "06 July 2025|6 Jul 25| 6|12 12 AM|Sunday 0 7|%|4");
        assert!(time.format("%Q").is_err());
        assert!(time.format("%").is_err());
        assert_eq!(CivilTime::parse("2025-13-06T00:04:05"), None);
        assert_eq!(CivilTime::parse("2025-07-06"), None);
    }
}
