//! Tests the chat in a real pseudo-terminal, with its line editor.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::harness::{chat_model, demo, forebay, forebay_with_input};
use crate::pull::hub::{Answer, Hub, Served};

const O_NOCTTY: i32 = rustix::fs::OFlags::NOCTTY.bits() as i32;
const PATIENCE: Duration = Duration::from_secs(120);
const PASTE_BEGIN: &str = "\u{1b}[200~";
const PASTE_END: &str = "\u{1b}[201~";

/// A program on its own terminal.
pub struct Terminal {
    keyboard: File,
    child: Child,
    screen: Arc<Mutex<String>>,
    reader: std::thread::JoinHandle<()>,
    /// Number of bytes of the screen that were already examined.
    seen: usize,
}

impl Terminal {
    pub fn start(arguments: &[&str], state: &Path) -> Terminal {
        Terminal::of_columns(100, arguments, state)
    }

    /// Starts a program on a terminal of this width, in the folder `state`.
    pub fn of_columns(columns: u16, arguments: &[&str], state: &Path) -> Terminal {
        Terminal::with(columns, arguments, state, &[])
    }

    fn with_environment(arguments: &[&str], state: &Path, variables: &[(&str, &str)]) -> Terminal {
        Terminal::with(100, arguments, state, variables)
    }

    fn with(
        columns: u16,
        arguments: &[&str],
        state: &Path,
        variables: &[(&str, &str)],
    ) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).expect("the terminal is ours");
        unlockpt(&master).expect("the terminal opens");
        let size = Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).expect("a size");
        let name = ptsname(&master, Vec::new()).expect("a name").into_string().expect("UTF-8");
        let open = || {
            let file = File::options().read(true).write(true).custom_flags(O_NOCTTY).open(&name);
            Stdio::from(file.expect("the terminal opens"))
        };
        let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(arguments)
            .env("FOREBAY_LOG", "forebay::chat=trace")
            .env("XDG_STATE_HOME", state)
            .env("NO_COLOR", "1")
            .current_dir(state.parent().expect("a folder of the test"))
            .env("TERM", "xterm-256color")
            .envs(variables.iter().copied())
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .spawn()
            .expect("the binary starts");
        let keyboard = File::from(master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut output, mut answers) =
            (keyboard.try_clone().expect("a handle"), keyboard.try_clone().expect("a handle"));
        let shared = screen.clone();
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Linux reports the end of the terminal as an error.
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                // The editor asks for the position of the cursor.
                for _ in text.matches("\u{1b}[6n") {
                    let _ = answers.write_all(b"\x1b[1;1R");
                }
                shared.lock().unwrap().push_str(&text);
            }
        });
        Terminal { keyboard, child, screen, reader, seen: 0 }
    }

    pub fn keys(&mut self, text: &str) {
        // A terminal accepts a few kilobytes at a time.
        for piece in text.as_bytes().chunks(256) {
            self.keyboard.write_all(piece).expect("typed");
        }
    }

    /// Waits until new output contains `text`. Returns the output since the last wait.
    pub fn wait(&mut self, text: &str) -> String {
        let started = Instant::now();
        loop {
            let screen = self.screen.lock().unwrap()[self.seen..].to_owned();
            if let Some(at) = screen.find(text) {
                let length = at + text.len();
                self.seen += length;
                return screen[..length].to_owned();
            }
            assert!(started.elapsed() < PATIENCE, "no {text:?} in {screen:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the editor is ready, which is when it asks for the cursor.
    pub fn ready(&mut self) {
        self.wait("\u{1b}[6n");
    }

    /// Types a line. Returns the program's output until it was ready again.
    pub fn line(&mut self, text: &str) -> String {
        self.keys(text);
        self.keys("\r");
        self.wait("\u{1b}[?2004l");
        self.wait("\u{1b}[6n")
    }

    pub fn status(mut self) -> Option<i32> {
        self.child.wait().expect("the program ends").code()
    }

    /// Waits until the program ends. Returns everything that it wrote, and its exit status.
    pub fn end(mut self) -> (String, Option<i32>) {
        let status = self.child.wait().expect("the program ends").code();
        self.reader.join().expect("the terminal is read to its end");
        let screen = self.screen.lock().unwrap().clone();
        (screen, status)
    }
}

/// Returns the text without escape sequences that begin with `ESC [`.
pub fn plain(output: &str) -> String {
    let mut parts = output.split("\u{1b}[");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |at| at + 1);
        text.push_str(&part[end..]);
    }
    text
}

/// Returns the ids of the last prompt in the log.
fn prompt_ids(output: &str) -> Vec<u32> {
    let text = plain(output);
    let (_, rest) = text.rsplit_once("ids=[").expect("the log has the ids");
    let list = rest.split(']').next().unwrap_or_default();
    list.split(", ").map(|id| id.parse().unwrap_or_else(|_| panic!("no id: {id:?}"))).collect()
}

