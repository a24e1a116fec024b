//! Bounds of the patterns in a `tokenizer.json`.
//!
//! The library searches with backtracking if a pattern looks ahead or behind, or refers to a group. Repetitions in repetitions
//! then take exponential time. Other patterns take linear time, but counted repetitions may make them large.

/// Most bytes of one pattern. Published ones have 700.
const BYTES_MAX: usize = 8 << 10;
/// Most bytes of all patterns, times the counts of their repetitions.
const WEIGHT_MAX: u64 = 64 << 10;
/// Most nested repetitions with counts, multiplied.
const COUNTS_MAX: u64 = 1000;
/// Deepest nesting of groups.
const DEPTH_MAX: usize = 64;
/// Most unbounded repetitions that follow each other in a pattern that is searched with backtracking.
const REPETITIONS_MAX: usize = 4;

/// The patterns of a file.
#[derive(Default)]
pub struct Patterns {
    weight: u64,
}

impl Patterns {
    /// Counts a pattern.
    ///
    /// # Errors
    /// Returns an error if the pattern, or all patterns together, would take too much time or memory.
    pub fn add(&mut self, pattern: &str) -> Result<(), String> {
        let short: String = pattern.chars().take(60).collect();
        let refused = |why: &str| Err(format!("its pattern {short:?} {why}"));
        if pattern.len() > BYTES_MAX {
            return refused("is too long");
        }
        let mut scan = Scan::default();
        if scan.run(pattern).is_none() {
            return refused("is nested too deeply");
        }
        if scan.counts > COUNTS_MAX {
            return refused("repeats a part too often");
        }
        self.weight += pattern.len() as u64 * scan.counts;
        if self.weight > WEIGHT_MAX {
            return refused("and the others together are too large");
        }
        if scan.backtracks && (scan.nests || scan.repetitions > REPETITIONS_MAX) {
            return refused("may take exponential time");
        }
        Ok(())
    }
}

/// What is found in a pattern.
#[derive(Default)]
struct Scan {
    /// True if the pattern is searched with backtracking.
    backtracks: bool,
    /// True if a part that is repeated without bound can match in several ways.
    nests: bool,
    /// Largest product of counts of nested repetitions.
    counts: u64,
    /// Most unbounded repetitions in one alternative.
    repetitions: usize,
}

/// What is found in a group so far.
#[derive(Clone, Copy, Default)]
struct Group {
    /// True if the group can match in several ways: it has alternatives or repetitions of variable length.
    varies: bool,
    counts: u64,
    /// Unbounded repetitions of this alternative.
    repetitions: usize,
}

/// How often something is repeated.
struct Times {
    varies: bool,
    unbounded: bool,
    count: u64,
    length: usize,
}

impl Scan {
    /// Reads a pattern. Returns `None` if it is nested too deeply. What is wrong with it otherwise is the library's matter.
    fn run(&mut self, pattern: &str) -> Option<()> {
        let all: Vec<char> = pattern.chars().collect();
        let mut open = vec![Group { counts: 1, ..Group::default() }];
        let mut at = 0;
        while let Some(character) = all.get(at) {
            let mut item = Group { counts: 1, ..Group::default() };
            match character {
                '\\' => {
                    let next = all.get(at + 1).copied().unwrap_or_default();
                    self.backtracks |= next.is_ascii_digit() || "kKGZ".contains(next);
                    at += escape_length(&all[at..]);
                }
                '[' => at += class_length(&all[at..]),
                '(' => {
                    let rest: String = all[at + 1..].iter().take(3).collect();
                    self.backtracks |= ["?=", "?!", "?<=", "?<!", "?>", "?("]
                        .iter()
                        .any(|look| rest.starts_with(look));
                    open.push(item);
                    if open.len() > DEPTH_MAX {
                        return None;
                    }
                    at += 1;
                    // The marks of a group are no repetitions.
                    at += usize::from(rest.starts_with('?'));
                    continue;
                }
                ')' => {
                    at += 1;
                    let closed = open.pop().filter(|_| !open.is_empty());
                    let Some(closed) = closed else { break };
                    item = closed;
                }
                '|' => {
                    at += 1;
                    if let Some(group) = open.last_mut() {
                        group.varies = true;
                        self.repetitions = self.repetitions.max(group.repetitions);
                        group.repetitions = 0;
                    }
                    continue;
                }
                _ => at += 1,
            }
            while let Some(times) = repetition(&all[at.min(all.len())..]) {
                at += times.length;
                self.nests |= times.unbounded && item.varies;
                // A possessive repetition.
                self.backtracks |= times.length > 1 && all.get(at - 1) == Some(&'+');
                item.varies |= times.varies;
                item.counts = item.counts.saturating_mul(times.count.max(1));
                item.repetitions += usize::from(times.unbounded);
            }
            let Some(group) = open.last_mut() else { break };
            group.varies |= item.varies;
            group.counts = group.counts.max(item.counts);
            group.repetitions += item.repetitions;
        }
        for group in open {
            self.counts = self.counts.max(group.counts);
            self.repetitions = self.repetitions.max(group.repetitions);
        }
        Some(())
    }
}

