//! Tensors of packs, and ranges of them, are those of the source: plain, compact and coded, stacks, and as f32.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::load::LoadError;
use forebay_engine::load::{
    Choice, ChosenRequest, DimensionSlice, LoadedTensor, Next, StreamOrder, TensorStream,
    load_chosen,
};
use forebay_engine::pack::{Codec, PackOptions, pack};
use forebay_format::{StoredType, TensorType, WeightsTable, dequantize};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_options::{BadOption, OptionName};
use forebay_store::{IoRecorder, OutputFile};

#[path = "../../forebay-engine/tests/support/loaded.rs"]
mod loaded;
use loaded::{bytes, going_on};

const CODECS: [Codec; 4] = [Codec::None, Codec::Compact, Codec::Exponents, Codec::Zstd];

fn made(shape: &str, quantisation: &str, folder: &Path) -> PathBuf {
    let path = folder.join("source.gguf");
    let quantisation = Some(quantisation.to_owned());
    let options = SynthOptions { quantisation, layers: Some(1), ..SynthOptions::default() };
    synthesize(shape, OutputFile::replace(&path).unwrap(), &options, &mut |_, _| true).unwrap();
    path
}

fn packed(source: &Path, codec: Codec) -> PathBuf {
    let path = source.with_file_name(format!("{codec:?}.fbay"));
    let options = PackOptions { codec, ..PackOptions::default() };
    pack(source, OutputFile::replace(&path).unwrap(), options, &mut |_, _| true).unwrap();
    path
}

fn open(path: &Path) -> WeightsTable {
    WeightsTable::open(&[path.to_owned()]).unwrap()
}

/// A few ranges of every dimension: whole, at the ends, within blocks of compact weights and across them, and empty ones.
fn slices(shape: &[u64]) -> Vec<Option<DimensionSlice>> {
    let mut all = vec![None];
    for (dimension, &size) in shape.iter().enumerate() {
        let bounds = [
            (0, size),
            (0, 1),
            (size - 1, size),
            (size / 3, size / 3 + size.div_ceil(2)),
            (size / 2, size / 2),
            (size / 4 + 1, size / 4 + 3),
        ];
        let inside = bounds.into_iter().filter(|&(start, stop)| start <= stop && stop <= size);
        all.extend(inside.map(|(start, stop)| Some(DimensionSlice { dimension, start, stop })));
    }
    all
}

/// Returns the elements of a slice of a tensor, of which each has `width` bytes.
fn cut(whole: &[u8], shape: &[u64], slice: Option<DimensionSlice>, width: usize) -> Vec<u8> {
    let Some(DimensionSlice { dimension, start, stop }) = slice else { return whole.to_vec() };
    let inner = shape[dimension + 1..].iter().product::<u64>() as usize * width;
    let entry = shape[dimension] as usize * inner;
    let ranges = whole.chunks_exact(entry.max(1));
    ranges
        .flat_map(|entry| &entry[start as usize * inner..stop as usize * inner])
        .copied()
        .collect()
}

fn width(tensor: &LoadedTensor) -> usize {
    assert_eq!(tensor.ty.block_elements(), 1, "{} is {}", tensor.name, tensor.ty.name());
    tensor.ty.block_bytes() as usize
}

fn load(table: &WeightsTable, choices: &[Choice], request: &ChosenRequest) -> Vec<LoadedTensor> {
    load_chosen(table, choices, request, &mut going_on).unwrap()
}

/// The tensors of the source, as they are and as f32.
struct Source {
    table: WeightsTable,
    plain: Vec<Vec<u8>>,
    as_f32: Vec<Vec<u8>>,
}

impl Source {
    fn open(path: &Path) -> Source {
        let table = open(path);
        let all: Vec<Choice> =
            (0..table.tensors().len()).map(|tensor| Choice { tensor, slice: None }).collect();
        let read = |to_f32| {
            let request = ChosenRequest { to_f32, ..ChosenRequest::default() };
            load(&table, &all, &request).iter().map(|of| bytes(of).to_vec()).collect::<Vec<_>>()
        };
        let (plain, as_f32) = (read(false), read(true));
        Source { table, plain, as_f32 }
    }
}

