//! Tests packs: they hold the same weights bit for bit, whatever their source, and damage never becomes a token.

mod support;

use std::fs;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use forebay_engine::pack::{Codec, PackError, PackOptions, pack, to_gguf, to_hugging_face, verify};
use forebay_engine::{Checks, EngineError, Session, SessionOptions};
use forebay_format::pack::{BlockKind, parse_pack_bytes};
use forebay_format::{Catalog, Extent, FileIndex, TensorInfo};
use forebay_model::{Architecture, Weights};
use forebay_options::{BadOption, OptionName};
use forebay_store::{
    Arena, BlockLabel, BlockLayout, BlockRead, EngineOptions, FaultKind, FaultPlan, FileSet,
    IoKind, LoadItem, LoadOptions, Loaded, Loader, OutputFile, Priority, ReadError, SlotBuffer,
    StoreError, Upload, UploadCopy, UploadError, UploadPart, UploadPlan, Uploader, Uploading,
    open_engine, open_faulty_engine,
};
use support::{fixture, fixtures, needed_bytes, recurrent_models};

fn never(_: u64, _: u64) -> bool {
    true
}

fn create(path: &Path) -> OutputFile {
    OutputFile::create(path).unwrap()
}

/// Packs `source` and returns the path of the pack.
fn packed(source: &Path, folder: &Path) -> Result<PathBuf, PackError> {
    packed_as(Codec::Auto, source, folder)
}

fn packed_as(codec: Codec, source: &Path, folder: &Path) -> Result<PathBuf, PackError> {
    let out = folder.join("model.fbay");
    let options = PackOptions { codec, ..PackOptions::default() };
    pack(source, OutputFile::replace(&out).unwrap(), options, &mut never)?;
    Ok(out)
}

/// Codecs of a pack whose blocks are stored as they are, and of one with coded blocks.
const CODECS: [Codec; 2] = [Codec::Compact, Codec::Zstd];

/// Returns the range of the file that stores an extent.
fn stored(path: &Path, extent: Extent) -> Range<u64> {
    let files = FileSet::of_catalog(&Catalog::open(path).unwrap(), true).unwrap();
    let stored = files.stored(extent);
    stored.offset..stored.end()
}

/// Returns the bytes of all blocks of a pack, decoded.
fn block_bytes(path: &Path) -> Vec<Vec<u8>> {
    let catalog = Catalog::open(path).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let bytes = |block: &forebay_format::pack::Block| {
        let mut bytes = vec![0; block.bytes as usize];
        let (file, offset, length) = (FileIndex(0), block.offset, block.bytes);
        files.read_exact(Extent { file, offset, length }, &mut bytes).unwrap();
        bytes
    };
    catalog.pack.as_ref().unwrap().chunks.blocks().iter().map(bytes).collect()
}

fn options(ram_bytes: Option<u64>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(64), threads: Some(2), ..SessionOptions::default() }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

fn bits(session: &mut Session) -> Result<Vec<u32>, EngineError> {
    let vocabulary = session.vocab_size();
    let tokens: Vec<u32> = (0..40).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect();
    let mut logits = session.logits(&tokens, None)?;
    logits.extend(session.logits(&tokens[..1], None)?);
    Ok(logits.iter().map(|value| value.to_bits()).collect())
}

fn smallest(path: &Path) -> u64 {
    needed_bytes(open(path, &options(Some(1))))
}

/// Returns every model of the fixtures: GGUF files, and folders with a configuration.
fn models() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for (kind, is_model) in [
        (
            "gguf",
            (|path: &Path| path.extension().is_some_and(|e| e == "gguf")) as fn(&Path) -> bool,
        ),
        ("models", |path: &Path| path.join("config.json").exists()),
    ] {
        let Ok(families) = fs::read_dir(fixtures().join(kind)) else { continue };
        for family in families.map(|entry| entry.unwrap().path()) {
            match is_model(&family) {
                true => found.push(family),
                false => {
                    let files = fs::read_dir(&family).into_iter().flatten();
                    found.extend(files.map(|e| e.unwrap().path()).filter(|path| is_model(path)));
                }
            }
        }
    }
    found.extend(recurrent_models());
    // Rows of one tensor as several parts, transposed experts, a quantised output projection, and weights that become
    // larger.
    let others = ["phi3", "llama4", "llama_fp8_ct_head", "llama_gptq_actorder", "llama_bnb_nf4"];
    found.extend(others.iter().filter_map(|name| fixture(&format!("models/{name}"))));
    found.sort();
    found.dedup();
    assert!(!found.is_empty(), "the project's own fixtures hold models");
    found
}

