//! Tests `forebay doctor`: its checks before it measures, and its report on a busy machine.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Ran, command};

/// Time limit that is shorter than a measurement.
const AT_ONCE: Duration = Duration::from_secs(10);

fn doctor(config: &Path, folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("doctor").arg(folder).env("XDG_STATE_HOME", config).env_remove("FOREBAY_LOG");
    command
}

fn ran(mut command: Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Waits until a process has stopped itself.
fn until_stopped(process: u32) {
    let state = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        status
            .lines()
            .find_map(|line| line.strip_prefix("State:").map(|rest| rest.trim().to_owned()))
    };
    while !state().is_some_and(|state| state.starts_with('T')) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_profile_that_cannot_be_saved_is_said_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let started = Instant::now();
    let line = ran(doctor(&file, folder.path())).failed(1);
    assert!(line.contains("--no-save") && started.elapsed() < AT_ONCE, "{line}");
    // Not even root can write to this folder.
    let line = ran(doctor(Path::new("/proc/self"), folder.path())).failed(1);
    assert!(line.contains("--no-save") && started.elapsed() < AT_ONCE, "{line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Reads what a service or a container sets, and asks the program where it looks for profiles then.
#[test]
fn a_service_and_a_container_find_the_profile() {
    let read = |path: &str| {
        std::fs::read_to_string(crate::harness::workspace().join(path)).expect("it is there")
    };
    let looked_in = |home: &str, state: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["config", "--json"]).env("HOME", home).env_remove("XDG_STATE_HOME");
        command.envs(state.map(|state| ("XDG_STATE_HOME", state)));
        let document = ran(command).json();
        let rows = document["settings"].as_array().unwrap().clone();
        let row = rows.into_iter().find(|row| row["setting"] == "machine profiles").unwrap();
        row["value"].as_str().unwrap().to_owned()
    };
    let unit = read("packaging/forebay.service");
    let value =
        |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).expect("the unit sets it");
    let state = value("Environment=XDG_STATE_HOME=");
    let expected = format!("{state}/{}", value("StateDirectory="));
    assert_eq!(looked_in("/", Some(state)), expected);
    let image = read("Dockerfile");
    let home = image.lines().find_map(|line| line.strip_prefix("WORKDIR /home")).unwrap();
    let folder = looked_in(&format!("/home{home}"), None);
    assert_eq!(folder, "/home/forebay/.local/state/forebay");
    assert!(image.contains(".local/state/forebay\n") && image.contains(&folder), "it is a volume");
}

#[test]
fn a_full_disk_is_said_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config");
    let script = format!(
        "trap '' XFSZ; ulimit -f 0; XDG_STATE_HOME={} exec {} doctor {}",
        config.display(),
        env!("CARGO_BIN_EXE_forebay"),
        folder.path().display()
    );
    let started = Instant::now();
    let line = command("sh", &["-c", &script], "").failed(1);
    assert!(line.contains("the profile cannot be written; --no-save"), "{line}");
    assert!(started.elapsed() < AT_ONCE, "{line}");
    let left = std::fs::read_dir(config.join("forebay")).unwrap().count();
    assert_eq!(left, 0, "nothing half-written stays");
}

/// Other threads compute all the time, and the folder of the profile is removed before the end.
#[test]
fn a_busy_machine_is_noticed_and_its_report_is_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config");
    let subject = folder.path().join("subject.gguf");
    std::fs::File::create(&subject).unwrap().set_len(1 << 30).unwrap();
    let done = AtomicBool::new(false);
    let ran = std::thread::scope(|scope| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..processors {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let mut command = doctor(&config, folder.path());
        let command = command
            .args(["--quick", "--json"])
            .env("FOREBAY_SIGNAL_AT", "STOP:1:measuring a file to read")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        // The check has created the folder and removed its test file.
        let profile_folder = config.join("forebay");
        until_stopped(child.id());
        std::fs::remove_dir(&profile_folder).unwrap();
        std::fs::write(&profile_folder, "in the way").unwrap();
        kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
        let output = child.wait_with_output().unwrap();
        done.store(true, Ordering::Relaxed);
        output
    });
    let errors = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with("error: ") && errors.contains("forebay/machine-"), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert!(report["saved"].is_null(), "{report}");
    assert!(report["not_saved"].as_str().unwrap().contains("forebay/machine-"));
    let quality = &report["profile"]["quality"];
    assert_eq!(quality["state"], "busy", "{quality}");
    let reasons = quality["reasons"].as_array().unwrap();
    let others = "other programs used the processors";
    assert!(reasons.iter().any(|why| why.as_str().unwrap().contains(others)), "{reasons:?}");
    assert!(quality["spread"].as_f64().unwrap() > 1.1, "{quality}");
    assert!(report["activity"]["others_share"].as_f64().unwrap() > 0.1, "{report}");
}
