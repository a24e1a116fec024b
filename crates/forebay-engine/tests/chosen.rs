//! Tests loads of chosen tensors and of ranges of them: the bytes are right, and little else is read.

#[path = "support/loaded.rs"]
mod loaded;
mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::load::LoadError;
use forebay_engine::load::{
    Choice, ChosenRequest, DimensionSlice, Next, StreamOrder, TensorStream, load_chosen,
};
use forebay_engine::pack::{PackOptions, pack};
use forebay_format::{Catalog, StoredType, TensorType, WeightsTable, dequantize};
use forebay_options::{BadOption, OptionName};
use forebay_store::{FileSet, IoRecorder, OutputFile};
use loaded::{bytes, going_on};
use support::{fixtures, write_safetensors};

fn whole(table: &WeightsTable) -> Vec<Choice> {
    (0..table.tensors().len()).map(|tensor| Choice { tensor, slice: None }).collect()
}

fn open(path: &Path) -> WeightsTable {
    WeightsTable::open(&[path.to_owned()]).unwrap()
}

/// Writes a file of F16 tensors with random bytes, and returns its path and the bytes of each.
fn made(folder: &Path, shapes: &[&[u64]]) -> (PathBuf, Vec<Vec<u8>>) {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut table, mut data, mut all) = (serde_json::Map::new(), Vec::new(), Vec::new());
    for (index, shape) in shapes.iter().enumerate() {
        let bytes: Vec<u8> =
            (0..2 * shape.iter().product::<u64>()).map(|_| random.u8(..)).collect();
        let offsets = [data.len(), data.len() + bytes.len()];
        let entry = serde_json::json!({"dtype": "F16", "shape": shape, "data_offsets": offsets});
        table.insert(format!("t{index}"), entry);
        data.extend(&bytes);
        all.push(bytes);
    }
    write_safetensors(folder, &table, &data);
    (folder.join("model.safetensors"), all)
}

