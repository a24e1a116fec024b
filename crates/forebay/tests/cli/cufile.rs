//! Tests loads to a GPU with cuFile on an imagined GPU. The loader finds a fake CUDA driver and a fake cuFile first.
//! They keep the device's memory in host memory and read with pread, so the tests can compare what arrives. They fail
//! on request.

use std::path::Path;
use std::process::Command;

use forebay_engine::doctor::{
    CuFileCase, CuFileRates, GpuRates, MachineIdentity, MachineProfile, PROFILE_VERSION,
    ProfiledRead,
};
use forebay_engine::load::CuFileRequests;

use crate::harness::{Ran, demo, forebay, moe};

fn build(folder: &Path, source: &str, name: &str) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakes").join(source);
    let mut command = Command::new(compiler);
    let command = command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]);
    let status = command.arg(folder.join(name)).arg(source).status();
    assert!(status.expect("a C compiler").success(), "{name} does not compile");
}

/// A machine with an imagined GPU.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        build(folder.path(), "libcuda.c", "libcuda.so.1");
        std::fs::copy(folder.path().join("libcuda.so.1"), folder.path().join("libcuda.so"))
            .unwrap();
        build(folder.path(), "libcufile.c", "libcufile.so.0");
        Machine { folder }
    }

    fn without_cufile() -> Machine {
        let machine = Machine::new();
        // These files are not simply missing, because there may be a real library elsewhere. The loader finds them
        // first, and they are not libraries.
        for name in ["libcufile.so.0", "libcufile.so"] {
            std::fs::write(machine.folder.path().join(name), "not a library").unwrap();
        }
        machine
    }

    fn run(&self, trouble: &str, arguments: &[&str]) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("XDG_CONFIG_HOME", self.folder.path())
            .env("FAKE_CUFILE", trouble)
            .env("FAKE_CUFILE_LOG", self.log())
            .output()
            .expect("the binary runs");
        Ran {
            status: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    fn load(&self, trouble: &str, model: &str, more: &[&str]) -> Ran {
        let load = ["load", model, "--device", "cuda", "--check", "--json"];
        self.run(trouble, &[&load[..], more].concat())
    }

    fn log(&self) -> std::path::PathBuf {
        self.folder.path().join("log")
    }

    /// Saves a profile of this machine with these rates of cuFile and the ring.
    fn save_profile(&self, model: &str, gpu: &str, cufile: f64, ring: f64) {
        let requests = CuFileRequests { request_bytes: 256 << 10, threads: 3 };
        let best = CuFileCase { requests, bytes_per_second: cufile };
        let rates = CuFileRates {
            version: None,
            mode: "imagined".into(),
            straight: false,
            memory_is_registered: false,
            sample_bytes: 1 << 30,
            cases: vec![best.clone()],
            best,
            ring_bytes_per_second: ring,
        };
        let gpu = GpuRates {
            name: gpu.into(),
            compute_capability: (9, 0),
            multiprocessors: 4,
            memory_bytes: 8 << 30,
            driver: None,
            pcie: None,
            pinned_copies: Vec::new(),
            pageable_copy_bytes_per_second: 1e9,
            memory_read_bytes_per_second: 1e12,
            memory_copy_bytes_per_second: 1e12,
            kernels: Vec::new(),
            beside_cpu: None,
            cufile: Some(rates),
        };
        let profile = MachineProfile {
            version: PROFILE_VERSION,
            machine: MachineIdentity::here(Path::new(model).parent().unwrap()).unwrap(),
            read: ProfiledRead {
                engine: "pread".into(),
                request_bytes: 512 << 10,
                queue_depth: 4,
                bytes_per_second: 1e9,
                in_place_bytes_per_second: 1e9,
                staging_bytes: 0,
            },
            read_64kib_p50_seconds: 1e-4,
            read_64kib_p99_seconds: 1e-3,
            cached_copy_bytes_per_second: None,
            memory_read_bytes_per_second: 1e10,
            memory_copy_bytes_per_second: 1e10,
            threads: None,
            kernels: Vec::new(),
            decoders: Vec::new(),
            gpu: Some(gpu),
            last_cache_bytes: None,
            quality: None,
        };
        std::fs::create_dir_all(self.folder.path().join("forebay")).unwrap();
        let text = serde_json::to_string(&profile).unwrap();
        std::fs::write(self.folder.path().join("forebay/machine.json"), text).unwrap();
    }
}

