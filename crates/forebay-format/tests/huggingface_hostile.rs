//! Damaged and malicious Hugging Face folders give errors.

use std::path::Path;

use forebay_format::{
    Absent, Catalog, FormatError, TemplateSource, TensorType, parse_safetensors_bytes,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// Returns a safetensors file with this header and `data_bytes` zero bytes of data.
fn safetensors(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

const A: &str = r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
const B: &str = r#"{"b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
    "c":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[16,18]}}"#;

fn error(header: &str, data_bytes: usize) -> FormatError {
    parse_safetensors_bytes(&safetensors(header, data_bytes)).unwrap_err()
}

#[test]
fn a_valid_header() {
    let header = parse_safetensors_bytes(&safetensors(B, 18)).unwrap();
    let c = &header.tensors[1];
    assert_eq!((c.name.as_str(), c.ty, c.extent.length), ("c", TensorType::F8_E4M3, 2));
    assert_eq!(c.extent.offset, header.data_offset + 16);
}

#[test]
fn damaged_headers() {
    let bytes = safetensors(A, 12);
    for length in 0..bytes.len() {
        let result = parse_safetensors_bytes(&bytes[..length]);
        assert!(
            matches!(
                result,
                Err(FormatError::Truncated { .. } | FormatError::SafetensorsSize { .. })
            ),
            "{length} bytes: {result:?}"
        );
    }
    assert!(
        matches!(error(A, 13), FormatError::SafetensorsSize { found, expected, .. } if found == expected + 1)
    );
    for length in [100_000_001, 1 << 60, u64::MAX] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        let result = parse_safetensors_bytes(&bytes);
        assert!(matches!(result, Err(FormatError::LimitExceeded { .. })), "{result:?}");
    }
    let invalid = [
        "",
        "[]",
        "{\"a\":1}",
        // These have a gap, an overlap, a size that does not match the shape, and an end before the
        // start.
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
        r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#,
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4,4],"data_offsets":[0,0]}}"#,
        r#"{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,2]}}"#,
        r#"{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}"#,
    ];
    for header in invalid {
        let result = error(header, 3);
        assert!(matches!(result, FormatError::SafetensorsHeader { .. }), "{header}: {result:?}");
    }
    let twice = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}"#;
    let result = error(twice, 2);
    assert!(matches!(result, FormatError::DuplicateTensor { tensor, .. } if tensor == "a"));
    let zero = r#"{"a":{"dtype":"U8","shape":[0,2],"data_offsets":[0,0]}}"#;
    let header = parse_safetensors_bytes(&safetensors(zero, 0)).unwrap();
    assert_eq!((header.tensors.len(), header.empty), (0, vec!["a".to_owned()]));
    let complex = r#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#;
    assert!(matches!(error(complex, 8), FormatError::UnsupportedDtype { .. }));
}

/// Creates a folder with these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}

fn open(folder: &TempDir) -> Result<Catalog, FormatError> {
    Catalog::open(folder.path())
}

const CONFIG: (&str, &[u8]) = ("config.json", b"{}");
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn folders_without_a_model() {
    let result = Catalog::open(Path::new("no/such/folder"));
    assert!(matches!(result, Err(FormatError::Io { .. })));
    assert!(matches!(open(&folder(&[])), Err(FormatError::NoModel { .. })));
    let result = open(&folder(&[("x.gguf", b"")])).unwrap_err();
    assert!(matches!(&result, FormatError::NoModel { why, .. } if why.contains("x.gguf")));
    let result = open(&folder(&[CONFIG, ("reference.safetensors", b"")]));
    assert!(matches!(result, Err(FormatError::NoModel { .. })));
    let result = open(&folder(&[("config.json", b"[1]")]));
    assert!(matches!(result, Err(FormatError::InvalidJson { .. })));
    let result = open(&folder(&[("config.json", b"{")]));
    assert!(matches!(result, Err(FormatError::Json { .. })));
    let deep = "[".repeat(1_000_000);
    let result = open(&folder(&[("config.json", deep.as_bytes())]));
    assert!(matches!(result, Err(FormatError::Json { .. })));
}

#[test]
fn tensors_without_a_model() {
    let file = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#);
        safetensors(&header, 2)
    };
    let (a, b) = (file("a"), file("b"));
    let names = |path: &Path| -> Vec<String> {
        let catalog = Catalog::open_weights(path).unwrap();
        catalog.tensors().iter().map(|tensor| tensor.name.clone()).collect()
    };
    // All safetensors files of the folder are opened, in the order of their names.
    let plain = folder(&[("2.safetensors", &a), ("1.safetensors", &b), ("notes.txt", b"")]);
    assert_eq!(names(plain.path()), ["b", "a"]);
    assert!(open(&plain).is_err());
    // In a folder with `model.safetensors`, only that file is opened. A named file is opened alone.
    let model = folder(&[("model.safetensors", &a), ("other.safetensors", &b), CONFIG]);
    assert_eq!(names(model.path()), ["a"]);
    assert_eq!(names(&model.path().join("other.safetensors")), ["b"]);
    let twice = folder(&[("2.safetensors", &a), ("1.safetensors", &a)]);
    let result = Catalog::open_weights(twice.path());
    assert!(matches!(result, Err(FormatError::DuplicateTensor { .. })));
    let result = Catalog::open_weights(folder(&[]).path());
    assert!(matches!(result, Err(FormatError::NoModel { .. })));
}

