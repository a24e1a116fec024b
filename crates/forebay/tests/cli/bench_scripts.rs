//! Tests the scripts below `bench/` that compare with llama.cpp. The programs that they run are replaced by scripts
//! that print typical output. Tables and ratios must be right, and a stopped program must leave nothing behind.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::harness::{Ran, command, workspace};

/// Prints `bench --json` of a model with experts beyond VRAM, and of a dense model.
const BENCH: &str = r#"#!/bin/sh
case "$*" in
    plan*) echo 'a plan' ;;
    *) echo '{"prompt": null, "generate": {"tokens_per_second_median": 60.0, "tokens_per_second_predicted": 66.0},
        "statistics": {
            "device_experts": {"hit_rate": 0.9, "experts_on_cpu": 0, "misses": 10},
            "device_sub_layers": {"in_vram": {"sub_layers": 3}, "streamed": {"sub_layers": 4}, "on_cpu": {"sub_layers": 5},
                "few_tokens": {"copy_wait_seconds": 0.5}, "many_tokens": {"copy_wait_seconds": 0}},
            "stream": {"experts_read": 1, "prompt_tokens": 0, "generated_tokens": 8,
                "io": {"busy_fraction": 0.01, "bytes_read": 8, "busy_seconds": 1.0}}}}' ;;