/// Returns true if files beside the tests can be read past the page cache.
fn direct() -> bool {
    let report = forebay(&["load", &demo(), "--io", "pread", "--json"]).json();
    let direct = report["engine"]["direct"] == true;
    if !direct {
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "SKIPPED: cuFile: no direct reads here");
    }
    direct
}

#[test]
fn the_imagined_gpu_takes_loads_by_the_ring() {
    let machine = Machine::new();
    let report = machine.load("", &demo(), &["--io", "uring", "--repeat", "2"]);
    // Where io_uring is missing, `--io pread` reads with threads.
    let report = match report.status {
        Some(0) => report,
        _ => machine.load("", &demo(), &["--io", "pread"]),
    };
    let report = report.json();
    assert_eq!(report["device"]["name"], "Imagined GPU");
    assert_eq!(report["device"]["read_back"]["bytes"], report["weights_bytes"]);
    assert!(!machine.log().exists(), "nobody has asked for cuFile");
}

#[test]
fn everything_arrives_by_cufile_and_everything_is_given_back() {
    if !direct() {
        return;
    }
    let machine = Machine::new();
    for (trouble, mode, registered) in [
        ("", "compatibility mode", false),
        ("short", "compatibility mode", false),
        ("sometimes", "compatibility mode", false),
        ("gds", "nvidia-fs 2.24", true),
        ("gds-unregistered", "nvidia-fs 2.24", false),
        ("peer", "peer-to-peer", true),
        ("peer-13", "peer-to-peer", true),
    ] {
        for model in [demo(), moe()] {
            let ran = machine.load(trouble, &model, &["--io", "cufile", "--repeat", "2"]);
            let report = ran.json();
            let engine = &report["engine"];
            assert_eq!((&engine["name"], &engine["direct"]), (&"cufile".into(), &true.into()));
            assert!(engine["why"].as_str().unwrap().contains(mode), "{trouble}: {engine}");
            assert_eq!(engine["registered_buffers"], registered, "{trouble}");
            assert_eq!(report["device"]["read_back"]["bytes"], report["weights_bytes"]);
            assert_eq!(report["device"]["pinned_bytes"], 0);
            for run in report["runs"].as_array().unwrap() {
                assert_eq!(
                    (&run["engine_bytes"], &run["cached_bytes"]),
                    (&run["bytes"], &0.into())
                );
            }
            let log = std::fs::read_to_string(machine.log()).unwrap();
            assert!(log.starts_with("files left 0, memory left 0, "), "{trouble}: {log}");
        }
    }
}

#[test]
fn a_byte_that_cufile_gets_wrong_is_found_by_the_check() {
    if !direct() {
        return;
    }
    let said = Machine::new().load("wrong", &demo(), &["--io", "cufile"]).failed(1);
    assert!(said.contains("on the device differs from the file"), "{said}");
}

#[test]
fn what_cufile_cannot_do_is_said_in_words() {
    let machine = Machine::new();
    let demo = demo();
    if direct() {
        for (trouble, words) in [
            ("no-driver", "nvidia-fs is not loaded"),
            ("refuses", "its file system"),
            ("no-udev", "/run/udev"),
            ("hangs", "has not ended within 10 s"),
            ("fails", "the GPU's driver failed"),
            ("errno", "input/output error"),
        ] {
            let said = machine.load(trouble, &demo, &["--io", "cufile"]).failed(1);
            assert!(said.contains("cufile") || said.contains("tensor"), "{trouble}: {said}");
            assert!(said.contains(words), "{trouble}: {said}");
        }
    }
    let said = Machine::without_cufile().load("", &demo, &["--io", "cufile"]).failed(1);
    assert!(said.contains("--io cufile") && said.contains("is not there"), "{said}");
    // `/dev/shm` is a file system without a disk.
    if Path::new("/dev/shm").is_dir() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let model = folder.path().join("model.gguf");
        std::fs::copy(&demo, &model).unwrap();
        let said = machine.load("", model.to_str().unwrap(), &["--io", "cufile"]).failed(1);
        assert!(said.contains("past the page cache"), "{said}");
    }
}