#[test]
fn every_model_answers_the_same_from_its_pack_and_comes_back() {
    let mut compared = 0;
    for source in models() {
        let what = source.display();
        let folder = tempfile::tempdir().unwrap();
        let mut resident = match open(&source, &options(None)) {
            Ok(session) => session,
            Err(EngineError::Model(error)) => {
                // A model that cannot run cannot be packed either.
                let refused = packed(&source, folder.path()).unwrap_err().to_string();
                assert_eq!(refused, error.to_string());
                assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{what}");
                continue;
            }
            Err(error) => panic!("{what}: {error}"),
        };
        let expected = bits(&mut resident).unwrap();
        let path = packed(&source, folder.path()).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut session = open(&path, &options(None)).unwrap();
        assert!(bits(&mut session).unwrap() == expected, "{what}: resident");
        assert_eq!(session.statistics().checksums, Checks::On);
        let least = smallest(&path);
        // The feed-forward matrices are aligned with up to a page in each slot of the ring.
        assert!(least <= smallest(&source) + 4 * 4096, "{what}: a pack needs no larger slots");
        for io in [IoKind::Auto, IoKind::Pread] {
            let options = SessionOptions { io, ..options(Some(least)) };
            let mut session = open(&path, &options).unwrap();
            let streamed = bits(&mut session).unwrap();
            // Resident blocks may all have come from the page cache, which the engine does not count.
            assert!(session.statistics().stream.unwrap().io.bytes_checked > 0, "{what}: {io:?}");
            assert!(streamed == expected, "{what}: streamed with {io}");
        }
        let same_tokenizer = |session: &Session| {
            session.tokenizer().ok().map(|t| {
                (t.kind().to_owned(), t.vocab_size(), t.encode("Hello, 世界!", true, true).unwrap())
            })
        };
        assert_eq!(same_tokenizer(&session), same_tokenizer(&resident), "{what}");
        let report = verify(&path, IoKind::Auto, &mut never).unwrap();
        assert_eq!((report.damaged_chunks, report.damage.len()), (0, 0));
        comes_back(&source, &path, folder.path());
        compared += 1;
    }
    assert!(compared >= 3, "only {compared} models were compared");
}

/// Returns the names and bytes of all tensors.
fn contents(path: &Path) -> Vec<(String, Vec<u8>)> {
    let catalog = Catalog::open(path).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let read = |tensor: &TensorInfo| {
        let mut bytes = vec![0; tensor.extent.length as usize];
        files.read_exact(tensor.extent, &mut bytes).unwrap();
        (tensor.name.clone(), bytes)
    };
    let mut contents: Vec<_> = catalog.tensors().iter().map(read).collect();
    contents.sort();
    contents
}

/// Checks that the pack converts back to its source, byte for byte.
fn comes_back(source: &Path, path: &Path, folder: &Path) {
    let same = |one: &Path, other: &Path| fs::read(one).unwrap() == fs::read(other).unwrap();
    if source.is_file() {
        let back = folder.join("back.gguf");
        to_gguf(path, OutputFile::replace(&back).unwrap(), IoKind::Auto, &mut never).unwrap();
        match Catalog::open(source).unwrap().files.len() {
            1 => assert!(same(source, &back), "{}", source.display()),
            // A split set is restored as one file.
            _ => assert_eq!(contents(source), contents(&back), "{}", source.display()),
        }
        let refused = to_hugging_face(path, &folder.join("hf"), IoKind::Auto, &mut never);
        assert!(refused.unwrap_err().to_string().contains("GGUF file as the form"));
        return;
    }
    let back = folder.join("back");
    let report = to_hugging_face(path, &back, IoKind::Auto, &mut never).unwrap();
    let mut files = 0;
    for entry in fs::read_dir(&back).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(same(&source.join(&name), &back.join(&name)), "{name:?} of {}", source.display());
        files += 1;
    }
    assert_eq!(files, report.files);
    for needed in ["config.json", "tokenizer.json"] {
        assert_eq!(source.join(needed).exists(), back.join(needed).exists());
    }
    let refused = to_gguf(path, create(&folder.join("x.gguf")), IoKind::Auto, &mut never);
    assert!(refused.unwrap_err().to_string().contains("Hugging Face folder as the form"));
}

