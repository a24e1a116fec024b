//! Memory limits of control groups, versions 1 and 2.
//!
//! A container, a systemd unit or a pod is a control group. Its memory limit holds for the group and everything below
//! it, so a process is bounded by its own group and by every group above. A group is charged for the page cache of
//! the files that it reads and writes. The kernel drops clean pages before it refuses memory, so they count as free.
//!
//! Sources: `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst` of Linux.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Version of a hierarchy of groups. The versions differ in the names of their files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    One,
    Two,
}

/// A mounted hierarchy, from a line of `/proc/self/mountinfo`.
#[derive(PartialEq, Eq, Debug)]
struct Mount {
    version: Version,
    /// The group that is mounted. Containers often see only a part of the hierarchy.
    group: PathBuf,
    /// The folder where it is mounted.
    point: PathBuf,
}

/// Returns the bytes that this process can still allocate under all memory limits of its groups, or `None` if there is
/// no group with a limit. `root` is the folder that holds `proc` and `sys`: `/`, or the copy of a test.
pub(super) fn left_bytes(root: &Path) -> Option<u64> {
    let own =
        |file: &str| fs::read_to_string(root.join("proc/self").join(file)).unwrap_or_default();
    let mounts: Vec<Mount> = own("mountinfo").lines().filter_map(mount).collect();
    let groups = own("cgroup");
    let memberships = groups.lines().filter_map(membership);
    memberships
        .flat_map(|(version, group)| {
            let mounts = mounts.iter().filter(move |mount| mount.version == version);
            mounts.filter_map(move |mount| left_in_mount(root, mount, group))
        })
        .min()
}

/// Reads a line of `/proc/self/cgroup`: the version and path of a group that may limit memory.
fn membership(line: &str) -> Option<(Version, &Path)> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, group) = (fields.next()?, fields.next()?, fields.next()?);
    match controllers {
        "" => Some((Version::Two, Path::new(group))),
        list if list.split(',').any(|name| name == "memory") => {
            Some((Version::One, Path::new(group)))
        }
        _ => None,
    }
}

/// Reads a line of `/proc/self/mountinfo`, if it mounts a hierarchy that may limit memory.
fn mount(line: &str) -> Option<Mount> {
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let mut of_file_system = of_file_system.split(' ');
    let (kind, _, options) =
        (of_file_system.next()?, of_file_system.next()?, of_file_system.next()?);
    let version = match kind {
        "cgroup2" => Version::Two,
        "cgroup" if options.split(',').any(|name| name == "memory") => Version::One,
        _ => return None,
    };
    let mut of_mount = of_mount.split(' ').skip(3).map(unescaped);
    Some(Mount { version, group: of_mount.next()?, point: of_mount.next()? })
}

/// Decodes a path of `/proc/self/mountinfo`, in which white space and backslashes are octal escapes.
fn unescaped(text: &str) -> PathBuf {
    [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\\\")]
        .iter()
        .fold(text.to_owned(), |text, (escape, meant)| text.replace(escape, meant))
        .into()
}

/// Returns the bytes left in `group` and in the groups above it, as far as the mount shows them.
fn left_in_mount(root: &Path, mount: &Mount, group: &Path) -> Option<u64> {
    let is_normal = |part| matches!(part, Component::Normal(_));
    // A group outside of the mounted part shows as a path with `..` or with another beginning. A container without a
    // namespace of groups sees its own group at the mount point.
    let below = group.strip_prefix(&mount.group).unwrap_or(Path::new(""));
    let below = if below.components().all(is_normal) { below } else { Path::new("") };
    let point = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
    let mut least = None;
    for part in below.ancestors() {
        let folder = point.join(part);
        if part != below && !is_hierarchical(&folder, mount.version) {
            break;
        }
        least = [least, left_in_group(&folder, mount.version)].into_iter().flatten().min();
    }
    least
}

/// Returns true if the limit of a group holds for the groups below. Old kernels can turn this off in version 1.
fn is_hierarchical(folder: &Path, version: Version) -> bool {
    version == Version::Two
        || fs::read_to_string(folder.join("memory.use_hierarchy"))
            .map_or(true, |text| text.trim() != "0")
}

/// Returns the bytes left under the limits of one group: its limit, less what it uses, without the clean pages of files.
fn left_in_group(folder: &Path, version: Version) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let counted = |name: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse::<u64>().ok())
    };
    let sum = |names: [&str; 2]| names.iter().filter_map(|name| counted(name)).sum::<u64>();
    let (limits, used, file, unclean) = match version {
        Version::Two => (
            // Above `memory.high` the kernel slows a group down until it hardly runs.
            [number("memory.max"), number("memory.high")],
            number("memory.current"),
            sum(["active_file", "inactive_file"]),
            sum(["file_dirty", "file_writeback"]),
        ),
        Version::One => (
            // The second one also covers groups above that the mount does not show.
            [number("memory.limit_in_bytes"), counted("hierarchical_memory_limit")],
            number("memory.usage_in_bytes"),
            sum(["total_active_file", "total_inactive_file"]),
            sum(["total_dirty", "total_writeback"]),
        ),
    };
    let limit = limits.into_iter().flatten().min()?;
    let held = used.unwrap_or(0).saturating_sub(file.saturating_sub(unclean));
    Some(limit.saturating_sub(held))
}

#[cfg(test)]
mod tests;
