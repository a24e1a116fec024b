//! Byte counts as people write them: `8GiB`, `512MiB`, `1.5GiB`, `4096`.

const UNITS: [(&str, u32); 6] =
    [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50)];

/// Parses a size: a number and a binary unit (any case), or plain bytes. A fraction needs a unit
/// larger than bytes; what is left of a byte is dropped.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
        return Err("not a size: write a number and a unit, as in 8GiB or 512MiB".into());
    }
    let shift = shift_of(unit.trim())?;
    if !fraction.is_empty() && shift == 0 {
        return Err("half a byte is no size: write a unit, as in 1.5GiB".into());
    }
    // Nine digits are finer than any byte count that a person means, and keep this in 128 bits.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10u128.pow(fraction.len() as u32);
    let too_large = || "larger than any memory: at most 16383PiB".to_string();
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().unwrap_or(0) };
    let bytes = (((whole as u128) * scale + fraction) << shift) / scale;
    let bytes = u64::try_from(bytes).map_err(|_| too_large())?;
    if bytes == 0 {
        return Err("a size of zero holds nothing: write at least 1MiB".into());
    }
    Ok(bytes)
}

fn shift_of(unit: &str) -> Result<u32, String> {
    if unit.is_empty() {
        return Ok(0);
    }
    UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit))
        .map(|&(_, shift)| shift)
        .ok_or_else(|| format!("unknown unit '{unit}': use KiB, MiB, GiB or TiB, or plain bytes"))
}

/// Writes a byte count with the unit that leaves one to four digits before the point.
pub fn format(bytes: u64) -> String {
    format_rate(bytes as f64)
}

/// As [`format`], for a fractional count such as a rate.
pub fn format_rate(bytes: f64) -> String {
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let name = UNITS[unit].0;
    match unit {
        0 => format!("{value:.0} {name}"),
        _ if value >= 100.0 => format!("{value:.0} {name}"),
        _ if value >= 10.0 => format!("{value:.1} {name}"),
        _ => format!("{value:.2} {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_people_write() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("4096B", 4096),
            ("512MiB", 512 << 20),
            ("8GiB", 8 << 30),
            ("8 gib", 8 << 30),
            ("1.5GiB", 3 << 29),
            ("0.25KiB", 256),
            ("16383PiB", 16383 << 50),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for text in [
            "",
            "GiB",
            "8GB",
            "8G",
            "8g",
            "-1",
            "1.5",
            "1.",
            ".5GiB",
            "1.2.3GiB",
            "1e9",
            "0",
            "0MiB",
            "16384PiB",
            "99999999999999999999",
            "8 GiB x",
            "0x10",
            "∞",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_are_short() {
        assert_eq!(format(0), "0 B");
        assert_eq!(format(1023), "1023 B");
        assert_eq!(format(1536), "1.50 KiB");
        assert_eq!(format(20 << 20), "20.0 MiB");
        assert_eq!(format(u64::MAX), "16384 PiB");
    }
}
