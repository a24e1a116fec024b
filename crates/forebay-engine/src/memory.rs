//! Memory that this process may use, and memory that it has used.

mod control_groups;

use std::fs;
use std::path::Path;

use forebay_format::{at_least, at_most};
use forebay_options::OptionName;

/// Fraction of the free memory that is used when no budget is given. The rest is for the page cache, the key/value
/// cache and other processes.
const SHARE_OF_FREE: f64 = 0.75;

/// Memory that a session needs beside weights, keys and values: activations, and buffers of threads and reads.
const BESIDE_BYTES: u64 = 64 << 20;

/// RAM is too small for all weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "all weights need {} of memory, but {} are free: end other programs, or run the model with a budget ({ram}), which \
     streams the rest",
    at_least(*needed_bytes),
    at_most(*free_bytes),
    ram = OptionName::Ram
)]
pub struct DoesNotFit {
    pub needed_bytes: u64,
    pub free_bytes: u64,
}

/// Returns the default budget in bytes: three quarters of [`free_bytes`].
pub fn default_budget_bytes() -> u64 {
    budget_beside(free_bytes(), 0)
}

/// Returns the default budget in bytes if `free_bytes` are free and `other_bytes` of them are for something else.
pub(crate) fn budget_beside(free_bytes: u64, other_bytes: u64) -> u64 {
    let share = share_of(free_bytes.saturating_sub(other_bytes));
    share.min(for_model_bytes(free_bytes).saturating_sub(other_bytes))
}

/// Returns the default budget for weights out of so many bytes.
pub(crate) fn share_of(free_bytes: u64) -> u64 {
    (free_bytes as f64 * SHARE_OF_FREE) as u64
}

/// Returns the bytes that this process can allocate: within the machine's memory, and within the limits of its control
/// group and of all groups above it. This includes page cache that the kernel can drop.
pub fn free_bytes() -> u64 {
    available_bytes().min(control_groups::left_bytes(Path::new("/")).unwrap_or(u64::MAX))
}

/// Returns how many of the free bytes weights, keys and values may take together. The kernel would kill a process that takes
/// all, as soon as it touches more.
pub(crate) fn for_model_bytes(free_bytes: u64) -> u64 {
    free_bytes.saturating_sub(BESIDE_BYTES)
}

/// Returns `MemAvailable` of /proc/meminfo, or `u64::MAX` if it cannot be read.
fn available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    kib_field(&meminfo, "MemAvailable:").unwrap_or(u64::MAX)
}

/// Returns the largest resident set of this process so far (`VmHWM`), if the system reports it.
pub fn peak_resident_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line[name.len()..].trim().trim_end_matches(" kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_bytes() {
        assert_eq!(kib_field("A: 1 kB\nVmHWM:\t  2048 kB\n", "VmHWM:"), Some(2048 * 1024));
        assert_eq!(kib_field("A: 1 kB\n", "VmHWM:"), None);
    }

    #[test]
    fn a_default_budget_leaves_room_for_what_stands_beside_it() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..10_000 {
            let bits = random.u32(20..40);
            let free_bytes = random.u64(..1 << bits);
            let other_bytes = random.u64(..=free_bytes);
            let budget = budget_beside(free_bytes, other_bytes);
            let left = for_model_bytes(free_bytes).saturating_sub(other_bytes);
            assert!(budget <= left, "{free_bytes} {other_bytes}");
            assert!(budget <= share_of(free_bytes), "{free_bytes} {other_bytes}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(default_budget_bytes() > 1 << 20);
        assert!(peak_resident_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }
}
