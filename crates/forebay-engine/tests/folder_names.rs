//! Tests the tensor names of Hugging Face folders: the same model under either name of its layers, and the parts of a
//! multimodal model that are left out.

mod support;

use std::path::Path;

use forebay_engine::{Session, SessionOptions, inspect};
use support::{copied, fixture};

fn logits(folder: &Path) -> Vec<u32> {
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::open(folder, &options, &mut |_, _| {}).unwrap();
    let logits = session.logits(&[3, 14, 15, 92, 65], None).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Kimi K2.5 is published with `language_model.model.layers.`, and transformers 5 saves it with `language_model.model.blocks.`.
#[test]
fn kimi_k25_is_the_same_under_either_name_of_its_layers() {
    let Some(folder) = fixture("models/kimi_k25") else { return };
    let copy = copied("kimi_k25").unwrap();
    let path = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..header].to_vec()).unwrap();
    // Both names have the same length, so the header keeps its own.
    let renamed = text.replace("language_model.model.blocks.", "language_model.model.layers.");
    assert_ne!(text, renamed, "the fixture has the other name");
    bytes[8..header].copy_from_slice(renamed.as_bytes());
    // The copy of a read-only file is read-only too.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();

    assert_eq!(logits(copy.path()), logits(&folder));
    for path in [copy.path(), &folder] {
        let left_out = inspect(path).unwrap().model.left_out.expect("parts are left out");
        assert!(left_out.contains("see images"), "{left_out}");
        assert!(!left_out.contains("predict further"), "{left_out}");
    }
}
