//! Damaged and malicious GGUF files give an error that names the place, never a panic or a huge
//! allocation.

mod raw_gguf;

use forebay_format::{Catalog, FormatError, TensorType, Value, parse_gguf_bytes};
use proptest::prelude::*;
use raw_gguf::{RawGguf, RawTensor, array, string};

fn error(file: &RawGguf) -> FormatError {
    parse_gguf_bytes(&file.bytes()).unwrap_err()
}

/// Returns the error for `RawGguf::small` after a change that makes it invalid.
fn small_with(change: impl FnOnce(&mut RawGguf)) -> FormatError {
    let mut file = RawGguf::small();
    change(&mut file);
    error(&file)
}

#[test]
fn the_small_file_is_valid() {
    let header = parse_gguf_bytes(&RawGguf::small().bytes()).unwrap();
    assert_eq!(header.metadata.architecture(), Some("llama"));
    assert_eq!(header.metadata.u64("llama.block_count"), Some(4));
    assert_eq!(header.metadata.bool("flag"), Some(true));
    assert_eq!(header.metadata.f32("eps"), Some(1e-5));
    let tokens = header.metadata.strings("tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), [&b"a"[..], b"\xff\xfe", b""]);
    assert_eq!(header.metadata.array("nested").unwrap().len(), 2);
    assert_eq!(header.tensors[0].shape, [2, 4]);
    assert_eq!(header.tensors[1].shape, [3, 32]);
    assert_eq!(header.tensors[1].ty, TensorType::Q8_0);
    assert_eq!(header.tensors[1].extent.offset, header.data_offset + 32);
    assert_eq!(header.tensors[1].extent.length, 3 * 34);
}

#[test]
fn version_2_is_read_as_well() {
    let mut file = RawGguf::small();
    file.version = 2;
    assert_eq!(parse_gguf_bytes(&file.bytes()).unwrap().metadata.version, 2);
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = RawGguf::small().bytes();
    for length in 0..bytes.len() {
        let result = parse_gguf_bytes(&bytes[..length]);
        assert!(
            matches!(
                result,
                Err(FormatError::Truncated { .. } | FormatError::TensorOutOfRange { .. })
            ),
            "{length} bytes: {result:?}"
        );
    }
}

#[test]
fn magic_and_version() {
    let result = small_with(|file| file.magic = *b"GGML");
    assert!(matches!(result, FormatError::WrongMagic { found: [b'G', b'G', b'M', b'L'], .. }));
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        let result = small_with(|file| file.version = version);
        assert!(
            matches!(result, FormatError::UnsupportedVersion { version: v, .. } if v == version)
        );
    }
}

#[test]
fn counts_beyond_the_file() {
    for count in [100, 1 << 32, 1 << 60, u64::MAX] {
        let result = small_with(|file| file.tensor_count = Some(count));
        assert!(matches!(result, FormatError::Truncated { what: "the tensor table", .. }));
        let result = small_with(|file| file.key_count = Some(count));
        assert!(matches!(result, FormatError::Truncated { what: "the metadata", .. }));
    }
}

#[test]
fn lengths_beyond_the_file() {
    for length in [10_000, 1 << 60, u64::MAX] {
        let value = [&length.to_le_bytes()[..], b"abc"].concat();
        let result = small_with(|file| file.key("long", 8, &value));
        assert!(matches!(result, FormatError::Truncated { .. }));
        for ty in 0..13 {
            let result = small_with(|file| file.key("many", 9, &array(ty, length, b"")));
            assert!(matches!(result, FormatError::Truncated { .. }), "type {ty}: {result}");
        }
    }
}

