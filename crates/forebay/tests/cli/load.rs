//! Tests `forebay load` and `forebay doctor`.

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::Command;

use crate::harness::{Ran, demo, forebay, moe};

/// Runs the binary with its own configuration folder.
fn configured<A: AsRef<OsStr>>(folder: &std::path::Path, arguments: &[A]) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(arguments)
        .env("XDG_CONFIG_HOME", folder)
        .output()
        .expect("the binary runs");
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Returns a profile of this machine and of the disk that `model` is on, in the form that `doctor` saves.
fn profile(model: &str, staging_bytes: usize) -> String {
    use forebay_engine::doctor::{MachineIdentity, MachineProfile, PROFILE_VERSION, ProfiledRead};
    let folder = std::path::Path::new(model).parent().unwrap();
    let profile = MachineProfile {
        version: PROFILE_VERSION,
        machine: MachineIdentity::here(folder).unwrap(),
        read: ProfiledRead {
            engine: "pread".into(),
            request_bytes: 256 << 10,
            queue_depth: 5,
            bytes_per_second: 1e9,
            in_place_bytes_per_second: 1e9,
            staging_bytes,
        },
        read_64kib_p50_seconds: 1e-4,
        read_64kib_p99_seconds: 1e-3,
        cached_copy_bytes_per_second: None,
        memory_read_bytes_per_second: 1e9,
        memory_copy_bytes_per_second: 1e9,
        threads: None,
        kernels: Vec::new(),
        decoders: Vec::new(),
        gpu: None,
        last_cache_bytes: None,
        quality: None,
    };
    serde_json::to_string(&profile).unwrap()
}

#[test]
fn loads_read_as_the_profile_of_this_machine_says() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("forebay/machine.json");
    std::fs::create_dir(directory.path().join("forebay")).unwrap();
    let (model, staging) = (demo(), 4 << 20);
    let load = || configured(directory.path(), &["load", &model, "--json"]).json();

    std::fs::write(&file, profile(&model, staging)).unwrap();
    let report = load();
    assert_eq!(report["engine"]["name"], "pread");
    assert_eq!(
        (&report["request_bytes"], &report["queue_depth"]),
        (&(256 << 10).into(), &5.into())
    );
    assert!(report["runs"][0]["staging_bytes"].as_u64().unwrap() >= staging as u64);
    assert_eq!(report["chosen_by"], "the machine profile");

    let other = profile(&model, 0).replace("\"kernel\":\"", "\"kernel\":\"0.");
    for (text, why) in [(other.as_str(), "another machine"), ("{}", "damaged")] {
        std::fs::write(&file, text).unwrap();
        let report = load();
        assert!(report["chosen_by"].as_str().unwrap().contains(why), "{report}");
        assert_eq!(report["runs"][0]["staging_bytes"], 0);
    }
}

#[test]
fn every_reader_loads_all_weights() {
    let folder = tempfile::tempdir().unwrap();
    for model in [demo(), moe()] {
        let weights = forebay(&["inspect", &model, "--json"]).json()["weights_bytes"].clone();
        for io in ["auto", "pread", "mmap"] {
            let arguments = ["load", &model, "--io", io, "--repeat", "2", "--json"];
            let report = configured(folder.path(), &arguments).json();
            assert_eq!(report["weights_bytes"], weights, "{io}");
            let runs = report["runs"].as_array().unwrap();
            assert_eq!(runs.len(), 2);
            for run in runs {
                let part = |name: &str| run[name].as_u64().unwrap();
                assert_eq!(run["bytes"], weights, "{io}");
                assert_eq!(part("engine_bytes") + part("cached_bytes"), part("bytes"), "{io}");
                assert_eq!(part("staging_bytes"), 0);
                assert!(run["bytes_per_second"].as_f64().unwrap() > 0.0);
            }
            assert_ne!(report["engine"]["name"], "", "{io}");
            assert_ne!(report["chosen_by"], "", "{io}");
        }
    }
}

#[test]
fn every_cold_run_of_a_mapping_is_cold() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo(), &model).unwrap();
    let cold = |io| {
        let arguments = ["load", model.to_str().unwrap(), "--cold", "--repeat", "2", "--json"];
        configured(folder.path(), &[&arguments[..], &["--io", io]].concat())
    };
    let plain = cold("pread");
    if plain.status != Some(0) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: cold mappings: {}", plain.stderr.trim());
        return;
    }
    for run in cold("mmap").json()["runs"].as_array().unwrap() {
        assert_eq!(run["cached_before_bytes"], 0);
        assert_eq!((&run["engine_bytes"], &run["cached_bytes"]), (&run["bytes"], &0.into()));
    }
}

