//! Tests options and commands of llama.cpp, Ollama and vLLM, and the limits of text that a user gives.

use crate::harness::{demo, forebay, forebay_with_input, moe, words};

#[test]
fn options_with_the_same_meaning_work() {
    let model = demo();
    let ours =
        forebay(&["run", &model, "-p", "Once", "-n", "4", "--temperature", "0", "--ctx", "64"])
            .ok();
    for line in [
        "run -m MODEL -p Once -n 4 --temp 0 --ctx-size 64",
        "run --model MODEL -p Once --n-predict 4 --temp 0 -c 64 -ngl 99 -fa on --jinja -cnv -t 1",
        "-m MODEL -p Once --predict 4 --temp=0 -c 64 --seed -1 --no-mmap",
        "run MODEL Once --num-predict 4 --temp 0 --ctx-size=64 -ngl 0 --no-warmup --color",
    ] {
        let arguments: Vec<String> =
            words(line).iter().map(|word| word.replace("MODEL", &model)).collect();
        assert_eq!(forebay(&arguments).ok().stdout, ours.stdout, "{line}");
    }
    assert_eq!(forebay(&["show", &moe()]).ok().stdout, forebay(&["inspect", &moe()]).ok().stdout);
}

#[test]
fn other_options_and_commands_get_one_sentence() {
    for (line, needed) in [
        ("run -hf", "-hf needs a value"),
        ("run m -ngl 20", "--vram SIZE"),
        ("run m -ncmoe 4", "--cpu-experts"),
        ("run m -ot exps=CPU", "--vram SIZE"),
        ("run m --mmproj x", "text only"),
        ("run m -md draft.gguf", "--mtp on"),
        ("run m --chat-template chatml", "--template-arg"),
        ("run m -ctk q8_0", "--kv-type"),
        ("run m --mirostat 2", "--top-p"),
        ("serve m --api-key secret", "--api-key-file"),
        ("serve m --gpu-memory-utilization 0.9", "--vram SIZE"),
        ("serve m --tensor-parallel-size 2", "--device cuda:N"),
        ("create mine -f Modelfile", "forebay run FILE"),
        ("stop m", "--keep-alive"),
        ("server -m m", "forebay serve MODEL"),
        ("quantize a b", "forebay pack"),
        ("-ngl 99", "forebay run MODEL"),
    ] {
        let said = forebay(&words(line)).failed(2);
        assert!(said.contains(needed), "{line}: {said}");
    }
}

/// `-hf` is not `-h`, and its value is the model.
#[test]
fn a_model_of_hugging_face_is_looked_up() {
    let said = forebay(&["run", "-hf", "owner/no-such-model:Q4_K_M", "-p", "x"]);
    assert_ne!(said.status, Some(0), "{}", said.stdout);
    assert!(said.stderr.contains("owner/no-such-model:Q4_K_M"), "{}", said.stderr);
}

/// Returns the path of a file with more bytes than any text may have, which takes no room on the disk.
fn endless(folder: &std::path::Path) -> String {
    let path = folder.join("endless.txt");
    std::fs::File::create(&path).unwrap().set_len(3 << 30).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn texts_without_an_end_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (model, large) = (moe(), endless(folder.path()));
    for line in [
        "run MODEL -f LARGE",
        "run MODEL -f /dev/zero",
        "run MODEL -p x --system-file LARGE",
        "logits MODEL --tokens @LARGE -o OUT",
        "serve MODEL --api-key-file LARGE --port 0",
        "ps --api-key-file /dev/zero",
        "batch MODEL LARGE -o OUT",
        "plan MODEL --profile LARGE",
        "plan MODEL --profile /dev/zero",
        "assess MODEL --prompts LARGE",
    ] {
        let out = folder.path().join("out");
        let arguments: Vec<String> = words(line)
            .iter()
            .map(|word| word.replace("MODEL", &model).replace("LARGE", &large))
            .map(|word| word.replace("OUT", out.to_str().unwrap()))
            .collect();
        let said = forebay(&arguments).failed(1);
        assert!(said.contains("more than"), "{line}: {said}");
    }
    let text = "x".repeat((64 << 20) + 1);
    for arguments in [&["run", &model][..], &["tokenize", &model], &["render", &model]] {
        let said = forebay_with_input(arguments, &text);
        assert_eq!(said.status, Some(1), "{arguments:?}");
        let needed = if arguments[0] == "render" { "error: " } else { "more than 64 MiB" };
        assert!(said.stderr.contains(needed), "{arguments:?}: {}", said.stderr);
    }
}