#[test]
fn names() {
    let result = small_with(|file| file.keys[1].0 = b"\xff".into());
    assert!(matches!(result, FormatError::NotUtf8 { what: "a metadata key", .. }));
    let result = small_with(|file| file.keys[1].0.clear());
    assert!(matches!(result, FormatError::EmptyName { .. }));
    let result = small_with(|file| file.tensors[0].name = b"\xc3(".into());
    assert!(matches!(result, FormatError::NotUtf8 { what: "a tensor name", .. }));
    let result = small_with(|file| file.keys[1].0 = b"flag".into());
    assert!(matches!(result, FormatError::DuplicateKey { key, .. } if key == "flag"));
    let result = small_with(|file| file.tensors[0].name = b"b.weight".into());
    assert!(matches!(result, FormatError::DuplicateTensor { tensor, .. } if tensor == "b.weight"));
}

#[test]
fn values() {
    let result = small_with(|file| file.key("x", 13, &[0; 8]));
    assert!(matches!(result, FormatError::UnknownValueType { id: 13, key, .. } if key == "x"));
    let result = small_with(|file| file.key("x", 9, &array(99, 0, b"")));
    assert!(matches!(result, FormatError::UnknownValueType { id: 99, .. }));
    let result = small_with(|file| file.key("x", 7, &[2]));
    assert!(matches!(result, FormatError::InvalidBool { found: 2, .. }));
    let deep = (0..1000).fold(array(0, 0, b""), |inner, _| array(9, 1, &inner));
    let result = small_with(|file| file.key("x", 9, &deep));
    assert!(matches!(result, FormatError::LimitExceeded { what: "the nesting of an array", .. }));
}

#[test]
fn strings_that_are_not_utf8_are_kept_raw() {
    let mut file = RawGguf::small();
    file.key("raw", 8, &string(b"\xf0\x9f"));
    let header = parse_gguf_bytes(&file.bytes()).unwrap();
    assert_eq!(header.metadata.str("raw"), None);
    assert_eq!(header.metadata.get("raw").and_then(Value::as_bytes), Some(&b"\xf0\x9f"[..]));
}

#[test]
fn alignment() {
    for alignment in [0u32, 3, 33, 1 << 21, u32::MAX] {
        let result = small_with(|file| file.key("general.alignment", 4, &alignment.to_le_bytes()));
        assert!(matches!(result, FormatError::InvalidAlignment { .. }), "{alignment}");
    }
    let result = small_with(|file| file.key("general.alignment", 8, &string(b"32")));
    assert!(matches!(result, FormatError::InvalidAlignment { .. }));

    let mut file = RawGguf::small();
    file.key("general.alignment", 4, &4096u32.to_le_bytes());
    file.alignment = 4096;
    assert!(matches!(error(&file), FormatError::Misaligned { offset: 32, alignment: 4096, .. }));
    file.tensors[1].offset = 4096;
    file.data.resize(4096 + 102, 0);
    let header = parse_gguf_bytes(&file.bytes()).unwrap();
    assert_eq!(header.alignment, 4096);
    assert_eq!(header.tensors[1].extent.offset, 8192);
}

#[test]
fn shapes() {
    let shape = |dimensions: &[u64]| {
        let dimensions = dimensions.to_vec();
        small_with(|file| file.tensors[1].dimensions = dimensions)
    };
    assert!(matches!(shape(&[]), FormatError::DimensionCount { found: 0, .. }));
    assert!(matches!(shape(&[32; 5]), FormatError::DimensionCount { found: 5, .. }));
    for bad in [&[33][..], &[16, 2], &[32, 1 << 62], &[32, u64::MAX, 8]] {
        assert!(matches!(shape(bad), FormatError::InvalidShape { .. }), "{bad:?}");
    }
    for empty in [&[0][..], &[32, 0], &[0, 3], &[0, u64::MAX, u64::MAX]] {
        let mut file = RawGguf::small();
        file.tensors[1].dimensions = empty.to_vec();
        let header = parse_gguf_bytes(&file.bytes()).unwrap();
        assert_eq!((header.tensors.len(), header.empty), (1, vec!["b.weight".to_owned()]));
    }
    let result = small_with(|file| file.tensors[1].ty = 36);
    assert!(matches!(&result, FormatError::UnknownTensorType { id: 36, .. }));
    let message = result.to_string();
    assert!(message.contains("b.weight") && message.contains("36") && message.contains("Q4_K"));
}