/// Compares every slice of every tensor of a pack with the source, in one load and in a stream. Returns how many tensors are in
/// pieces, and how many are compact.
fn compare(source: &Source, path: &Path) -> (usize, usize) {
    let table = Arc::new(open(path));
    let (mut in_pieces, mut compact) = (0, 0);
    let all: Vec<Choice> =
        (0..table.tensors().len()).map(|tensor| Choice { tensor, slice: None }).collect();
    for loaded in load(&table, &all, &ChosenRequest::default()) {
        let of = source.table.find(&loaded.name).unwrap();
        let entries = loaded.shape[0] as usize;
        let stride = loaded.stride.unwrap_or(loaded.bytes / loaded.shape[0]);
        let entry = source.plain[of].len() / entries;
        for (index, expected) in source.plain[of].chunks_exact(entry).enumerate() {
            let address = loaded.address + index as u64 * stride;
            let (shape, bytes_of) = (vec![entry as u64], entry as u64);
            let entry =
                LoadedTensor { address, shape, bytes: bytes_of, stride: None, ..loaded.clone() };
            assert!(
                bytes(&entry) == expected,
                "entry {index} of {} in {}",
                loaded.name,
                path.display()
            );
        }
    }
    for tensor in 0..table.tensors().len() {
        let stored = &table.tensors()[tensor];
        let of = source.table.find(&stored.name).unwrap();
        let StoredType::Tensor(ty) = stored.ty else { panic!("{}", stored.name) };
        let info = table.pack.as_ref().unwrap().tensor(&stored.name).unwrap();
        in_pieces += usize::from(!info.is_contiguous());
        compact += usize::from(ty.compact().is_some());
        let slices = slices(&stored.shape);
        let choices: Vec<Choice> = slices.iter().map(|&slice| Choice { tensor, slice }).collect();
        // With little memory for conversions, there are several shares.
        let ways = [(false, 1, &source.plain[of]), (true, 128 << 20, &source.as_f32[of])];
        for (to_f32, staging_bytes, whole) in ways {
            let request = ChosenRequest { to_f32, staging_bytes, ..ChosenRequest::default() };
            for (loaded, &slice) in load(&table, &choices, &request).iter().zip(&slices) {
                let expected = cut(whole, &stored.shape, slice, width(loaded));
                assert!(bytes(loaded) == expected, "{slice:?} of {} {ty}", stored.name);
                let mut shape = stored.shape.clone();
                if let Some(slice) = slice {
                    shape[slice.dimension] = slice.stop - slice.start;
                }
                assert_eq!(loaded.shape, shape);
                assert_eq!(loaded.stride, None);
            }
        }
    }
    (in_pieces, compact)
}

#[test]
fn every_slice_of_every_dimension_is_that_of_the_source() {
    // Stacks of experts, and attention with gates.
    let folder = tempfile::tempdir().unwrap();
    let source = made("qwen3moe-tiny", "BF16", folder.path());
    let of_source = Source::open(&source);
    for codec in CODECS {
        let (in_pieces, compact) = compare(&of_source, &packed(&source, codec));
        assert!(in_pieces == 3, "{codec:?}: {in_pieces} stacks");
        assert_eq!(compact > 5, codec != Codec::None, "{codec:?}: {compact} compact tensors");
    }
    for ty in ["F16", "F32"] {
        let folder = tempfile::tempdir().unwrap();
        let source = made("llama-tiny", ty, folder.path());
        let of_source = Source::open(&source);
        for codec in [Codec::None, Codec::Zstd] {
            compare(&of_source, &packed(&source, codec));
        }
    }
}

#[test]
fn a_stream_has_the_same_tensors_within_its_budget() {
    let folder = tempfile::tempdir().unwrap();
    let source = made("qwen3moe-tiny", "BF16", folder.path());
    let of_source = Source::open(&source);
    for codec in [Codec::None, Codec::Auto] {
        let table = Arc::new(open(&packed(&source, codec)));
        let largest = of_source.plain.iter().map(Vec::len).max().unwrap() as u64;
        for to_f32 in [false, true] {
            let choices: Vec<Choice> =
                (0..table.tensors().len()).map(|tensor| Choice { tensor, slice: None }).collect();
            let request = ChosenRequest { to_f32, ..ChosenRequest::default() };
            let budget = 4 * largest + (4 << 20);
            let order = StreamOrder::Files;
            let mut stream =
                TensorStream::start(Arc::clone(&table), choices, request, order, budget).unwrap();
            let mut found = 0;
            loop {
                let tensors = match stream.next(Duration::from_secs(60)).unwrap() {
                    Next::Tensors(tensors) => tensors,
                    Next::End => break,
                    Next::NotYet => panic!("a minute is enough"),
                };
                let mut memory: Vec<u64> = Vec::new();
                for tensor in &tensors {
                    let of = of_source.table.find(&tensor.name).unwrap();
                    let expected =
                        if to_f32 { &of_source.as_f32[of] } else { &of_source.plain[of] };
                    assert!(bytes(tensor) == *expected, "{}", tensor.name);
                    memory.push(tensor.memory.bytes());
                    found += 1;
                }
                assert!(memory.iter().max() <= Some(&budget), "{memory:?} of {budget}");
            }
            assert_eq!(found, table.tensors().len());
        }
    }
}