#[test]
fn fixtures_are_loaded_whole() {
    let root = fixtures();
    let mut paths: Vec<PathBuf> = std::fs::read_dir(root.join("models"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("model.safetensors").exists())
        .collect();
    for folder in std::fs::read_dir(root.join("gguf")).unwrap() {
        let files = std::fs::read_dir(folder.unwrap().path()).unwrap();
        let files = files.map(|entry| entry.unwrap().path());
        paths.extend(files.filter(|path| path.extension().is_some_and(|it| it == "gguf")));
    }
    assert!(paths.len() >= 8, "{paths:?}");
    for path in paths {
        let table = open(&path);
        let files = FileSet::open(&table.files).unwrap();
        let read = |index: usize| {
            let mut bytes = vec![0; table.tensors()[index].extent.length as usize];
            files.read_exact(table.tensors()[index].extent, &mut bytes).unwrap();
            bytes
        };
        let request = ChosenRequest::default();
        let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
        for (index, tensor) in loaded.iter().enumerate() {
            assert!(bytes(tensor) == read(index), "{} of {}", tensor.name, path.display());
        }
        // With conversion, and with so little memory that there are several shares.
        let request = ChosenRequest { to_f32: true, staging_bytes: 1, ..request };
        let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
        for (index, tensor) in loaded.iter().enumerate() {
            let StoredType::Tensor(ty) = table.tensors()[index].ty else {
                panic!("{}", tensor.name)
            };
            if !forebay_format::can_dequantize(ty) {
                assert!(bytes(tensor) == read(index));
                continue;
            }
            let mut values = vec![0.0; tensor.bytes as usize / 4];
            dequantize(ty, &read(index), &mut values).unwrap();
            let wanted: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(tensor.ty, StoredType::Tensor(TensorType::F32));
            assert!(bytes(tensor) == wanted, "{} of {}", tensor.name, path.display());
        }
    }
}

/// Returns the elements of a range of one dimension of an F16 tensor.
fn sliced(all: &[u8], shape: &[u64], slice: DimensionSlice) -> Vec<u8> {
    let inner = 2 * shape[slice.dimension + 1..].iter().product::<u64>() as usize;
    let rows = all.chunks_exact(shape[slice.dimension] as usize * inner);
    let range = slice.start as usize * inner..slice.stop as usize * inner;
    rows.flat_map(|row| row[range.clone()].to_vec()).collect()
}

#[test]
fn slices_of_every_dimension_read_little_else() {
    let folder = tempfile::tempdir().unwrap();
    let shapes: [&[u64]; 4] = [&[300, 70000], &[64, 33, 1000], &[5], &[2000, 3, 100]];
    let (file, all) = made(folder.path(), &shapes);
    let table = open(&file);
    for (tensor, dimension, start, stop) in [
        (0, 0, 17, 130),
        (0, 1, 69000, 70000),
        (0, 1, 0, 60000),
        (1, 0, 63, 64),
        (1, 1, 5, 30),
        (1, 2, 999, 1000),
        (1, 2, 0, 1000),
        (2, 0, 1, 4),
        (2, 0, 3, 3),
        (3, 1, 2, 3),
    ] {
        let slice = DimensionSlice { dimension, start, stop };
        let index = table.find(&format!("t{tensor}")).unwrap();
        let recorder = IoRecorder::new(1 << 16);
        let request =
            ChosenRequest { recorder: Some(recorder.clone()), ..ChosenRequest::default() };
        let choice = Choice { tensor: index, slice: Some(slice) };
        let loaded = load_chosen(&table, &[choice], &request, &mut going_on).unwrap();
        let wanted = sliced(&all[tensor], shapes[tensor], slice);
        assert!(bytes(&loaded[0]) == wanted, "{tensor} {slice:?}");
        assert_eq!(loaded[0].shape[dimension], stop - start);
        let recording = recorder.take();
        assert_eq!(recording.dropped_reads, 0);
        let read: u64 = recording.reads.iter().map(|read| u64::from(read.bytes)).sum();
        // Rows of tensor 0 that are 135 KB apart are read alone, in whole pages. Smaller gaps are read along.
        let wanted_bytes = wanted.len() as u64;
        let most = match (tensor, dimension) {
            (_, 0) => wanted_bytes + 8192,
            (0, _) => wanted_bytes + 300 * 64 * 1024,
            _ => all[tensor].len() as u64 + 8192,
        };
        let most = if (tensor, start) == (0, 69000) { wanted_bytes + 300 * 8192 } else { most };
        assert!((wanted_bytes..=most).contains(&read), "{tensor} {slice:?}: {read}");
    }
}

#[test]
fn other_tensors_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let (file, all) = made(folder.path(), &[&[1 << 20], &[3000], &[1 << 20]]);
    let table = open(&file);
    let recorder = IoRecorder::new(1 << 10);
    let request = ChosenRequest { recorder: Some(recorder.clone()), ..ChosenRequest::default() };
    let tensor = table.find("t1").unwrap();
    let mut told = Vec::new();
    let mut tell = |done, total| {
        told.push((done, total));
        ControlFlow::Continue(())
    };
    let choices = [Choice { tensor, slice: None }];
    let loaded = load_chosen(&table, &choices, &request, &mut tell).unwrap();
    assert!(told.is_sorted() && told.last().is_some_and(|(done, total)| done == total), "{told:?}");
    assert!(bytes(&loaded[0]) == all[1]);
    let read: u64 = recorder.take().reads.iter().map(|read| u64::from(read.bytes)).sum();
    assert!((6000..=6000 + 8192).contains(&read), "{read}");
}

/// Names and bytes of tensors.
type Tensors = Vec<(String, Vec<u8>)>;

/// Returns all tensors of a stream, and the largest number of bytes of memory that they took at a time.
fn drained(mut stream: TensorStream) -> Result<(Tensors, u64), LoadError> {
    let (mut all, mut most) = (Vec::new(), 0);
    loop {
        match stream.next(Duration::from_secs(20))? {
            Next::Tensors(tensors) => {
                let mut seen = Vec::new();
                let mut memory_bytes = 0;
                for tensor in &tensors {
                    if !seen.contains(&Arc::as_ptr(&tensor.memory)) {
                        seen.push(Arc::as_ptr(&tensor.memory));
                        memory_bytes += tensor.memory.bytes();
                    }
                    all.push((tensor.name.clone(), bytes(tensor).to_vec()));
                }
                most = most.max(memory_bytes);
            }
            Next::NotYet => panic!("nothing within 20 s"),
            Next::End => return Ok((all, most)),
        }
    }
}