#[test]
fn places() {
    for offset in [64, 1 << 40, u64::MAX - 31] {
        let result = small_with(|file| file.tensors[1].offset = offset);
        assert!(matches!(result, FormatError::TensorOutOfRange { .. }), "{offset}");
    }
    let result = small_with(|file| file.tensors[1].offset = 33);
    assert!(matches!(result, FormatError::Misaligned { .. }));
    let result = small_with(|file| file.tensors[1].offset = 0);
    assert!(matches!(result, FormatError::TensorsOverlap { .. }));
    let result = small_with(|file| file.tensors.push(RawTensor::f32("c", &[1], 96)));
    assert!(matches!(result, FormatError::TensorsOverlap { tensor, .. } if tensor == "b.weight"));
    let result = small_with(|file| file.tensors[1].dimensions = vec![32, 1 << 20]);
    assert!(matches!(result, FormatError::TensorOutOfRange { tensor, .. } if tensor == "b.weight"));
}

/// A sparse file can claim any size without storing data, so its size must not justify a huge
/// header.
#[test]
fn a_huge_sparse_file_does_not_back_a_huge_header() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    let mut file = RawGguf::empty();
    file.key("long", 8, &(1u64 << 40).to_le_bytes());
    std::fs::write(&path, file.bytes()).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 41).unwrap();
    let result = Catalog::open(&path);
    assert!(matches!(result, Err(FormatError::LimitExceeded { .. })), "{result:?}");
}

/// Opening reads only the header, regardless of the size of the weights.
#[test]
fn a_large_file_opens_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.gguf");
    let mut file = RawGguf::empty();
    let tokens: Vec<u8> =
        (0..300_000).flat_map(|i| string(format!("token{i}").as_bytes())).collect();
    file.key("tokenizer.ggml.tokens", 9, &array(8, 300_000, &tokens));
    file.tensors.push(RawTensor::f32("a.weight", &[10 << 20, 1 << 10], 0));
    let header = file.bytes();
    std::fs::write(&path, &header).unwrap();
    let bytes = header.len() as u64 + (40 << 30);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    let start = std::time::Instant::now();
    let catalog = Catalog::open(&path).unwrap();
    eprintln!("opened in {:?}", start.elapsed());
    assert_eq!(catalog.total_bytes(), 40 << 30);
    assert_eq!(catalog.gguf().unwrap().strings("tokenizer.ggml.tokens").unwrap().len(), 300_000);
    // The limit leaves room for a busy machine. Opening takes some milliseconds, and reading the file tens of seconds.
    assert!(start.elapsed().as_secs_f64() < 8.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = RawGguf::small().bytes();
        for (at, value) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check(&bytes);
    }

    #[test]
    fn random_values_in_the_header_never_panic(
        at in 0usize..400,
        value in prop_oneof![any::<u64>(), (0u32..64).prop_map(|bit| 1 << bit)],
    ) {
        let mut bytes = RawGguf::small().bytes();
        let at = at.min(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        check(&bytes);
    }
}

/// Checks that parsed tensors lie inside the file with the size of their shape, and that errors
/// have a message.
fn check(bytes: &[u8]) {
    match parse_gguf_bytes(bytes) {
        Ok(header) => {
            for tensor in &header.tensors {
                assert!(tensor.extent.end() <= bytes.len() as u64);
                assert_eq!(tensor.ty.tensor_bytes(&tensor.shape), Some(tensor.extent.length));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[test]
#[should_panic(expected = "overflow")]
fn sums_that_overflow_are_noticed_in_this_crate() {
    let sum = std::hint::black_box(u64::MAX) + std::hint::black_box(1);
    assert_eq!(sum, 0);
}
