//! Measures how much of an address range lies in huge pages.

use std::ops::Range;

/// Returns the number of bytes of anonymous memory within `addresses` that lie in huge pages, as reported by the kernel
/// for this process. Returns `None` if the kernel does not report it. The time is proportional to the memory of the
/// process: microseconds per GiB in huge pages, and some milliseconds per GiB in small pages.
pub(crate) fn huge_page_bytes(addresses: &Range<usize>) -> Option<u64> {
    bytes_in(&std::fs::read_to_string("/proc/self/smaps").ok()?, addresses)
}

/// Computes [`huge_page_bytes`] from the text of `smaps`. For a mapping that extends beyond the range, counts at most
/// the bytes that lie inside.
fn bytes_in(smaps: &str, addresses: &Range<usize>) -> Option<u64> {
    let (mut inside, mut found, mut bytes) = (0, false, 0);
    for line in smaps.lines() {
        if let Some(mapping) = mapping_of(line) {
            let (start, end) = (mapping.start.max(addresses.start), mapping.end.min(addresses.end));
            inside = end.saturating_sub(start) as u64;
            found |= inside > 0;
        } else if let Some(size) = line.strip_prefix("AnonHugePages:") {
            let kib: u64 = size.trim().strip_suffix("kB")?.trim().parse().ok()?;
            bytes += (kib << 10).min(inside);
        }
    }
    found.then_some(bytes)
}

/// Parses the addresses at the start of a mapping's first line.
fn mapping_of(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      4096 kB
VmFlags: rd wr mr mw me ac sd hg
7f0000400000-7f0000a00000 rw-p 00000000 00:00 0 [anon: name-with-dash]
AnonHugePages:      2048 kB
7fff00000000-7fff00021000 rw-p 00000000 00:00 0                          [stack]
AnonHugePages:         0 kB
";

    #[test]
    fn mappings_count_as_far_as_they_lie_in_the_range() {
        let at = |start: usize, end: usize| {
            bytes_in(SMAPS, &(0x7f00_0000_0000 + start..0x7f00_0000_0000 + end))
        };
        assert_eq!(at(0, 4 << 20), Some(4 << 20));
        assert_eq!(at(0, 10 << 20), Some(6 << 20));
        assert_eq!(at(2 << 20, 9 << 20), Some(4 << 20));
        assert_eq!(at(1 << 30, 2 << 30), None, "nothing is mapped there");
        assert_eq!(bytes_in("7f-80 rw-p\nAnonHugePages: many kB\n", &(0x7f..0x80)), None);
    }

    #[test]
    fn the_kernel_gives_an_account_of_this_process() {
        let arena = crate::Arena::reserve(8 << 20).unwrap();
        let bytes = arena.huge_page_bytes().expect("a mapping of ours is in smaps");
        assert!(bytes <= arena.bytes() as u64);
    }
}