#[test]
fn cold_runs_are_held_against_readings_next_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo(), &model).unwrap();
    let arguments = ["load", model.to_str().unwrap(), "--cold", "--repeat", "2"];
    let json = [&arguments[..], &["--json"]].concat();
    let ran = configured(folder.path(), &json);
    let report = match ran.status {
        Some(0) => ran.json(),
        _ => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: cold loads: {}", ran.stderr.trim());
            return;
        }
    };
    let limit = &report["limit"];
    if limit["disk"].is_null() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: readings: {}", limit["why"]);
        return;
    }
    let readings = limit["disk_readings"].as_array().unwrap();
    let after: Vec<_> = readings.iter().map(|reading| reading["after_runs"].as_u64()).collect();
    assert_eq!(after, [0, 0, 1, 1, 2, 2].map(Some));
    for (run, index) in report["runs"].as_array().unwrap().iter().zip(0..) {
        let (before, after) = (&readings[2 * index + 1], &readings[2 * index + 2]);
        let sum = |name: &str| before[name].as_f64().unwrap() + after[name].as_f64().unwrap();
        let expected = sum("bytes") / sum("seconds");
        let found = run["disk_bytes_per_second"].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        let least = run["bytes"].as_f64().unwrap() / found;
        let seconds = run["seconds"].as_f64().unwrap();
        assert_eq!(run["faster_than_readings"], least > seconds, "{run}");
        assert!((run["limit_seconds"].as_f64().unwrap() / least.min(seconds) - 1.0).abs() < 1e-9);
        assert!(run["share_of_limit"].as_f64().unwrap() <= 1.0, "{run}");
    }
    let said = configured(folder.path(), &arguments).ok().stdout;
    assert!(said.contains("sustained") && said.contains("directly before and after"), "{said}");

    let only = configured(folder.path(), &[&json[..], &["--no-limit"]].concat()).json();
    assert_eq!(only["limit"]["disk_readings"].as_array().map(Vec::len), Some(0));
    assert!(only["runs"][0]["share_of_limit"].is_null(), "{only}");
}

#[test]
fn what_a_person_reads_names_engine_and_memory() {
    let said = forebay(&["load", &demo()]).ok().stdout;
    for needed in ["GB/s", "read by", "chosen by", "of staging"] {
        assert!(said.contains(needed), "{needed}: {said}");
    }
}

#[test]
fn doctor_refuses_what_it_cannot_measure() {
    let said = forebay(&["doctor", "/nonexistent-folder", "--no-save"]).failed(1);
    assert!(said.contains("nonexistent-folder"), "{said}");
    let said = forebay(&["doctor", "--file", &demo(), "--no-save"]).failed(1);
    assert!(said.contains("--file") && said.contains("at least"), "{said}");
}

#[test]
fn a_load_is_traced_whole() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("load.trace");
    let trace = trace.to_str().unwrap();
    for io in ["pread", "mmap"] {
        let arguments = ["load", &demo(), "--io", io, "--trace-io", trace, "--json", "--force"];
        let report = configured(folder.path(), &arguments).json();
        let traced = forebay(&["trace-io", trace, "--json"]).json();
        // Reads of whole sectors transfer a little more than requested.
        let (read, wanted) =
            (traced["bytes"].as_u64().unwrap(), report["weights_bytes"].as_u64().unwrap());
        assert!((wanted..wanted + (4 << 20)).contains(&read), "{io}: {read} of {wanted}");
    }
}

#[test]
fn a_damaged_pack_is_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let pack = folder.path().join("model.fbay");
    let path = pack.to_str().unwrap();
    forebay(&["pack", &moe(), "-o", path]).ok();
    let verified = forebay(&["load", path, "--json"]).json();
    assert_eq!(verified["checks"], "on");
    let mut bytes = std::fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    for io in ["auto", "pread", "mmap"] {
        // The second read is reported, too, so there may be a line before the error.
        let Ran { status, stderr, .. } = forebay(&["load", path, "--io", io]);
        assert_eq!(status, Some(1), "{io}: {stderr}");
        assert!(stderr.contains("model.fbay") && stderr.contains("checksum"), "{io}: {stderr}");
    }
    assert_eq!(forebay(&["load", path, "--no-verify", "--json"]).json()["checks"], "off");
    assert!(forebay(&["load", &demo(), "--no-verify"]).failed(2).contains("--no-verify"));
}

#[test]
fn a_load_to_a_gpu_is_read_back_or_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let pack = folder.path().join("model.fbay");
    let pack = pack.to_str().unwrap().to_owned();
    forebay(&["pack", &moe(), "-o", &pack]).ok();
    for model in [demo(), moe(), pack] {
        let weights = forebay(&["load", &model, "--json"]).json()["weights_bytes"].clone();
        let arguments = ["load", &model, "--device", "cuda", "--check", "--repeat", "2", "--json"];
        let ran = forebay(&arguments);
        if ran.status == Some(1) {
            let words = ["no NVIDIA driver", "driver is too old", "finds no GPU", "capability"];
            assert!(words.iter().any(|words| ran.stderr.contains(words)), "{}", ran.stderr);
            let _ = writeln!(std::io::stderr(), "SKIPPED: loads to a GPU: {}", ran.stderr.trim());
            continue;
        }
        let report = ran.json();
        assert_eq!(report["device"]["read_back"]["bytes"], weights, "{model}");
        assert!(report["device"]["pinned_bytes"].as_u64().unwrap() <= 256 << 20);
        assert!(report["limit"]["device_bytes_per_second"].as_f64().unwrap() > 0.0);
        let said = forebay(&["load", &model, "--device", "cuda", "--vram", "1MiB"]).failed(1);
        assert!(said.contains("--vram must be at least"), "{said}");
        let said = forebay(&["load", &model, "--device", "cuda:999"]).failed(1);
        assert!(said.contains("no GPU 999"), "{said}");
    }
}

#[test]
fn options_of_a_gpu_need_one() {
    for option in [&["--vram", "8GiB"][..], &["--check"], &["--device", "auto"]] {
        let said = forebay(&[&["load", &demo()], option].concat()).failed(2);
        assert!(said.contains(option[0]) && said.contains("cuda"), "{said}");
    }
    let said = forebay(&["load", &demo(), "--device", "tpu"]).failed(2);
    assert!(said.contains("cuda:N"), "{said}");
}