/// Rows need the chunks that they are in, and not the rest of the tensor or of its block.
#[test]
fn little_else_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let source = made("qwen3moe-tiny", "BF16", folder.path());
    for codec in [Codec::None, Codec::Compact, Codec::Zstd] {
        let table = open(&packed(&source, codec));
        let read = |name: &str, slice| {
            let recorder = IoRecorder::new(1 << 16);
            let request =
                ChosenRequest { recorder: Some(recorder.clone()), ..ChosenRequest::default() };
            let tensor = table.find(name).unwrap();
            load(&table, &[Choice { tensor, slice }], &request);
            recorder.take().reads.iter().map(|read| u64::from(read.bytes)).sum::<u64>()
        };
        let slice = |dimension, start, stop| Some(DimensionSlice { dimension, start, stop });
        let rows = read("token_embd.weight", slice(0, 100, 102));
        let bytes = |name: &str| table.tensors()[table.find(name).unwrap()].bytes();
        assert!(rows <= 12 << 10, "{codec:?}: {rows} bytes for two rows");
        let stack = "blk.0.ffn_gate_exps.weight";
        let all = read(stack, None);
        assert!(all < bytes(stack) * 5 / 4 + (256 << 10), "{codec:?}: {all} of {}", bytes(stack));
        let one = read(stack, slice(0, 3, 4));
        assert!(one > 0 && one < all / 2, "{codec:?}: {one} bytes for an expert of {all}");
    }
}

#[test]
fn blocks_of_quantised_types_stay_whole_and_damage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let source = made("qwen3moe-tiny", "Q8_0", folder.path());
    let path = packed(&source, Codec::Zstd);
    let (table, original) = (open(&path), open(&source));
    let name = "blk.0.attn_q.weight";
    let tensor = table.find(name).unwrap();
    let shape = table.tensors()[tensor].shape.clone();
    let of = |dimension, start, stop, to_f32| {
        let slice = Some(DimensionSlice { dimension, start, stop });
        let request = ChosenRequest { to_f32, ..ChosenRequest::default() };
        load_chosen(&table, &[Choice { tensor, slice }], &request, &mut going_on)
    };
    let choice = Choice { tensor: original.find(name).unwrap(), slice: None };
    let whole = bytes(&load(&original, &[choice], &ChosenRequest::default())[0]).to_vec();
    let row = whole.len() / shape[0] as usize;
    assert!(*bytes(&of(0, 2, 5, false).unwrap()[0]) == whole[2 * row..5 * row]);
    let mut numbers = vec![0.0_f32; 3 * shape[1] as usize];
    dequantize(TensorType::Q8_0, &whole[2 * row..5 * row], &mut numbers).unwrap();
    let expected: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    assert!(bytes(&of(0, 2, 5, true).unwrap()[0]) == expected);
    let blocks = of(1, 32, 96, false).unwrap();
    let expected: Vec<u8> = whole.chunks(row).flat_map(|row| &row[34..102]).copied().collect();
    assert!(bytes(&blocks[0]) == expected);
    for (dimension, start, stop) in [(1, 16, 96), (0, 3, 2), (0, 0, shape[0] + 1), (2, 0, 1)] {
        let refused = of(dimension, start, stop, false).err().expect("it is wrong");
        assert!(
            matches!(refused, LoadError::Option(BadOption { name: OptionName::Slices, .. })),
            "{refused}"
        );
    }

    let mut damaged = fs::read(&path).unwrap();
    let pack = table.pack.as_ref().unwrap();
    let stored = pack.pack.as_ref().unwrap().stored(pack.tensor(name).unwrap().extent);
    damaged[stored.offset as usize + 20] ^= 1;
    fs::write(&path, damaged).unwrap();
    let error = of(0, 0, 1, true).err().expect("it is damaged");
    assert!(matches!(error, LoadError::Read { .. }), "{error}");
    assert!(error.to_string().contains(name), "{error}");
}