#[test]
fn four_turns_with_a_long_paste_are_saved_and_loaded_token_for_token() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let model = chat_model(&directory.path().join("model"));
    let arguments = ["run", &model, "-n", "8", "--temperature", "0", "--ctx", "16384"];
    let state = directory.path().join("state");

    let mut chat = Terminal::start(&arguments, &state);
    chat.ready();
    chat.line("Hello there");
    let lines: Vec<String> =
        (0..200).map(|i| format!("Line {i} of a text with 7,000 bytes")).collect();
    let text: String = lines.join("\r").chars().take(7000).collect();
    chat.keys(&format!("{PASTE_BEGIN}{text}{PASTE_END}"));
    chat.line("");
    chat.line("\"\"\"\rTwo\rlines\"\"\"");
    chat.line("The fourth");
    assert!(chat.line("/stats").contains("context"));
    assert!(chat.line(&format!("/save {}", at("a.json"))).contains("the conversation is in"));
    // Its own file may be replaced, but no other one.
    assert!(chat.line("/save").contains("the conversation is in"));
    std::fs::write(at("other.json"), "").unwrap();
    assert!(chat.line(&format!("/save {}", at("other.json"))).contains("exists"));
    let expected = prompt_ids(&chat.line("And now?"));
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));

    let saved = std::fs::read_to_string(at("a.json")).unwrap();
    let messages: serde_json::Value = serde_json::from_str(&saved).unwrap();
    let messages = messages["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 8);
    assert_eq!(messages[2]["content"], text.replace('\r', "\n"));
    assert_eq!(messages[4]["content"], "Two\nlines");

    let mut chat = Terminal::start(&arguments, &state);
    chat.ready();
    assert!(chat.line(&format!("/load {}", at("a.json"))).contains("4 turns"));
    chat.line(&format!("/save {}", at("b.json")));
    assert_eq!(std::fs::read_to_string(at("b.json")).unwrap(), saved);
    assert_eq!(prompt_ids(&chat.line("And now?")), expected);
    // Ctrl-D on an empty line ends the chat.
    chat.keys("\u{4}");
    assert_eq!(chat.status(), Some(0));

    // The template makes the prompt from the saved messages.
    let mut all: Vec<serde_json::Value> = messages.clone();
    all.push(serde_json::json!({"role": "user", "content": "And now?"}));
    let prompt =
        forebay_with_input(&["render", &model], &serde_json::json!(all).to_string()).ok().stdout;
    let ids = forebay(&[
        "tokenize",
        &model,
        "--no-special",
        "--parse-special",
        "--json",
        "--text",
        &prompt,
    ])
    .json();
    assert_eq!(ids["ids"], serde_json::json!(expected));
}

#[test]
fn earlier_inputs_come_back_and_ctrl_c_at_the_prompt_quits() {
    let directory = tempfile::tempdir().unwrap();
    let model = chat_model(&directory.path().join("model"));
    let state = directory.path().join("state");
    let arguments = ["run", &model, "-n", "2"];
    let mut chat = Terminal::start(&arguments, &state);
    chat.ready();
    chat.line("/set seed 12");
    chat.keys("/bye\r");
    assert_eq!(chat.status(), Some(0));

    let mut chat = Terminal::start(&arguments, &state);
    chat.ready();
    // Pressing the up arrow twice goes to the input before the last one.
    chat.keys("\u{1b}[A");
    chat.wait("/bye");
    chat.keys("\u{1b}[A");
    chat.wait("/set seed 12");
    assert!(chat.line("3").contains("seed is 123"));
    chat.keys("\u{3}");
    assert_eq!(chat.status(), Some(130));

    let file = state.join("forebay/chat-history");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "others must not read what was typed");
}

/// A model that the library lacks is downloaded if the user agrees.
#[test]
fn run_offers_the_download_of_a_model_on_the_hub() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().to_str().unwrap();
    let models = directory.path().join("models");
    let model = Served::large("m-Q8_0.gguf", std::fs::read(demo()).unwrap());
    let hub = Hub::start(vec![model], |_, _| Answer::Usual);
    let variables = [
        ("HOME", home),
        ("FOREBAY_MODELS", models.to_str().unwrap()),
        ("HF_ENDPOINT", hub.address.as_str()),
        ("HF_TOKEN", "t"),
    ];
    let arguments = ["run", "o/r", "--raw", "-p", "The sea", "-n", "2", "--temperature", "0"];
    let state = directory.path().join("state");
    let ask = || {
        let mut run = Terminal::with_environment(&arguments, &state, &variables);
        run.wait("o/r is not downloaded.");
        run.wait("Download o/r:Q8_0 (");
        run.wait(") now? [Y/n] ");
        run
    };
    let mut run = ask();
    run.keys("n\r");
    run.wait("not downloaded: forebay pull o/r:Q8_0 does it later");
    assert_eq!(run.status(), Some(1));
    assert!(!models.exists(), "nothing was begun");
    let mut run = ask();
    run.keys("\r");
    assert_eq!(run.status(), Some(0));
    assert!(models.join("manifests/o%2Fr%3AQ8_0.json").exists());
    // The second time it is there.
    let run = Terminal::with_environment(&arguments, &state, &variables);
    let screen = run.screen.clone();
    assert_eq!(run.status(), Some(0));
    assert!(!screen.lock().unwrap().contains("Download"));
}