/// Returns the length of an escape, such as `\n` or `\p{L}`.
fn escape_length(rest: &[char]) -> usize {
    let takes_braces = rest.get(1).is_some_and(|kind| "pPxuUk".contains(*kind));
    match rest.iter().position(|character| *character == '}') {
        Some(end) if takes_braces && rest.get(2) == Some(&'{') => end + 1,
        _ => 2,
    }
}

/// Returns the length of a class of characters, which may hold other classes.
fn class_length(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(character) = rest.get(at) {
        match character {
            '\\' => at += escape_length(&rest[at..]) - 1,
            '[' => {
                depth += 1;
                // A bracket behind the beginning is a character.
                let first = at + 1 + usize::from(rest.get(at + 1) == Some(&'^'));
                if rest.get(first) == Some(&']') {
                    at = first;
                }
            }
            ']' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// Reads a repetition, such as `*`, `+?` or `{2,3}`.
fn repetition(rest: &[char]) -> Option<Times> {
    let mut times = match rest.first()? {
        '*' | '+' => Times { varies: true, unbounded: true, count: 1, length: 1 },
        '?' => Times { varies: true, unbounded: false, count: 1, length: 1 },
        '{' => {
            let end = rest.iter().position(|character| *character == '}')?;
            let inside: String = rest[1..end].iter().collect();
            let (least, most) =
                inside.split_once(',').unwrap_or((inside.as_str(), inside.as_str()));
            let number = |text: &str| text.trim().parse::<u64>().ok();
            let (least, largest) = (number(least), number(most));
            if least.is_none() && largest.is_none() {
                return None;
            }
            Times {
                varies: largest != least,
                unbounded: largest.is_none(),
                count: largest.max(least).unwrap_or(1),
                length: end + 1,
            }
        }
        _ => return None,
    };
    times.length += usize::from(matches!(rest.get(times.length), Some('?' | '+')));
    Some(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_patterns_are_within_the_bounds() {
        let published = [
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?|\s+(?!\S)|\s+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
            r"[0-9][0-9][0-9]",
            r" ?[^(\s|[.,!?…。，、।۔،])]+",
            r" {2,}",
            r"[一-龥぀-ゟ゠-ヿ]+",
        ];
        let mut patterns = Patterns::default();
        for pattern in published {
            patterns.add(pattern).unwrap();
        }
    }

    #[test]
    fn exponential_and_large_patterns_are_refused() {
        for pattern in [
            r"(a+)+(?=b)",
            r"(?:a|aa)+(?!c)",
            r"(?=b)(a*)*",
            r"((a?){2,5}b?)*(?<=x)",
            r"(a*)\1(?:x*)*",
            r"(?:[^\]]+x?)++y",
            r"(?:(?:a{1,100}){1,100}){1,100}",
            r"a{100000}",
            r"a*a*a*a*a*a*(?=b)",
        ] {
            assert!(Patterns::default().add(pattern).is_err(), "{pattern}");
        }
        assert!(Patterns::default().add(&"(".repeat(100)).is_err());
        assert!(Patterns::default().add(&"a".repeat(9000)).is_err());
        let mut many = Patterns::default();
        assert!((0..100).any(|_| many.add(&"\\p{L}{100}".repeat(10)).is_err()));
        // These are searched in linear time.
        for pattern in
            [r"(a+)+b", r"(?:a|aa)+c", r"(?P<x>a+)?", r"(", r"[", r"\", r"a{", r")a", r"{"]
        {
            Patterns::default().add(pattern).unwrap();
        }
    }
}
