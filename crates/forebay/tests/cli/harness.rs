//! Runs the binary and finds the reference data.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Result of a run of the binary.
pub struct Ran {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Asserts exit status 0.
    #[track_caller]
    pub fn ok(self) -> Ran {
        assert_eq!(self.status, Some(0), "stderr: {}", self.stderr);
        self
    }

    /// Asserts a failure with this exit status and one line that begins with `error: `.
    #[track_caller]
    pub fn failed(self, status: i32) -> String {
        assert_eq!(self.status, Some(status), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        let line = self.stderr.trim_end_matches('\n');
        assert!(line.starts_with("error: "), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
        assert_eq!(self.stdout, "");
        line.to_string()
    }

    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let ran = self.ok();
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
    }
}

/// Runs the binary with nothing on standard input.
pub fn forebay<A: AsRef<OsStr>>(arguments: &[A]) -> Ran {
    forebay_with_input(arguments, "")
}

/// Runs the binary with this text on standard input.
pub fn forebay_with_input<A: AsRef<OsStr>>(arguments: &[A], input: &str) -> Ran {
    command(env!("CARGO_BIN_EXE_forebay"), arguments, input)
}

/// Runs another program that starts the binary.
pub fn command<A: AsRef<OsStr>>(program: &str, arguments: &[A], input: &str) -> Ran {
    let mut child = Command::new(program)
        .args(arguments)
        .env_remove("FOREBAY_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // A command that does not read its input may close the pipe, so a failed write is ignored.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("the binary ends");
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Splits a command line at spaces.
pub fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

/// Returns the report of `replay` for the one trace in `path`, cut into the batches of a session.
pub fn replayed(trace: &str, policy: &str, capacity: &str, more: &str) -> serde_json::Value {
    let line = format!("replay TRACE --json --policy {policy} --capacity {capacity}{more}");
    let arguments: Vec<String> =
        words(&line).into_iter().map(|word| word.replace("TRACE", trace)).collect();
    forebay(&arguments).json()["traces"][0].take()
}

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns a file or folder of the reference data: from `FOREBAY_FIXTURES`, beside the clone, or from the small set in
/// the project. If it is missing, prints a message and returns `None`.
pub fn fixture(path: &str) -> Option<PathBuf> {
    let roots = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(workspace().join("../shared/fixtures")),
        Some(workspace().join("fixtures")),
    ];
    let found = roots.into_iter().flatten().map(|root| root.join(path)).find(|path| path.exists());
    if found.is_none() {
        // Written directly to stderr, because the test harness captures what passing tests print.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no fixture {path}: set FOREBAY_FIXTURES to the full set"
        );
    }
    found
}

/// Returns the mixture-of-experts model that every clone has.
pub fn moe() -> String {
    let path = fixture("models/qwen3_moe").expect("the project holds this fixture");
    path.to_str().expect("UTF-8").to_string()
}

/// Returns the demo model that every clone has.
pub fn demo() -> String {
    workspace().join("models/tales-moe-sticky-Q4_K_M.gguf").to_str().expect("UTF-8").to_string()
}

/// Returns the smallest RAM budget that a model runs with, from the error for a smaller one.
pub fn smallest_ram(model: &str, context: usize) -> u64 {
    let context = context.to_string();
    let arguments = ["run", model, "--prompt", "x", "--ram", "1B", "--ctx", &context];
    let line = forebay(&arguments).failed(1);
    let (_, rest) = line.split_once("smallest that works is ").expect("names the smallest");
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a number of bytes")
}

/// Copies the files of a folder.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Makes a model with the chat template of Qwen3 and a context of 16,384 tokens in a new folder.
pub fn chat_model(folder: &Path) -> String {
    let template = fixture("templates/Qwen-Qwen3-0.6B.jinja").expect("the project holds it");
    let source = std::fs::read_to_string(template).unwrap();
    model_with_template(folder, &source, 16384)
}

/// Makes a tiny model with this chat template and context in a new folder.
pub fn model_with_template(folder: &Path, template: &str, context: usize) -> String {
    copy_folder(moe().as_ref(), folder);
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let config = folder.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["max_position_embeddings"] = context.into();
    std::fs::write(&config, json.to_string()).unwrap();
    folder.to_str().expect("UTF-8").to_string()
}

/// Returns a schema that is valid, but whose parser reaches its limit behind eight digits.
pub fn stuck_schema() -> serde_json::Value {
    use serde_json::json;
    let object = |name: String| json!({ "type": "object", "properties": { &name: {} }, "required": [name], "additionalProperties": false });
    let choices: Vec<_> = (0..2100).map(|number| object(format!("x{number}"))).collect();
    json!({
        "type": "object",
        "properties": { "a": { "type": "string", "pattern": "^[0-9]{8}$" }, "b": { "anyOf": choices } },
        "required": ["a", "b"],
        "additionalProperties": false,
    })
}
