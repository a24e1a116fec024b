//! Tests `pack`, `verify`, and packs in every command that takes a model.

use std::fs;

use crate::harness::{demo, forebay, moe};

#[test]
fn a_pack_is_a_model_like_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_string();
    for (number, model) in [moe(), demo()].into_iter().enumerate() {
        let pack = path(&format!("{number}.fbay"));
        let report = forebay(&["pack", &model, "-o", &pack, "--json"]).json();
        assert_eq!(report["bytes"].as_u64(), Some(fs::metadata(&pack).unwrap().len()));
        assert!(report["buffer_bytes"].as_u64().unwrap() <= 96 << 20);
        let again = forebay(&["pack", &model, "-o", &pack]).failed(2);
        assert!(again.contains("--force"), "{again}");
        forebay(&["pack", &model, "-o", &pack, "--force"]).ok();

        let verified = forebay(&["verify", &pack, "--json"]).json();
        assert_eq!(verified["damaged_chunks"], 0);
        assert!(forebay(&["verify", &pack]).ok().stderr.contains("undamaged"));
        let text = forebay(&["inspect", &pack]).ok().stdout;
        assert!(text.contains("pack v2.0 of") || text.contains("pack v1.0 of"), "{text}");

        let (one, other) = (path("one"), path("other"));
        let tokens = "5,6,7,8";
        forebay(&["logits", &model, "--tokens", tokens, "-o", &one, "--force"]).ok();
        let report =
            forebay(&["logits", &pack, "--tokens", tokens, "-o", &other, "--json", "--force"])
                .json();
        assert_eq!(report["statistics"]["checksums"], "on");
        assert!(fs::read(&one).unwrap() == fs::read(&other).unwrap());
        let quiet =
            ["logits", &pack, "--tokens", tokens, "-o", &other, "--json", "--force", "--no-verify"];
        assert_eq!(forebay(&quiet).json()["statistics"]["checksums"], "off");
        let said = forebay(&["tokenize", &pack, "--text", "Once upon a time"]).ok().stdout;
        assert_eq!(said, forebay(&["tokenize", &model, "--text", "Once upon a time"]).ok().stdout);
    }
    let back = path("back.gguf");
    forebay(&["pack", &path("1.fbay"), "--to-gguf", &back]).ok();
    assert!(fs::read(&back).unwrap() == fs::read(demo()).unwrap());
    let folder = path("folder");
    forebay(&["pack", &path("0.fbay"), "--to-huggingface", &folder]).ok();
    assert!(
        forebay(&["pack", &path("0.fbay"), "--to-huggingface", &folder])
            .failed(2)
            .contains("is not empty")
    );
    assert!(
        forebay(&["pack", &path("0.fbay"), "--to-gguf", &path("x")])
            .failed(1)
            .contains("--to-huggingface")
    );
}

#[test]
fn damage_and_wrong_use_are_said_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let pack = directory.path().join("m.fbay");
    let name = pack.to_str().unwrap();
    forebay(&["pack", &moe(), "-o", name]).ok();
    let mut bytes = fs::read(&pack).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    fs::write(&pack, &bytes).unwrap();
    let ran = forebay(&["verify", name]);
    assert_eq!(ran.status, Some(1));
    assert!(ran.stderr.contains("1 of ") && ran.stdout.contains("norms"), "{}", ran.stdout);
    bytes.truncate(last);
    fs::write(&pack, &bytes).unwrap();
    assert!(forebay(&["verify", name]).failed(1).contains("cut off"));
    assert!(forebay(&["inspect", name]).failed(1).contains("cut off"));

    assert!(forebay(&["verify", &demo()]).failed(1).contains("no pack"));
    let refused = forebay(&["run", &demo(), "--prompt", "x", "--no-verify"]).failed(2);
    assert!(refused.contains("--no-verify"), "{refused}");
    forebay(&["pack", &moe()]).failed(2);
    forebay(&["pack", &moe(), "-o", name, "--to-gguf", "x"]).failed(2);
    let nowhere = directory.path().join("missing/m.fbay");
    let line = forebay(&["pack", &moe(), "-o", nowhere.to_str().unwrap()]).failed(1);
    assert!(line.contains("does not exist"), "{line}");
    fs::remove_file(&pack).unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}
