//! Sizes and the system's errors in plain words.

/// System errors that have plainer words, by their number.
const PLAIN: [(&str, &str); 12] = [
    ("2", "no such file or folder: check the path"),
    ("5", "the disk or its file system failed (input/output error): see the system's log (dmesg)"),
    ("12", "not enough memory"),
    ("13", "permission denied"),
    ("20", "a file is where a folder is needed"),
    ("21", "is a folder, and a file is needed"),
    ("24", "too many open files: raise the limit (ulimit -n)"),
    ("27", "the file would be larger than this shell (ulimit -f) or file system allows"),
    ("28", "the disk is full"),
    ("98", "the address is already in use"),
    ("111", "connection refused: is the program running there?"),
    ("122", "the disk quota is used up"),
];

/// Replaces the system's error messages in a text by plain words, without their numbers.
///
/// Rust writes such an error as `No such file or directory (os error 2)`. The words in front of the number begin after
/// the last colon, or at the beginning of the text.
pub fn in_words(text: &str) -> String {
    const MARK: &str = " (os error ";
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(MARK) {
        let (before, after) = (&rest[..at], &rest[at + MARK.len()..]);
        let Some(end) = after.find(')') else { break };
        let plain = PLAIN.iter().find(|(number, _)| *number == &after[..end]);
        match plain {
            Some((_, plain)) => {
                let begin = before.rfind([':', '(', '\n', ';', ',']).map_or(0, |at| at + 1);
                let space = before[begin..].len() - before[begin..].trim_start().len();
                shown.push_str(&before[..begin + space]);
                shown.push_str(plain);
            }
            None => shown.push_str(before),
        }
        rest = &after[end + 1..];
    }
    shown + rest
}

/// Writes a size as people read it, such as `1.50 GiB`, rounded up: as much is enough.
pub fn at_least(bytes: u64) -> String {
    size(bytes, u128::div_ceil)
}

/// Writes a size as people read it, such as `1.50 GiB`, rounded down: as much is there.
pub fn at_most(bytes: u64) -> String {
    size(bytes, |bytes, unit| bytes / unit)
}

fn size(bytes: u64, rounded: impl Fn(u128, u128) -> u128) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, bits)| bytes >= 1 << bits) {
        Some((name, bits)) => {
            let hundredths = rounded(u128::from(bytes) * 100, 1 << bits);
            format!("{}.{:02} {name}", hundredths / 100, hundredths % 100)
        }
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn sizes_are_rounded_to_the_safe_side() {
        assert_eq!((at_least(1023), at_most(1023)), ("1023 bytes".into(), "1023 bytes".into()));
        assert_eq!((at_least(3 << 20), at_most(3 << 20)), ("3.00 MiB".into(), "3.00 MiB".into()));
        assert_eq!(at_least((3 << 30) + 1), "3.01 GiB");
        assert_eq!(at_most((3 << 30) - 1), "2.99 GiB");
        assert_eq!(at_least(u64::MAX), "16777216.00 TiB");
    }

    #[test]
    fn no_error_of_the_system_keeps_its_number() {
        for number in 1..134 {
            let error = io::Error::from_raw_os_error(number);
            for text in
                [format!("{error}"), format!("a/b: {error}"), format!("x: {error}; y: {error}.")]
            {
                let shown = in_words(&text);
                assert!(!shown.contains("os error"), "{shown}");
                assert!(!shown.contains("  ") && !shown.ends_with(' '), "{shown:?}");
            }
        }
        let of = |number| io::Error::from_raw_os_error(number);
        assert_eq!(in_words(&format!("a: {}", of(2))), "a: no such file or folder: check the path");
        assert_eq!(in_words(&of(28).to_string()), "the disk is full");
        assert_eq!(in_words(&format!("a ({}), b", of(13))), "a (permission denied), b");
        assert_eq!(in_words("cut (os error "), "cut (os error ");
        assert_eq!(in_words(""), "");
    }
}