#[test]
fn streams_keep_the_order_and_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let shapes: Vec<Vec<u64>> = (0..40).map(|index| vec![1000 * (index % 7), 50]).collect();
    let shapes: Vec<&[u64]> = shapes.iter().map(Vec::as_slice).collect();
    let (file, all) = made(folder.path(), &shapes);
    let table = Arc::new(open(&file));
    let budget = 2 << 20;
    let start = |choices, budget| {
        let request = ChosenRequest::default();
        TensorStream::start(Arc::clone(&table), choices, request, StreamOrder::Files, budget)
    };
    let (found, most) = drained(start(whole(&table), budget).unwrap()).unwrap();
    assert!(most <= budget && found.len() == 40, "{most}");
    for (name, bytes) in &found {
        assert!(*bytes == all[name[1..].parse::<usize>().unwrap()], "{name}");
    }
    let nonempty = |(name, bytes): &(String, Vec<u8>)| (!bytes.is_empty()).then(|| name.clone());
    let order: Vec<String> = found.iter().filter_map(nonempty).collect();
    let wanted = (0..40).filter(|index| index % 7 > 0).map(|index| format!("t{index}"));
    assert_eq!(order, wanted.collect::<Vec<_>>());
    assert!(matches!(
        start(whole(&table), 1 << 19).map(|_| ()),
        Err(LoadError::Option(BadOption { name: OptionName::Budget, .. }))
    ));
    let mut backwards = whole(&table);
    backwards.reverse();
    let request = ChosenRequest::default();
    let order = StreamOrder::Choices;
    let stream =
        TensorStream::start(Arc::clone(&table), backwards, request, order, budget).unwrap();
    let (found, most) = drained(stream).unwrap();
    assert!(most <= budget && found.len() == 40, "{most}");
    for (index, (name, bytes)) in found.iter().rev().enumerate() {
        assert!(*name == format!("t{index}") && *bytes == all[index], "{name}");
    }
    // A stream that is dropped early ends its thread.
    drop(start(whole(&table), budget).unwrap());
}

#[test]
fn loads_end_early_and_report_damage() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = made(folder.path(), &[&[1 << 20], &[1 << 20]]);
    let table = open(&file);
    let request = ChosenRequest::default();
    let stopped = load_chosen(&table, &whole(&table), &request, &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(LoadError::Interrupted)));
    request.interrupt.request();
    let stopped = load_chosen(&table, &whole(&table), &request, &mut going_on);
    assert!(matches!(stopped, Err(LoadError::Interrupted)));

    let request = ChosenRequest::default();
    let bad = DimensionSlice { dimension: 0, start: 5, stop: (1 << 20) + 1 };
    let choice = Choice { tensor: 0, slice: Some(bad) };
    let refused = load_chosen(&table, &[choice], &request, &mut going_on);
    assert!(matches!(refused, Err(LoadError::Option(BadOption { name: OptionName::Slices, .. }))));

    let opened = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    opened.set_len(3 << 20).unwrap();
    let error = load_chosen(&table, &whole(&table), &request, &mut going_on).err().unwrap();
    let words = error.to_string();
    assert!(words.contains("t1") && words.contains("model.safetensors"), "{words}");
}

#[test]
fn tensors_of_packs_are_those_of_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixtures().join("models/qwen3_moe");
    let out = folder.path().join("model.fbay");
    let output = OutputFile::replace(&out).unwrap();
    pack(&source, output, PackOptions::default(), &mut |_, _| true).unwrap();
    let table = open(&out);
    let (original, catalog) = (open(&source), Catalog::open(&out).unwrap());
    let files = FileSet::open(&original.files).unwrap();
    let request = ChosenRequest::default();
    let mut compared = 0;
    for (index, tensor) in table.tensors().iter().enumerate() {
        let choice = Choice { tensor: index, slice: None };
        let loaded = load_chosen(&table, &[choice], &request, &mut going_on).unwrap();
        let Some(found) = original.find(&tensor.name) else { continue };
        let mut wanted = vec![0; original.tensors()[found].extent.length as usize];
        files.read_exact(original.tensors()[found].extent, &mut wanted).unwrap();
        assert!(loaded[0].stride.is_none() && bytes(&loaded[0]) == wanted, "{}", tensor.name);
        compared += 1;
    }
    assert!(compared > 10 && catalog.pack.is_some());
    // All of them together, where blocks are read at once: stacks then lie apart.
    let together = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
    assert!(together.iter().all(|tensor| Arc::ptr_eq(&tensor.memory, &together[0].memory)));
}