esac
"#;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// Writes a program with this text and returns its path.
    fn program(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

/// Runs a script of `bench/` with environment variables.
fn bench(script: &str, variables: &[&str], arguments: &[&str]) -> Ran {
    let script = workspace().join("bench").join(script);
    let all = [variables, &["bash", script.to_str().unwrap()], arguments].concat();
    command("env", &all, "")
}

#[test]
fn experts_beyond_vram_are_compared() {
    let folder = Folder::new();
    let forebay = format!("FOREBAY={}", folder.program("forebay", BENCH));
    let variables = [&forebay, "PAIRS=1", "PROMPTS=", "GENERATE=8", "LIMIT=2", "NCMOE=30"];
    let llama = folder.program("llama-bench", "#!/bin/sh\necho '[{\"avg_ts\": 20.0}]'\n");
    let table = bench("beyond-vram.sh", &variables, &[&llama, "m.gguf"]).ok().stdout;
    let own = "| generate, own routing | 60.0 | 20.0 | **3.00** | 90% | 0% | 1% |";
    assert!(table.contains(own), "{table}");
    // The choice of experts makes no difference to llama.cpp.
    assert!(table.contains("| generate, uniform | 60.0 | 20.0 | **3.00** |"), "{table}");
    // This program never answers.
    let llama = folder.program("llama-bench", "#!/bin/sh\nexec sleep 60\n");
    let table = bench("beyond-vram.sh", &variables, &[&llama, "m.gguf"]).ok().stdout;
    assert!(table.contains("| generate, own routing | 60.0 | no 8 tokens in 2 s | - |"), "{table}");
}

/// Output of `inspect --json` for 16 layers with 4 experts of 256 MiB. 7 of the 16 GiB fit beside 1 GiB.
const INSPECT: &str =
    r#"{"layers": 16, "experts": 4, "bytes_per_expert": 268435456, "weights_bytes": 17179869184}"#;

#[test]
fn llama_cpp_gets_as_many_experts_as_fit() {
    let folder = Folder::new();
    let text = BENCH.replace("plan*)", &format!("inspect*) echo '{INSPECT}' ;;\n    plan*)"));
    let forebay = format!("FOREBAY={}", folder.program("forebay", &text));
    let used = folder.0.path().join("used");
    let used = used.to_str().unwrap();
    // The program uses 1 GiB for the experts of each layer that `-ncmoe` does not exclude. The cases add or subtract 1
    // GiB.
    for (more, expected) in [(0, 8), (1024, 9), (-1024, 7)] {
        let text = format!(
            "#!/bin/sh\nput() {{ echo $1 >{used}.new; mv {used}.new {used}; }}\n\
             while [ \"$1\" != -ncmoe ]; do shift; done\n\
             use=$((1024 * (16 - $2) + {more}))\nput $use\n\
             case \"$*\" in *'-n 1 '*)\n\
             until [ \"$(cat {used}.seen)\" = $use ]; do sleep 0.02; done ;;\nesac\nput 0\n\
             echo \"[{{\\\"avg_ts\\\": $2}}]\"\n"
        );
        let llama = folder.program("llama-bench", &text);
        std::fs::write(used, "0\n").unwrap();
        // It says what it has answered, because the program must not end before its memory was seen when the script
        // looks for what fits, which is with `-n 1`.
        folder.program(
            "nvidia-smi",
            &format!("#!/bin/sh\nuse=$(cat {used})\necho $use\necho $use >{used}.seen\n"),
        );
        let folder = folder.0.path().to_str().unwrap();
        let path = format!("PATH={folder}:{}", std::env::var("PATH").unwrap());
        let variables = [&forebay, "PAIRS=1", "PROMPTS=", "GENERATE=8", "LIMIT=30", &path];
        let ran = bench("beyond-vram.sh", &variables, &[&llama, "m.gguf"]).ok();
        assert!(ran.stderr.contains(&format!("-ncmoe {expected}\n")), "{more}: {}", ran.stderr);
        let row = format!("| generate, own routing | 60.0 | {expected}.0 |");
        assert!(ran.stdout.contains(&row), "{more}: {}", ran.stdout);
    }
}

#[test]
fn dense_models_beyond_vram_are_compared() {
    let folder = Folder::new();
    let forebay = format!("FOREBAY={}", folder.program("forebay", BENCH));
    let variables = [forebay.as_str(), "PAIRS=1", "PROMPTS=", "NGL=7", "LIMIT=20"];
    // This program prints how many layers it was given.
    let text =
        "#!/bin/sh\nwhile [ \"$1\" != -ngl ]; do shift; done\necho \"[{\\\"avg_ts\\\": $2}]\"\n";
    let llama = folder.program("llama-bench", text);
    let table = bench("beyond-vram-dense.sh", &variables, &[&llama, "m.gguf"]).ok().stdout;
    let row = "| generate | 60.00 | 66.00 | 7.00 | **8.57** | 3/4/5 | 0.50 s |  |";
    assert!(table.contains(row), "{table}");
}

/// Script that limits memory and runs a program past its time limit. The program is stopped, but its child continues
/// until the script removes the memory limit. The script is killed before that unless `$2` is `ends`.
const LIMITED: &str = r#"
set -euo pipefail
. "$0"
limit_memory $((64 << 20))
echo "group $group"
model=m limit=1 llama_bench=$1
rate=$(llama_rate 0 8)
echo "rate $rate"
[ -n "$(cat "$group/cgroup.procs")" ]
echo "a process is left"
[ "$2" = ends ] || kill -TERM $$
unlimit_memory
[ ${#within[@]} = 0 ]
"#;

#[test]
fn nothing_is_left_of_a_limit_of_memory() {
    let limits = workspace().join("bench/limits.sh");
    let limits = limits.to_str().unwrap();
    let limited = ["-c", ". \"$0\"; limit_memory $((64 << 20)) && unlimit_memory", limits];
    if command("bash", &limited, "").status != Some(0) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: nobody may limit memory here (root may)");
        return;
    }
    let folder = Folder::new();
    // The child has its own session, so killing the program does not reach the child.
    let llama = folder.program("llama-bench", "#!/bin/sh\nsetsid sleep 600 &\nsleep 600\n");
    let trapped = format!("trap unlimit_memory EXIT\n{LIMITED}");
    for (script, how) in [(LIMITED, "ends"), (&trapped, "is killed")] {
        let ran = command("bash", &["-c", script, limits, &llama, how], "");
        let said = &ran.stdout;
        assert!(said.contains("rate 0\na process is left\n"), "{how}: {said} {}", ran.stderr);
        assert_eq!(ran.status == Some(0), how == "ends", "{how}: {}", ran.stderr);
        let group = said.lines().find_map(|line| line.strip_prefix("group ")).unwrap();
        assert!(!Path::new(group).exists(), "{how}: {group} is left");
    }
}

#[test]
fn two_builds_are_compared() {
    let folder = Folder::new();
    let prints = |prompt: &str, generate: &str| {
        format!(
            "#!/bin/sh\necho '{{\"prompt\": {{\"tokens_per_second_median\": {prompt}}}, \
             \"generate\": {{\"tokens_per_second_median\": {generate}}}}}'\n"
        )
    };
    let before = folder.program("before", &prints("100.0", "20.0"));
    let after = folder.program("after", &prints("110.0", "15.0"));
    let cases = folder.program("cases", "# a comment\nsmall\tm.gguf --ram 1GiB\n");
    let table = bench("before-after.sh", &["ROUNDS=2"], &[&before, &after, &cases]).ok().stdout;
    for row in [
        "| small, prompt | 100.0 | 110.0 | **1.100** (1.10-1.10) | **1.000** (1.00-1.00) |",
        "| small, generate | 20.0 | 15.0 | **0.750** (0.75-0.75) | **1.000** (1.00-1.00) |",
    ] {
        assert!(table.contains(row), "{table}");
    }
}
