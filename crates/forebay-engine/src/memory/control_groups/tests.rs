//! Tests against trees of files like those of the kernel.

use super::*;

const MIB: u64 = 1 << 20;
/// What version 1 reports as the limit of a group without one.
const NO_LIMIT: u64 = 0x7fff_ffff_ffff_f000;

/// A copy of `proc` and `sys` in a temporary folder.
struct Tree {
    root: tempfile::TempDir,
    mountinfo: String,
    cgroup: String,
}

impl Tree {
    fn new() -> Tree {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let mountinfo =
            "31 23 0:28 / /sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw,mode=755\n".into();
        Tree { root, mountinfo, cgroup: "1:name=systemd:/init.scope\n".into() }
    }

    /// Mounts `group` of a hierarchy at `point`.
    fn mount(&mut self, version: Version, group: &str, point: &str) {
        let file_system = match version {
            Version::One => "cgroup cgroup rw,memory",
            Version::Two => "cgroup2 cgroup2 rw,nsdelegate",
        };
        self.mountinfo += &format!("35 31 0:32 {group} {point} rw,nosuid - {file_system}\n");
    }

    /// Puts the process into a group.
    fn join(&mut self, version: Version, group: &str) {
        self.cgroup += &match version {
            Version::One => format!("4:cpu,memory:{group}\n"),
            Version::Two => format!("0::{group}\n"),
        };
    }

    fn write(&self, folder: &str, name: &str, text: impl ToString) {
        let folder = self.root.path().join(folder.trim_start_matches('/'));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), text.to_string()).unwrap();
    }

    fn left(&self) -> Option<u64> {
        self.write("proc/self", "mountinfo", &self.mountinfo);
        self.write("proc/self", "cgroup", &self.cgroup);
        left_bytes(self.root.path())
    }
}

/// Figures of a group, in bytes.
#[derive(Clone, Copy, Default)]
struct Group {
    limit: Option<u64>,
    high: Option<u64>,
    used: u64,
    inactive_file: u64,
    active_file: u64,
    dirty: u64,
    writeback: u64,
}

impl Group {
    fn write(&self, tree: &Tree, version: Version, folder: &str) {
        let Group { used, inactive_file, active_file, dirty, writeback, .. } = *self;
        let line = |text: Option<u64>| text.map_or("max\n".into(), |bytes| format!("{bytes}\n"));
        match version {
            Version::Two => {
                tree.write(folder, "memory.max", line(self.limit));
                tree.write(folder, "memory.high", line(self.high));
                tree.write(folder, "memory.current", used);
                let stat = format!(
                    "anon 4096\nfile 1\nfile_dirty {dirty}\nfile_writeback {writeback}\n\
                     inactive_anon 4096\ninactive_file {inactive_file}\nactive_file {active_file}\n"
                );
                tree.write(folder, "memory.stat", stat);
            }
            Version::One => {
                tree.write(folder, "memory.limit_in_bytes", self.limit.unwrap_or(NO_LIMIT));
                tree.write(folder, "memory.usage_in_bytes", used);
                // The figures without `total_` leave out the groups below.
                let stat = format!(
                    "inactive_file 1\nactive_file 1\ndirty 1\nhierarchical_memory_limit {NO_LIMIT}\n\
                     total_dirty {dirty}\ntotal_writeback {writeback}\n\
                     total_inactive_file {inactive_file}\ntotal_active_file {active_file}\n"
                );
                tree.write(folder, "memory.stat", stat);
            }
        }
    }
}

#[test]
fn clean_page_cache_is_free_and_dirty_pages_are_not() {
    for version in [Version::One, Version::Two] {
        let mut tree = Tree::new();
        tree.mount(version, "/", "/sys/fs/cgroup/m");
        tree.join(version, "/box");
        let full = Group {
            limit: Some(1024 * MIB),
            used: 1024 * MIB,
            inactive_file: 700 * MIB,
            active_file: 200 * MIB,
            dirty: 40 * MIB,
            writeback: 10 * MIB,
            ..Group::default()
        };
        full.write(&tree, version, "/sys/fs/cgroup/m/box");
        assert_eq!(tree.left(), Some(850 * MIB), "{version:?}");
    }
}

#[test]
fn a_container_sees_its_group_at_the_mount_point() {
    let limit = |bytes| Group { limit: Some(bytes), used: MIB, ..Group::default() };
    for version in [Version::One, Version::Two] {
        // (the mounted group, the group of the process, the folder with the limit below the mount point)
        for (mounted, group, folder) in [
            // A namespace of groups.
            ("/", "/", ""),
            ("/", "/init.scope", "/init.scope"),
            ("/", "/init.scope", ""),
            // No namespace: the process sees the path of the host.
            ("/docker/0a1b", "/docker/0a1b", ""),
            ("/docker/0a1b", "/docker/0a1b/nested", "/nested"),
            ("/docker/0a1b", "/docker/0a1b/nested", ""),
            ("/kubepods/pod one", "/kubepods/pod one/c", ""),
            // The process was moved out of what it sees.
            ("/", "/../other", ""),
            ("/../..", "/", ""),
            ("/docker/0a1b", "/elsewhere", ""),
        ] {
            let mut tree = Tree::new();
            let point = "/sys/fs/cgroup/m\\040x";
            tree.mount(version, &mounted.replace(' ', "\\040"), point);
            tree.join(version, group);
            limit(64 * MIB).write(&tree, version, &format!("/sys/fs/cgroup/m x{folder}"));
            assert_eq!(tree.left(), Some(63 * MIB), "{version:?} {mounted} {group} {folder}");
        }
    }
}

