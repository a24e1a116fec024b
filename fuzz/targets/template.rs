//! Fuzzes chat templates. An input is the template, optionally followed by a zero byte and the conversation as JSON.
//! Without one, a default conversation is used.
//!
//! Every template first runs as in the program: in a process with the program's limits for memory and time. What reaches a
//! limit is no finding, unless its stack was too small, and goes no further. The others then run in the fuzzer's process, which
//! sees their coverage, and must give the same prompts with [`MEMORY_BYTES`].
//!
//! The engine itself panics on some slices (minijinja 3.0: `''[::-1]`). [`ChatTemplate`] turns that into an error, so
//! panics inside the engine are not findings. Panics in this project's code are, also when the engine calls it.

#![no_main]

use std::path::PathBuf;
use std::process::Command;

use forebay_text::{ChatTemplate, CivilTime, RenderInput, TextError};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Argument with which the fuzzer is the process of a template.
const PROCESS: &str = "template-process";
/// Exit status by which the shell reports a segmentation fault.
const SEGMENTATION_FAULT: &str = "139";
/// Memory of a template in the fuzzer's process. The program's limit for inputs of 64 KiB is lower, but counts pages.
const MEMORY_BYTES: usize = 512 << 20;

fn conversation() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is <b>two</b> and two?"},
        {"role": "assistant", "content": "<think>2 + 2</think>Four.", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        ]},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "Thanks \u{1f600}"}]},
    ])
}

/// Runs a template if this process was started for one. Otherwise prepares the fuzzer.
fn start() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|argument| argument == PROCESS) {
        // The hook of libFuzzer ends the process. In the program, a panic becomes an error.
        std::panic::set_hook(Box::new(|_| {}));
        let served = forebay_text::serve_template_within_limits();
        std::process::exit(i32::from(served.is_err()));
    }
    forebay_text::isolate_templates(|| {
        let program = std::env::current_exe().expect("the fuzzer has a path");
        let mut command = Command::new("sh");
        command.args(["-c", "\"$0\" \"$1\"; echo $? >\"$2\""]).arg(program).arg(PROCESS);
        command.arg(status());
        command
    });
    tolerate_the_engine();
}

/// Returns the file for the exit status of the last process of a template.
fn status() -> PathBuf {
    std::env::temp_dir().join(format!("forebay-fuzz-template-{}", std::process::id()))
}

/// Panics that start in the engine unwind to where they are caught. All others end the run.
fn tolerate_the_engine() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.location().is_some_and(|at| at.file().contains("/minijinja-")) {
            report(panic);
        }
    }));
}

/// Returns true if the template reached a limit of its process.
///
/// # Panics
/// Panics if the process ended because its stack was too small, which is a finding.
fn reached_a_limit(error: &TextError) -> bool {
    const LIMITS: [&str; 4] =
        ["it takes too long", "it needs more memory", "its text is too long", "its process ended"];
    let TextError::TemplateFailed { reason } = error else { return false };
    let reached = LIMITS.iter().any(|limit| reason.starts_with(limit));
    if reached {
        let status = std::fs::read_to_string(status()).unwrap_or_default();
        assert_ne!(status.trim(), SEGMENTATION_FAULT, "the stack was too small");
    }
    reached
}

fuzz_target!(init: start(), |data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (source, messages) = text.split_once('\0').unwrap_or((text, ""));
    let isolated = ChatTemplate::from_source(source, "<s>", "</s>");
    if isolated.as_ref().is_err_and(reached_a_limit) {
        return;
    }
    let mut own = None;
    forebay_fuzz::within(MEMORY_BYTES, || {
        own = ChatTemplate::in_this_process(source, "<s>", "</s>").ok();
    });
    assert_eq!(isolated.is_ok(), own.is_some(), "one process compiles the template");
    let (Ok(isolated), Some(own)) = (isolated, own) else { return };
    let messages = serde_json::from_str(messages).unwrap_or_else(|_| conversation());
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {}}}]);
    for tools in [None, Some(tools)] {
        let input = RenderInput {
            messages: messages.clone(),
            tools,
            add_generation_prompt: true,
            now: CivilTime::parse("2023-11-14T22:13:20"),
            ..RenderInput::default()
        };
        let expected = isolated.render(&input);
        if expected.as_ref().is_err_and(reached_a_limit) {
            continue;
        }
        forebay_fuzz::within(MEMORY_BYTES, || {
            let found = own.render(&input);
            assert_eq!(found.ok(), expected.as_ref().ok().cloned());
        });
    }
});