#[test]
fn cufile_needs_a_gpu_and_no_checksums() {
    for device in [&[][..], &["--device", "cpu"]] {
        let load = ["load", &demo(), "--io", "cufile"];
        let said = forebay(&[&load[..], device].concat()).failed(2);
        assert!(said.contains("--io cufile") && said.contains("--device cuda"), "{said}");
    }
    let machine = Machine::new();
    let pack = machine.folder.path().join("model.fbay");
    let pack = pack.to_str().unwrap();
    forebay(&["pack", &moe(), "-o", pack, "--codec", "compact"]).ok();
    let said = machine.load("", pack, &["--io", "cufile"]).failed(2);
    assert!(said.contains("--no-verify"), "{said}");
    if direct() {
        let report = machine.load("", pack, &["--io", "cufile", "--no-verify"]).json();
        assert_eq!(report["checks"], "off");
        assert_eq!(report["device"]["read_back"]["bytes"], report["weights_bytes"]);
    }
}

#[test]
fn auto_takes_cufile_where_the_profile_says_that_it_won_and_nothing_speaks_against_it() {
    if !direct() {
        return;
    }
    let machine = Machine::new();
    let model = machine.folder.path().join("model.gguf");
    std::fs::copy(demo(), &model).unwrap();
    let model = model.to_str().unwrap();
    let engine = |more: &[&str]| {
        let report = machine.load("", model, more).json();
        (report["engine"]["name"].as_str().unwrap().to_owned(), report)
    };
    // The file was just written, so without `--cold` it is in the page cache.
    machine.save_profile(model, "Imagined GPU", 3.3e9, 3.0e9);
    let (name, report) = engine(&[]);
    assert_eq!(name, "pread");
    assert!(report["engine"]["why"].as_str().unwrap().contains("page cache"), "{report}");
    let (name, report) = engine(&["--cold"]);
    assert_eq!(name, "cufile", "{report}");
    assert_eq!(
        (&report["request_bytes"], &report["queue_depth"]),
        (&(256 << 10).into(), &3.into())
    );
    assert_eq!(report["chosen_by"], "the machine profile");
    // The library may have been removed since it was measured.
    let gone = Machine::without_cufile();
    gone.save_profile(model, "Imagined GPU", 3.3e9, 3.0e9);
    let report = gone.load("", model, &["--cold"]).json();
    assert_eq!(report["engine"]["name"], "pread");
    assert!(report["engine"]["why"].as_str().unwrap().contains("is not there"), "{report}");
    // With `--io cufile` the profile only decides about the requests.
    let (name, report) = engine(&["--io", "cufile"]);
    assert_eq!((name.as_str(), &report["queue_depth"]), ("cufile", &3.into()));
    assert!(report["chosen_by"].as_str().unwrap().starts_with("the command line"), "{report}");
    assert_eq!(engine(&["--cold", "--io", "pread"]).0, "pread");
    // In these profiles cuFile is not faster by enough, or the rates are those of another GPU.
    for (gpu, cufile) in [("Imagined GPU", 3.1e9), ("Another GPU", 6e9)] {
        machine.save_profile(model, gpu, cufile, 3.0e9);
        assert_eq!(engine(&["--cold"]).0, "pread", "{gpu}, {cufile}");
    }
    // Verification of checksums has precedence over cuFile.
    let pack = machine.folder.path().join("model.fbay");
    let pack = pack.to_str().unwrap();
    forebay(&["pack", &moe(), "-o", pack, "--codec", "compact"]).ok();
    machine.save_profile(model, "Imagined GPU", 6e9, 3e9);
    let report = machine.load("", pack, &["--cold"]).json();
    assert_eq!((&report["engine"]["name"], &report["checks"]), (&"pread".into(), &"on".into()));
    assert!(report["engine"]["why"].as_str().unwrap().contains("checksums"), "{report}");
}