fn moe() -> PathBuf {
    fixture("models/qwen3_moe").expect("the project holds this fixture")
}

#[test]
fn the_same_input_makes_the_same_bytes() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = fs::read(packed(&moe(), one.path()).unwrap()).unwrap();
    let b = other.path().join("other.fbay");
    pack(&moe(), create(&b), IoKind::Pread, &mut never).unwrap();
    assert!(a == fs::read(b).unwrap());
    assert_eq!(fs::read_dir(one.path()).unwrap().count(), 1, "nothing else is left there");
}

#[test]
fn blocks_lie_in_execution_order_and_an_expert_is_one_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = packed(&moe(), folder.path()).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    let pack = catalog.pack.as_ref().unwrap();
    let order: Vec<_> = pack.chunks.blocks().iter().map(|b| (b.kind, b.layer, b.expert)).collect();
    let mut expected = vec![(BlockKind::Embedding, None, None)];
    for layer in 0..2 {
        expected.push((BlockKind::Layer, Some(layer), None));
        expected.extend((0..16).map(|e| (BlockKind::Expert, Some(layer), Some(e))));
    }
    expected.extend([(BlockKind::Head, None, None), (BlockKind::Other, None, None)]);
    assert_eq!(order, expected);

    let architecture = Architecture::from_catalog(&catalog).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let weights = Weights::new(&catalog, &architecture, &files).unwrap();
    for (block, of) in pack
        .chunks
        .blocks()
        .iter()
        .filter(|block| block.kind == BlockKind::Expert)
        .zip(weights.blocks.experts.iter().flatten())
    {
        let (first, last) = (of.extents.first().unwrap(), of.extents.last().unwrap());
        assert_eq!(first.offset, block.offset, "gate is the block's first byte");
        assert!(last.end() <= block.end() && block.end() - last.end() < 4096);
        let slot = files.plan_block(of, 4096).slot_bytes as u64;
        assert_eq!(slot, block.bytes, "no memory beyond the block");
    }
}

#[test]
fn damage_is_an_error_with_its_place_and_never_a_token() {
    CODECS.into_iter().for_each(damage_is_an_error);
}