#[test]
fn what_limits_no_memory_is_passed_over() {
    assert_eq!(left_bytes(Path::new("/nonexistent")), None);
    let mut tree = Tree::new();
    assert_eq!(tree.left(), None);
    // A hierarchy of version 2 without the memory controller, beside one of version 1.
    tree.mount(Version::Two, "/", "/sys/fs/cgroup/unified");
    tree.join(Version::Two, "/user");
    tree.write("/sys/fs/cgroup/unified/user", "cgroup.procs", "1");
    assert_eq!(tree.left(), None);
    tree.mount(Version::One, "/", "/sys/fs/cgroup/memory");
    tree.join(Version::One, "/user");
    let limited = Group { limit: Some(9 * MIB), used: 10 * MIB, ..Group::default() };
    limited.write(&tree, Version::One, "/sys/fs/cgroup/memory");
    assert_eq!(tree.left(), Some(0));
    for garbage in ["", ":", "0", "4:memory", "::::", "0::\0", "- - -", "1 2 3 4 5 - cgroup2"] {
        let mut tree = Tree::new();
        (tree.mountinfo, tree.cgroup) = (garbage.into(), garbage.into());
        assert_eq!(tree.left(), None, "{garbage:?}");
    }
}

#[test]
fn a_limit_that_is_hidden_above_is_known_from_the_statistics() {
    let mut tree = Tree::new();
    tree.mount(Version::One, "/pod/box", "/sys/fs/cgroup/memory");
    tree.join(Version::One, "/pod/box");
    Group { used: 3 * MIB, ..Group::default() }.write(&tree, Version::One, "/sys/fs/cgroup/memory");
    let stat = format!("hierarchical_memory_limit {}\n", 8 * MIB);
    tree.write("/sys/fs/cgroup/memory", "memory.stat", stat);
    assert_eq!(tree.left(), Some(5 * MIB));
}

#[test]
fn old_kernels_can_turn_off_the_hierarchy() {
    let mut tree = Tree::new();
    tree.mount(Version::One, "/", "/m");
    tree.join(Version::One, "/a/b");
    Group { limit: Some(MIB), ..Group::default() }.write(&tree, Version::One, "/m/a");
    Group { limit: Some(5 * MIB), ..Group::default() }.write(&tree, Version::One, "/m/a/b");
    assert_eq!(tree.left(), Some(MIB));
    tree.write("/m/a", "memory.use_hierarchy", "0\n");
    assert_eq!(tree.left(), Some(5 * MIB));
}

#[test]
fn the_tightest_of_all_groups_counts() {
    let mut random = fastrand::Rng::with_seed(17);
    for case in 0..200 {
        let mut tree = Tree::new();
        let mut expected: Option<u64> = None;
        for (version, point) in [(Version::One, "/sys/fs/cgroup/memory"), (Version::Two, "/cg2")] {
            let depth = random.usize(0..6);
            let hidden = random.usize(0..=depth);
            let path = |levels: usize| (0..levels).map(|i| format!("/g{i}")).collect::<String>();
            let mounted = if hidden == 0 { "/".to_owned() } else { path(hidden) };
            tree.mount(version, &mounted, point);
            tree.join(version, &if depth == 0 { "/".to_owned() } else { path(depth) });
            for level in hidden..=depth {
                let below: String = (hidden..level).map(|i| format!("/g{i}")).collect();
                let mut size = || random.u64(0..64) * MIB;
                let mut group = Group {
                    limit: None,
                    high: None,
                    used: size() + 64 * MIB,
                    inactive_file: size(),
                    active_file: size() / 2,
                    dirty: size() / 4,
                    writeback: size() / 8,
                };
                let free = (group.inactive_file + group.active_file)
                    .saturating_sub(group.dirty + group.writeback);
                let held = group.used.saturating_sub(free);
                if random.bool() {
                    group.limit = Some(random.u64(0..300) * MIB);
                }
                if version == Version::Two && random.u8(0..4) == 0 {
                    group.high = Some(random.u64(0..300) * MIB);
                }
                for limit in [group.limit, group.high].into_iter().flatten() {
                    let left = limit.saturating_sub(held);
                    expected = Some(expected.map_or(left, |least| least.min(left)));
                }
                group.write(&tree, version, &format!("{point}{below}"));
            }
        }
        // Version 1 always reports a limit, which may be larger than any memory.
        let left = tree.left().filter(|bytes| *bytes < 1 << 50);
        assert_eq!(left, expected, "case {case}: {} {}", tree.mountinfo, tree.cgroup);
    }
}
