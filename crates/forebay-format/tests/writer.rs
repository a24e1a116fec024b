//! The reader reads what the writer writes. A file with too little or too much data is an error.

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Array, ByteStrings, Catalog, FormatError, TensorType, Value};

#[test]
fn round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let tokens: ByteStrings = [&b"a"[..], b"\xff", b""].into_iter().collect();
    let values: Vec<(&str, Value)> = vec![
        ("general.architecture", "llama".into()),
        ("general.alignment", 64u32.into()),
        ("u8", Value::U8(255)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(65535)),
        ("i16", Value::I16(-2)),
        ("i32", Value::I32(-3)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f32", 1.5f32.into()),
        ("f64", Value::F64(-2.5)),
        ("bool", true.into()),
        ("tokens", tokens.into()),
        ("floats", vec![1.0f32, 2.0].into()),
        ("types", vec![1i32, -6].into()),
        ("bools", Value::Array(Array::Bool(vec![true, false]))),
        ("nested", Value::Array(Array::Array(vec![Array::U16(vec![7]), Array::I64(vec![])]))),
    ];
    let mut writer = GgufWriter::new(&path);
    for (key, value) in &values {
        writer.set(key, value.clone()).unwrap();
    }
    writer.add_tensor("odd", TensorType::F32, &[3]).unwrap();
    writer.add_tensor("experts", TensorType::Q4_K, &[2, 3, 256]).unwrap();
    writer.add_tensor("last", TensorType::I8, &[5]).unwrap();
    let mut data = writer.start(Vec::new()).unwrap();
    let contents: Vec<Vec<u8>> = (data.tensors().iter())
        .map(|tensor| (0..tensor.extent.length).map(|i| (i % 251) as u8).collect())
        .collect();
    for (number, content) in contents.iter().enumerate() {
        assert_eq!(data.next_tensor().unwrap().0.name, ["odd", "experts", "last"][number]);
        // The data arrives in pieces, as from a stream.
        content.chunks(100).for_each(|piece| data.write(piece).unwrap());
    }
    assert!(data.next_tensor().is_none());
    let planned = data.tensors().to_vec();
    std::fs::write(&path, data.finish().unwrap()).unwrap();

    let catalog = Catalog::open(&path).unwrap();
    assert_eq!(catalog.tensors(), planned);
    let metadata = catalog.gguf().unwrap();
    let read: Vec<(&str, Value)> = metadata.iter().map(|(k, v)| (k, v.clone())).collect();
    assert_eq!(read, values);
    let bytes = std::fs::read(&path).unwrap();
    for (tensor, content) in catalog.tensors().iter().zip(&contents) {
        assert_eq!(tensor.extent.offset % 64, 0);
        assert_eq!(&bytes[tensor.extent.offset as usize..tensor.extent.end() as usize], content);
    }
    assert_eq!(bytes.len() % 64, 0);
}

#[test]
fn every_tensor_takes_exactly_its_bytes() {
    let mut writer = GgufWriter::new("x.gguf".as_ref());
    writer.add_tensor("a", TensorType::F32, &[4]).unwrap();

    let mut data = writer.clone().start(Vec::new()).unwrap();
    data.write(&[0; 15]).unwrap();
    assert_eq!(data.next_tensor().unwrap().1, 1);
    assert!(matches!(data.write(&[0; 2]), Err(FormatError::WriteTensor { .. })));
    assert!(matches!(data.finish(), Err(FormatError::WriteTensor { .. })));

    let mut data = writer.start(Vec::new()).unwrap();
    data.write(&[0; 16]).unwrap();
    assert!(matches!(data.write(&[0]), Err(FormatError::WriteFile { .. })));
    let whole = data.finish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, whole).unwrap();
    assert_eq!(Catalog::open(&path).unwrap().tensors().len(), 1);
}

#[test]
fn what_cannot_be_read_is_not_written() {
    let mut writer = GgufWriter::new("x.gguf".as_ref());
    let deep = (0..9).fold(Array::U8(vec![]), |inner, _| Array::Array(vec![inner]));
    assert!(matches!(writer.set("deep", deep), Err(FormatError::WriteKey { .. })));
    assert!(matches!(writer.set("", 1u32), Err(FormatError::WriteKey { .. })));
    let result = writer.set("general.alignment", 48u32);
    assert!(matches!(result, Err(FormatError::InvalidAlignment { .. })));
    writer.set("general.alignment", 32u32).unwrap();

    let mut add = |name: &str, ty, shape: &[u64]| writer.add_tensor(name, ty, shape).unwrap_err();
    assert!(matches!(add("a", TensorType::U8, &[1]), FormatError::WriteTensor { .. }));
    assert!(matches!(add("a", TensorType::F32, &[]), FormatError::WriteTensor { .. }));
    assert!(matches!(add("a", TensorType::F32, &[1; 5]), FormatError::WriteTensor { .. }));
    assert!(matches!(add("", TensorType::F32, &[1]), FormatError::WriteTensor { .. }));
    let long = "x".repeat(64);
    assert!(matches!(add(&long, TensorType::F32, &[1]), FormatError::WriteTensor { .. }));
    assert!(matches!(add("a", TensorType::Q8_0, &[2, 33]), FormatError::InvalidShape { .. }));
    assert!(matches!(add("a", TensorType::F32, &[0]), FormatError::InvalidShape { .. }));
    assert!(writer.start(Vec::new()).is_ok());
}

#[test]
fn sizes_that_overflow_are_refused() {
    let mut writer = GgufWriter::new("x.gguf".as_ref());
    for name in ["a", "b", "c", "d"] {
        writer.add_tensor(name, TensorType::F32, &[1 << 60]).unwrap();
    }
    assert!(matches!(writer.start(Vec::new()), Err(FormatError::WriteFile { .. })));
}
