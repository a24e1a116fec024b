//! Parses and formats byte counts as people write them: `8GiB`, `8G` and `8g` are the same, `8GB` is decimal, and a
//! number needs a unit.

const UNITS: [(&str, u32); 6] =
    [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50)];

/// Letters of the larger units, smallest first.
const PREFIXES: &str = "kmgtp";

const HOW: &str = "write a number and a unit, as in 8GiB or 512MiB";

/// Parses a size: a number and a unit (any case). `G` and `GiB` are 2^30, `GB` is 10^9. A fraction needs a unit larger
/// than bytes, and the result is rounded down to whole bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
        return Err(format!("not a size: {HOW}"));
    }
    if unit.trim().is_empty() {
        return Err(without_unit(number));
    }
    let factor = factor_of(unit.trim())?;
    if !fraction.is_empty() && factor == 1 {
        return Err(format!("not a whole number of bytes: {HOW}"));
    }
    // Nine digits are finer than any byte count that a person means, and the product then fits in 128 bits.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10u128.pow(fraction.len() as u32);
    let too_large = || "larger than any memory: at most 16383PiB".to_string();
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().unwrap_or(0) };
    let bytes = ((whole as u128) * scale + fraction) * u128::from(factor) / scale;
    let bytes = u64::try_from(bytes).map_err(|_| too_large())?;
    if bytes == 0 {
        return Err("zero bytes: give at least 1MiB".into());
    }
    Ok(bytes)
}

/// Reads a size like [`parse`], or 0 for nothing.
pub fn parse_or_zero(text: &str) -> Result<u64, String> {
    if text.trim() == "0" { Ok(0) } else { parse(text) }
}

/// Returns the error for a number without a unit. It suggests GiB for a small number and bytes for a large one.
fn without_unit(number: &str) -> String {
    let meant = match number.parse::<f64>() {
        Ok(value) if value >= 4096.0 => format!("{number}B"),
        Ok(value) if value > 0.0 => format!("{number}GiB"),
        _ => return format!("a size without a unit: {HOW}"),
    };
    format!("a number without a unit: did you mean {meant}?")
}

/// Returns the number of bytes in a unit.
fn factor_of(unit: &str) -> Result<u64, String> {
    let lower = unit.to_ascii_lowercase();
    let unknown = || format!("unknown unit '{unit}': use KiB, MiB, GiB or TiB, or B for bytes");
    if lower == "b" {
        return Ok(1);
    }
    let mut letters = lower.chars();
    let power = letters.next().and_then(|letter| PREFIXES.find(letter)).ok_or_else(unknown)? as u32;
    match letters.as_str() {
        "" | "ib" => Ok(1 << (10 * (power + 1))),
        "b" => Ok(1000u64.pow(power + 1)),
        _ => Err(unknown()),
    }
}

/// Formats a byte count with the unit that leaves one to four digits before the point.
pub fn format(bytes: u64) -> String {
    format_rate(bytes as f64)
}

/// Formats a fractional count such as a rate in the same way as [`format()`].
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
            ("1B", 1),
            ("4096b", 4096),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("8GB", 8_000_000_000),
            ("8gb", 8_000_000_000),
            ("1.5MB", 1_500_000),
            ("3k", 3 << 10),
            ("3m", 3 << 20),
            ("2T", 2 << 40),
            ("2TB", 2_000_000_000_000),
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
            "8",
            "4096",
            "8GG",
            "8Gi",
            "8XB",
            "1.5B",
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
    fn a_bare_number_gets_a_hint() {
        for (text, meant) in [("8", "8GiB"), ("1.5", "1.5GiB"), ("700000", "700000B")] {
            assert!(
                parse(text).unwrap_err().ends_with(&format!("did you mean {meant}?")),
                "{text}"
            );
        }
        assert!(parse("0").unwrap_err().contains("without a unit"));
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
