//! Tests the configuration file, `config` and the manual pages.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{Ran, demo, forebay};
use crate::pull::ended;

/// Runs the binary with a configuration file of this text.
fn run(home: &Path, text: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let folder = home.join(".config/forebay");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.toml"), text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).env("HOME", home).env_remove("XDG_CONFIG_HOME");
    for name in ["FOREBAY_LOG", "FOREBAY_MODELS", "FOREBAY_CONFIG", "XDG_DATA_HOME"] {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    ended(command.spawn().unwrap())
}

#[test]
fn a_flag_comes_before_a_variable_and_a_variable_before_the_file() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let file = "[run]\nmax-tokens = 3\nseed = 1\ntemperature = 0\nraw = true\n";
    let model = demo();
    let tokens = |text: &str, more: &[&str]| {
        let line = [&["run", &model, "-p", "The sea", "--json"], more].concat();
        run(home, text, &line, &[]).json()["generated_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(file, &[]), 3);
    assert_eq!(tokens(file, &["-n", "5"]), 5);
    assert_eq!(tokens("max-tokens = 4\n[run]\nraw = true", &[]), 4);
    assert_eq!(tokens("max-tokens = 4\n[run]\nraw = true\nmax-tokens = 2", &[]), 2);

    let (one, two, three) = (home.join("one"), home.join("two"), home.join("three"));
    for (folder, name) in [(&one, "one"), (&two, "two"), (&three, "three")] {
        fs::create_dir(folder).unwrap();
        fs::copy(&model, folder.join(format!("{name}.gguf"))).unwrap();
    }
    let text = format!("models = '{}'", one.display());
    let listed = |arguments: &[&str], variables: &[(&str, &str)]| {
        let list = run(home, &text, &[&["list", "--json"], arguments].concat(), variables).json();
        list["models"][0]["name"].as_str().unwrap().to_owned()
    };
    assert_eq!(listed(&[], &[]), "one");
    let variable = [("FOREBAY_MODELS", two.to_str().unwrap())];
    assert_eq!(listed(&[], &variable), "two");
    assert_eq!(listed(&["--models", three.to_str().unwrap()], &variable), "three");
    // Names of the file's folder work in every command, also in those that take none.
    run(home, &text, &["tokenize", "one", "--text", "x"], &[]).ok();
    run(home, &text, &["completions", "bash"], &[]).ok();
}

#[test]
fn config_says_what_is_in_force_and_from_where() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let text = "log = 'info'\nctx = 2048\n[run]\nctx = 4096\n";
    let variables = [("FOREBAY_MODELS", "/some/where")];
    let document = run(home, text, &["config", "--json"], &variables).json();
    let row = |setting: &str| {
        let rows = document["settings"].as_array().unwrap();
        let row = rows.iter().find(|row| row["setting"] == setting).unwrap();
        (row["value"].as_str().unwrap().to_owned(), row["from"].as_str().unwrap().to_owned())
    };
    let file = home.join(".config/forebay/config.toml").display().to_string();
    assert_eq!(row("models"), ("/some/where".into(), "FOREBAY_MODELS".into()));
    assert_eq!(row("log"), ("info".into(), file.clone()));
    assert_eq!(row("run --ctx"), ("4096".into(), file.clone()));
    assert_eq!(row("bench --ctx"), ("2048".into(), file.clone()));
    assert_eq!(document["file"].as_str(), Some(file.as_str()));
    let table = run(home, text, &["config"], &variables).ok().stdout;
    assert!(table.starts_with("SETTING") && table.contains("run --ctx"), "{table}");
    let none = run(home, "", &["config"], &[("FOREBAY_CONFIG", "")]).ok().stdout;
    assert!(none.contains("models") && none.contains("default"), "{none}");
}

#[test]
fn mistakes_in_the_file_are_errors_with_its_name() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    for (text, why) in [
        ("rma = '8GiB'", "unknown key 'rma'"),
        ("[run]\nram = '8'", "did you mean 8GiB?"),
        ("[rum]\nram = '8GiB'", "[rum] is no command"),
        ("[run]\nram '8GiB'", "config.toml: "),
    ] {
        let error = run(home, text, &["list"], &[]).failed(2);
        assert!(error.contains("config.toml: ") && error.contains(why), "{error}");
    }
    let error = run(home, "", &["list"], &[("FOREBAY_CONFIG", "/no/such/file")]).failed(2);
    assert!(error.contains("/no/such/file: the configuration cannot be read"), "{error}");
    let error = run(home, "", &["list"], &[("FOREBAY_CONFIG", "/dev/null")]).failed(2);
    assert!(error.contains("is not a file"), "{error}");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man");
    let pages = pages.to_str().unwrap();
    forebay(&["man", pages]).ok();
    let top = fs::read_to_string(format!("{pages}/forebay.1")).unwrap();
    assert!(top.contains(".TH") && top.contains("forebay\\-pull"), "{top}");
    let run = fs::read_to_string(format!("{pages}/forebay-run.1")).unwrap();
    assert!(run.contains("\\-\\-ram") && run.contains("forebay run"), "{run}");
    assert!(!std::path::Path::new(&format!("{pages}/forebay-man.1")).exists());
    let error = forebay(&["man", pages]).failed(2);
    assert!(error.contains("--force"), "{error}");
    forebay(&["man", pages, "--force"]).ok();
}