#[test]
fn shards() {
    let (a, b) = (safetensors(A, 12), safetensors(B, 18));
    let with_index = |index: &str| {
        open(&folder(&[
            CONFIG,
            ("s1.safetensors", &a),
            ("s2.safetensors", &b),
            (INDEX, index.as_bytes()),
        ]))
    };
    // The index decides. Tensors that it does not name are left out.
    let index = r#"{"weight_map":{"b":"s2.safetensors","a":"s1.safetensors"}}"#;
    let catalog = with_index(index).unwrap();
    assert_eq!(catalog.tensors().len(), 2);
    assert_eq!(catalog.files.len(), 2);
    assert_eq!(catalog.tensor("b").unwrap().extent.file.0, 1);

    let missing = with_index(r#"{"weight_map":{"a":"s3.safetensors"}}"#);
    assert!(
        matches!(missing, Err(FormatError::MissingShard { shard, .. }) if shard == "s3.safetensors")
    );
    let lacking = r#"{"weight_map":{"a":"s1.safetensors","z":"./s1.safetensors"}}"#;
    let catalog = with_index(lacking).unwrap();
    let shard = Some("s1.safetensors".to_owned());
    assert_eq!(catalog.absent, [Absent { tensor: "z".into(), shard }]);
    assert_eq!(catalog.files.len(), 1);
    // Who asks for weights alone may need any of them.
    let folder = folder(&[("s1.safetensors", &a), (INDEX, lacking.as_bytes())]);
    let missing = Catalog::open_weights(folder.path());
    assert!(matches!(missing, Err(FormatError::MissingTensor { tensor, .. }) if tensor == "z"));
    let missing = with_index(r#"{"weight_map":{"a":"x/s1.safetensors"}}"#);
    assert!(matches!(missing, Err(FormatError::MissingShard { .. })));
    for name in ["../s1.safetensors", "/etc/passwd", "..", "", ".", "x/../../s1.safetensors"] {
        let index = format!(r#"{{"weight_map":{{"a":"{name}"}}}}"#);
        assert!(matches!(with_index(&index), Err(FormatError::InvalidShardName { .. })), "{name}");
    }
    for index in ["{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, "[]"] {
        assert!(matches!(with_index(index), Err(FormatError::InvalidJson { .. })), "{index}");
    }
}

#[test]
fn chat_templates() {
    let model = safetensors(A, 12);
    let template = |files: &[(&str, &[u8])]| {
        let files = [&[CONFIG, ("model.safetensors", &model[..])], files].concat();
        let folder = folder(&files);
        let found = open(&folder).unwrap().hugging_face().unwrap().chat_templates.clone();
        let text =
            |source: Option<TemplateSource>| source.map(|s| format!("{} {}", s.origin, s.text));
        (text(found.default), text(found.tool_use))
    };
    let some = |text: &str| Some(text.to_owned());
    let config = ("tokenizer_config.json", &br#"{"chat_template":"in config"}"#[..]);
    assert_eq!(template(&[]), (None, None));
    assert_eq!(template(&[config]), (some("tokenizer_config.json in config"), None));
    let json = ("chat_template.json", &br#"{"chat_template":"in json"}"#[..]);
    assert_eq!(template(&[config, json]), (some("chat_template.json in json"), None));
    let jinja = ("chat_template.jinja", &b"in jinja"[..]);
    assert_eq!(template(&[config, json, jinja]), (some("chat_template.jinja in jinja"), None));

    let list = br#"{"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}]}"#;
    let by_name = br#"{"chat_template":{"tool_use":"t","default":"d"}}"#;
    let both = (some("tokenizer_config.json d"), some("tokenizer_config.json (tool_use) t"));
    assert_eq!(template(&[("tokenizer_config.json", list)]), both);
    assert_eq!(template(&[("tokenizer_config.json", by_name)]), both);
    // The first one is the default one if none is called so.
    let first = br#"{"chat_template":[{"name":"rag","template":"r"},{"name":"x","template":"y"}]}"#;
    let found = template(&[("tokenizer_config.json", first)]);
    assert_eq!(found, (some("tokenizer_config.json r"), None));
    // Files are taken before entries, and if there is the one of the default template, entries do not count.
    let list = ("tokenizer_config.json", &list[..]);
    let tools = ("additional_chat_templates/tool_use.jinja", &b"in tools"[..]);
    let of_file = some("additional_chat_templates/tool_use.jinja in tools");
    assert_eq!(template(&[list, tools]), (both.0.clone(), of_file.clone()));
    assert_eq!(template(&[list, jinja]), (some("chat_template.jinja in jinja"), None));
    assert_eq!(template(&[list, jinja, tools]), (some("chat_template.jinja in jinja"), of_file));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_headers_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = safetensors(B, 18);
        for (at, value) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *value;
        }
        if let Ok(header) = parse_safetensors_bytes(&bytes) {
            for tensor in &header.tensors {
                prop_assert!(tensor.extent.end() <= bytes.len() as u64);
                prop_assert_eq!(
                    tensor.ty.tensor_bytes(&tensor.shape),
                    Some(tensor.extent.length)
                );
            }
        }
    }
}