fn damage_is_an_error(codec: Codec) {
    let folder = tempfile::tempdir().unwrap();
    let path = packed_as(codec, &moe(), folder.path()).unwrap();
    let is_coded =
        parse_pack_bytes(&fs::read(&path).unwrap()).unwrap().pack.unwrap().chunks.is_coded();
    assert_eq!(is_coded, codec == Codec::Zstd);
    let catalog = Catalog::open(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let expert = catalog.tensor("model.layers.1.mlp.experts.5.up_proj.weight").unwrap().extent;
    let mut broken = whole.clone();
    broken[stored(&path, expert).start as usize + 7] ^= 4;
    fs::write(&path, &broken).unwrap();

    let report = verify(&path, IoKind::Auto, &mut never).unwrap();
    assert_eq!(report.damaged_chunks, 1);
    assert_eq!(report.damage[0].block, "expert 5 of layer 1");
    assert!(
        report.damage[0].tensors.contains(&"model.layers.1.mlp.experts.5.up_proj.weight".into())
    );
    for io in [IoKind::Auto, IoKind::Pread] {
        let error = match open(&path, &SessionOptions { io, ..options(None) }) {
            Ok(_) => panic!("a damaged expert was loaded"),
            Err(error) => error.to_string(),
        };
        for part in ["model.fbay", "expert 5 of layer 1", "damaged", "byte"] {
            assert!(error.contains(part), "'{part}' is missing: {error}");
        }
    }
    // Norms and embedding rows are read by another code path.
    for name in ["model.norm.weight", "model.embed_tokens.weight"] {
        let extent = catalog.tensor(name).unwrap().extent;
        let mut broken = whole.clone();
        broken[stored(&path, extent).end as usize - 1] ^= 1;
        fs::write(&path, &broken).unwrap();
        let run = open(&path, &options(None)).and_then(|mut session| {
            let last = session.vocab_size() as u32 - 1;
            session.logits(&[last], None)
        });
        let error = run.unwrap_err().to_string();
        assert!(error.contains("is damaged at byte"), "{name}: {error}");
    }
    // A user who disables verification gets no error, but the statistics record it.
    fs::write(&path, &broken).unwrap();
    let unverified = SessionOptions { verify: false, ..options(None) };
    let mut session = open(&path, &unverified).unwrap();
    bits(&mut session).unwrap();
    assert_eq!(session.statistics().checksums, Checks::Off);
    assert_eq!(session.statistics().stream.unwrap().io.bytes_checked, 0);
    assert!(matches!(
        open(&moe(), &unverified),
        Err(EngineError::Option(BadOption { name: OptionName::NoVerify, .. }))
    ));
}

#[test]
fn a_bit_that_flips_on_the_way_is_read_again() {
    CODECS.into_iter().for_each(a_flipped_bit_is_read_again);
}

fn a_flipped_bit_is_read_again(codec: Codec) {
    let folder = tempfile::tempdir().unwrap();
    let path = packed_as(codec, &moe(), folder.path()).unwrap();
    let expected = bits(&mut open(&path, &options(None)).unwrap()).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    let extent = catalog.tensor("model.layers.0.mlp.experts.3.down_proj.weight").unwrap().extent;
    let range = stored(&path, extent);
    for io in [IoKind::Auto, IoKind::Pread] {
        let once = FaultPlan::once(FileIndex(0), range.clone(), FaultKind::Flip);
        let mut session =
            open(&path, &SessionOptions { io, faults: Some(once), ..options(None) }).unwrap();
        assert!(bits(&mut session).unwrap() == expected);
        assert_eq!(session.statistics().stream.unwrap().io.checksum_mismatches, 1);
        let always = FaultPlan::always(FileIndex(0), range.clone(), FaultKind::Flip);
        let opened = open(&path, &SessionOptions { io, faults: Some(always), ..options(None) });
        let error = opened.err().expect("wrong bytes must not be used").to_string();
        assert!(error.contains("expert 3 of layer 0"), "{error}");
    }
}

/// Loads all blocks of a pack, through a ring or in place, and returns their contents. If no block is coded, the engine does not verify
/// checksums, so the loader must.
fn loaded(path: &Path, ring_slots: usize, faults: FaultPlan) -> Vec<Result<Vec<u8>, ReadError>> {
    let catalog = Catalog::open(path).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let blocks = catalog.pack.as_ref().unwrap().chunks.blocks().to_vec();
    let layouts = blocks.iter().map(|block| {
        let (offset, length) = (block.offset, block.bytes);
        files.plan(&[Extent { file: FileIndex(0), offset, length }], files.alignment())
    });
    let layouts: Vec<_> = layouts.collect();
    let arena = Arena::map(layouts.iter().map(|layout| layout.slot_bytes).sum()).unwrap();
    let items = layouts.iter().enumerate().map(|(index, layout)| LoadItem {
        label: BlockLabel::Other(index as u64),
        layout: layout.clone(),
        buffer: arena.carve(layout.slot_bytes).unwrap(),
    });
    let items = items.collect();
    let ring_arena = Arena::map(ring_slots << 18).unwrap();
    let mut ring = (0..ring_slots).map(|_| ring_arena.carve(1 << 18).unwrap()).collect();
    let unchecked = match files.is_coded() {
        true => files.clone(),
        false => FileSet::open(&[path]).unwrap(),
    };
    let options = EngineOptions::default();
    let mut engine =
        open_faulty_engine(IoKind::Auto, &unchecked, &ring_arena, &options, faults).unwrap();
    assert_eq!(engine.compares(), files.is_coded());
    // The page cache would hide the disk's faults.
    let options = LoadOptions { copy_threads: 0, piece_bytes: 1 << 17, ..LoadOptions::default() };
    let loader = Loader { engine: engine.as_mut(), files: &files, options, ring: &mut ring };
    let (answers, _) = loader.load(items, &mut |_, _| {}).unwrap();
    let bytes = |(answer, layout): (Loaded, &BlockLayout)| {
        answer.result?;
        let buffer = answer.buffer.expect("comes back");
        let part = layout.parts[0];
        Ok(buffer.as_slice()[part.at..][..part.extent.length as usize].to_vec())
    };
    answers.into_iter().zip(&layouts).map(bytes).collect()
}

#[test]
fn loads_compare_what_their_engine_did_not() {
    CODECS.into_iter().for_each(loads_find_damage);
}

fn loads_find_damage(codec: Codec) {
    let folder = tempfile::tempdir().unwrap();
    let path = packed_as(codec, &moe(), folder.path()).unwrap();
    let whole = fs::read(&path).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    let blocks = catalog.pack.as_ref().unwrap().chunks.blocks().to_vec();
    let expected = block_bytes(&path);
    let middle = blocks.len() / 2;
    let range = blocks[middle].stored_offset + 100..blocks[middle].stored_offset + 101;
    for ring_slots in [0, 3] {
        // If a bit flips once in transit, the checking thread reads the chunk again.
        for faults in
            [FaultPlan::default(), FaultPlan::once(FileIndex(0), range.clone(), FaultKind::Flip)]
        {
            for (index, bytes) in loaded(&path, ring_slots, faults).into_iter().enumerate() {
                assert!(bytes.unwrap() == expected[index], "block {index}, {ring_slots} slots");
            }
        }
        for bit in 0..8 {
            let mut broken = whole.clone();
            broken[range.start as usize] ^= 1 << bit;
            fs::write(&path, &broken).unwrap();
            let mut answers = loaded(&path, ring_slots, FaultPlan::default());
            match answers.swap_remove(middle) {
                Err(ReadError::Corrupt { offset, place, .. }) => {
                    assert!(offset <= range.start && place == blocks[middle].to_string());
                }
                other => panic!("bit {bit}, {ring_slots} slots: {:?}", other.map(|b| b.len())),
            }
        }
        fs::write(&path, &whole).unwrap();
    }
}

/// Device memory that copies reach at once, by address.
struct Memory(Mutex<Vec<u8>>);

struct Copied(SlotBuffer);

impl Upload for Memory {
    fn begin(
        &self,
        slot: SlotBuffer,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Uploading>, UploadError> {
        let mut memory = self.0.lock().unwrap();
        for UploadCopy { range, to } in copies {
            memory[*to as usize..][..range.len()].copy_from_slice(&slot.as_slice()[range.clone()]);
        }
        Ok(Box::new(Copied(slot)))
    }
}

impl Uploading for Copied {
    fn is_done(&self) -> Result<bool, UploadError> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError> {
        Ok(self.0)
    }
}

/// Uploads every part of every block, last first. Returns the bytes that arrived, part by part.
fn uploaded(
    path: &Path,
    copy_threads: usize,
    piece_bytes: u64,
) -> Result<Vec<Vec<u8>>, StoreError> {
    let catalog = Catalog::open(path).unwrap();
    let architecture = Architecture::from_catalog(&catalog).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let blocks = Weights::new(&catalog, &architecture, &files).unwrap().blocks;
    let blocks = blocks.dense.iter().chain(blocks.experts.iter().flatten());
    let extents = blocks.flat_map(|block| &block.extents);
    let (mut parts, mut end) = (Vec::new(), 0);
    for extent in extents.rev() {
        let label = BlockLabel::Other(parts.len() as u64);
        parts.push(UploadPart { label, extent: *extent, to: end });
        end += extent.length + 64;
    }
    let plan = UploadPlan::new(&parts, &files, piece_bytes);
    let memory = Memory(Mutex::new(vec![0xa5; end as usize]));
    let arena = Arena::map(8 * plan.slot_bytes()).unwrap();
    let mut ring: Vec<_> = (0..8).map(|_| arena.carve(plan.slot_bytes()).unwrap()).collect();
    let mut engine = open_engine(IoKind::Auto, &files, &arena, &EngineOptions::default())?;
    let options = LoadOptions { piece_bytes, copy_threads, ..LoadOptions::default() };
    let mut copied = ring.split_off(4);
    let mut reads = (engine.as_mut(), &mut ring);
    let uploader = Uploader { files: &files, options, copied: &mut copied, reads: &mut reads };
    uploader.upload(&plan, &memory, &mut |_, _| ControlFlow::Continue(()))?;
    let memory = memory.0.into_inner().unwrap();
    let bytes =
        |part: &UploadPart| memory[part.to as usize..][..part.extent.length as usize].to_vec();
    Ok(parts.iter().rev().map(bytes).collect())
}

#[test]
fn every_part_reaches_its_place_on_a_device_and_damage_does_not() {
    CODECS.into_iter().for_each(parts_reach_a_device);
}

fn parts_reach_a_device(codec: Codec) {
    let folder = tempfile::tempdir().unwrap();
    // Its tensors, and so chunks of them, do not end at pages.
    let quantised = fixture("gguf/qwen3_moe/qwen3_moe-Q8_0.gguf");
    let mut path = PathBuf::new();
    for source in quantised.into_iter().chain([moe()]) {
        path = packed_as(codec, &source, folder.path()).unwrap();
        let expected = uploaded(&source, 2, 1 << 20).unwrap();
        for (copy_threads, piece_bytes) in [(0, 2 << 20), (2, 2 << 20), (0, 4096), (2, 30_000)] {
            let found = uploaded(&path, copy_threads, piece_bytes).unwrap();
            assert!(found == expected, "{copy_threads} threads, pieces of {piece_bytes}");
        }
    }
    let catalog = Catalog::open(&path).unwrap();
    let blocks = catalog.pack.as_ref().unwrap().chunks.blocks();
    let expert = blocks.iter().find(|block| block.kind == BlockKind::Expert).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[expert.stored_offset as usize + 100] ^= 1;
    fs::write(&path, bytes).unwrap();
    for copy_threads in [0, 2] {
        let error = uploaded(&path, copy_threads, 2 << 20).unwrap_err();
        assert!(matches!(error, StoreError::Block(ReadError::Corrupt { .. })), "{error}");
    }
}

/// The receiver of a buffer may write to it at once, so no thread may still be checking it. When the engine hands out a
/// block, all of its checks must have finished, and none may fail afterwards.
#[test]
fn blocks_are_handed_out_only_after_their_last_check() {
    CODECS.into_iter().for_each(blocks_come_after_their_checks);
}

fn blocks_come_after_their_checks(codec: Codec) {
    let folder = tempfile::tempdir().unwrap();
    let path = packed_as(codec, &moe(), folder.path()).unwrap();
    let whole = block_bytes(&path);
    let catalog = Catalog::open(&path).unwrap();
    let files = FileSet::of_catalog(&catalog, true).unwrap();
    let extents: Vec<Extent> = (catalog.pack.as_ref().unwrap().chunks.blocks().iter())
        .map(|block| Extent { file: FileIndex(0), offset: block.offset, length: block.bytes })
        .collect();
    // The first case has requests of one chunk. The second has requests that end inside a chunk and wait for the rest
    // of their block.
    for (io, request_bytes) in [(IoKind::Auto, 128 << 10), (IoKind::Pread, 12 << 10)] {
        let slot_bytes = extents.iter().map(|extent| extent.length as usize + 4096).max().unwrap();
        let arena = Arena::reserve(8 * slot_bytes).unwrap();
        let engine_options = EngineOptions { request_bytes, ..EngineOptions::suited_to(&files) };
        let mut engine = open_engine(io, &files, &arena, &engine_options).unwrap();
        let mut slots: Vec<SlotBuffer> = (0..8).map(|_| arena.carve(slot_bytes).unwrap()).collect();
        let (mut done, mut wanted_bytes) = (Vec::new(), 0);
        let mut next = (0..20).flat_map(|_| extents.iter().enumerate());
        for turn in 0.. {
            while let Some(buffer) = slots.pop() {
                let Some((index, extent)) = next.next() else { break };
                let (id, label) = (index as u64, BlockLabel::Other(index as u64));
                let layout = files.plan(&[*extent], 4096);
                engine.submit(BlockRead { id, label, layout, buffer, priority: Priority::Demand });
            }
            if engine.in_flight() == 0 {
                break;
            }
            match turn % 2 {
                0 => engine.poll(&mut done).unwrap(),
                _ => engine.wait(&mut done).unwrap(),
            }
            for completion in done.drain(..) {
                completion.result.unwrap();
                let (extent, mut buffer) =
                    (extents[completion.id as usize], completion.buffer.unwrap());
                let expected = &whole[completion.id as usize];
                assert!(buffer.as_slice()[..expected.len()] == expected[..]);
                buffer.as_mut_slice().fill(0xAA);
                slots.push(buffer);
                wanted_bytes += extent.length;
            }
            assert!(engine.io_statistics().bytes_checked >= wanted_bytes, "{io}");
        }
        let statistics = engine.io_statistics();
        assert_eq!(wanted_bytes, 20 * extents.iter().map(|extent| extent.length).sum::<u64>());
        assert_eq!((statistics.bytes_checked, statistics.checksum_mismatches), (wanted_bytes, 0));
    }
}

/// Reads every tensor as a session would, and all other contents of a pack.
fn read_everything(path: &Path) -> Result<(), EngineError> {
    let catalog = Catalog::open(path)?;
    let files = FileSet::of_catalog(&catalog, true)?;
    for tensor in catalog.tensors() {
        for extent in tensor.extents() {
            let mut bytes = vec![0; extent.length as usize];
            files.read_exact(extent, &mut bytes)?;
        }
    }
    Ok(())
}

#[test]
fn flipped_bits_and_truncations_on_disk_are_found_by_reading_and_by_verify() {
    let folder = tempfile::tempdir().unwrap();
    let path = packed(&moe(), folder.path()).unwrap();
    read_everything(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let damaged = |path: &Path| {
        verify(path, IoKind::Pread, &mut never).map_or(true, |report| report.damaged_chunks > 0)
    };
    let mut state = 7_u64;
    for round in 0..150 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bit = (state >> 16) as usize % (whole.len() * 8);
        let mut broken = whole.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        if round % 3 == 0 {
            broken = whole[..bit / 8].to_vec();
        }
        fs::write(&path, &broken).unwrap();
        assert!(read_everything(&path).is_err(), "reading: bit {bit}, round {round}");
        assert!(damaged(&path), "verify: bit {bit}, round {round}");
    }
    fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    assert!(damaged(&path), "a byte too many");
}

#[test]
fn a_pack_that_cannot_be_finished_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.fbay");
    let stopped = pack(&moe(), create(&out), IoKind::Auto, &mut |done, _| done > 0);
    assert!(matches!(stopped, Err(PackError::Interrupted)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    let source = packed(&moe(), folder.path()).unwrap();
    assert!(matches!(
        pack(&source, OutputFile::replace(&out).unwrap(), IoKind::Auto, &mut never),
        Err(PackError::IsPack { .. })
    ));
    // Damage in the source must not become a new file with a valid checksum.
    let catalog = Catalog::open(&source).unwrap();
    let Extent { offset, .. } = catalog.tensors()[3].extent;
    let mut broken = fs::read(&source).unwrap();
    broken[offset as usize] ^= 1;
    fs::write(&source, broken).unwrap();
    let back = folder.path().join("back");
    let refused = to_hugging_face(&source, &back, IoKind::Auto, &mut never).unwrap_err();
    assert!(refused.to_string().contains("damaged"), "{refused}");
    assert!(!back.exists());
}

#[test]
fn a_source_that_shrinks_while_it_is_packed_is_an_error() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let demo = models.join("tales-moe-sticky-Q4_K_M.gguf");
    for io in [IoKind::Auto, IoKind::Pread, IoKind::Mmap] {
        let folder = tempfile::tempdir().unwrap();
        let (source, out) = (folder.path().join("model.gguf"), folder.path().join("model.fbay"));
        fs::copy(&demo, &source).unwrap();
        let shrink = || {
            let file = fs::File::options().write(true).open(&source).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        };
        // At this point the headers have been read, but the weights have not.
        let mut first = true;
        let refused = pack(&source, create(&out), io, &mut |_, _| {
            if std::mem::take(&mut first) {
                shrink();
            }
            true
        });
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("model.gguf") && said.contains("truncated"), "{io}: {said}");
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "{io}: only the source is left"
        );
    }
}
