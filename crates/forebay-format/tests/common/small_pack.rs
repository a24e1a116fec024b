//! Small packs, with and without coded blocks.

use std::path::PathBuf;

use forebay_codec::{Codec, Encoder, Encoding};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::pack::{
    BlockKind, PackPlan, PackSpan, PlannedBlock, PlannedPiece, TensorStorage, checksum,
    parse_pack_bytes, source_documents,
};
use forebay_format::{Catalog, TensorType};

/// A small model with two experts in one layer, the file that holds it, and its pack.
pub struct Small {
    _folder: tempfile::TempDir,
    pub gguf: Vec<u8>,
    pub source: Catalog,
    pub pack: Vec<u8>,
}

/// The experts' gates in GDeflate, which does not make them smaller, and their other matrices in Zstandard. Behind each is a raw chunk of padding.
pub fn coded() -> Small {
    let small = small_of(|index, seed| (index % (3 + seed)) as u8);
    let storage = |name: &str| TensorStorage {
        encoding: match name {
            "gate_exps" => Encoding::Gdeflate,
            "down_exps" => Encoding::Zstd { level: 3 },
            _ => Encoding::Raw,
        },
        ..TensorStorage::default()
    };
    let tensors = small.source.tensors().iter();
    let storage: Vec<_> = tensors.map(|tensor| storage(&tensor.name)).collect();
    Small { pack: pack_of(&small.source, &small.gguf, &storage), ..small }
}

pub fn small() -> Small {
    small_of(|index, seed| ((index * 7 + seed * 31) % 251) as u8)
}

/// A small model with these bytes, by their index in a tensor and by the tensor's number.
fn small_of(byte: fn(u64, u64) -> u8) -> Small {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("small.gguf");
    let mut writer = GgufWriter::new(&path);
    writer.set("general.architecture", "example").unwrap();
    writer.add_tensor("embd", TensorType::F32, &[40, 32]).unwrap();
    writer.add_tensor("gate_exps", TensorType::Q8_0, &[2, 4, 32]).unwrap();
    writer.add_tensor("down_exps", TensorType::Q8_0, &[2, 8, 32]).unwrap();
    writer.add_tensor("norm", TensorType::F32, &[32]).unwrap();
    let mut data = writer.start(Vec::new()).unwrap();
    for seed in 0..4_u64 {
        let (_, bytes) = data.next_tensor().unwrap();
        let content: Vec<u8> = (0..bytes).map(|index| byte(index, seed)).collect();
        data.write(&content).unwrap();
    }
    let gguf = data.finish().unwrap();
    std::fs::write(&path, &gguf).unwrap();
    let source = Catalog::open(&path).unwrap();
    let pack = pack_of(&source, &gguf, &[]);
    Small { _folder: folder, gguf, source, pack }
}

fn planned(source: &Catalog) -> Vec<PlannedBlock> {
    let piece = |name: &str, entry| PlannedPiece {
        tensor: source.tensors().iter().position(|tensor| tensor.name == name).unwrap(),
        entry,
    };
    let block = |kind, layer, expert, pieces| PlannedBlock { kind, layer, expert, pieces };
    let expert = |index: u32| {
        let entry = Some(u64::from(index));
        let pieces = vec![piece("gate_exps", entry), piece("down_exps", entry)];
        block(BlockKind::Expert, Some(0), Some(index), pieces)
    };
    vec![
        block(BlockKind::Embedding, None, None, vec![piece("embd", None)]),
        expert(0),
        expert(1),
        block(BlockKind::Head, None, None, Vec::new()),
        block(BlockKind::Other, None, None, vec![piece("norm", None)]),
    ]
}

fn pack_of(source: &Catalog, gguf: &[u8], storage: &[TensorStorage]) -> Vec<u8> {
    let documents = source_documents(source).unwrap();
    let plan = PackPlan::new(source, &planned(source), documents, storage).unwrap();
    let mut decoded = vec![0; plan.decoded_bytes() as usize];
    for &PackSpan { to, from, .. } in plan.spans() {
        let data = &gguf[from.offset as usize..from.end() as usize];
        decoded[to as usize..to as usize + data.len()].copy_from_slice(data);
    }
    let mut bytes = vec![0; plan.data_offset() as usize];
    let mut stored = Vec::new();
    let range = plan.chunk_index().range();
    for chunk in plan.chunk_index().chunks(range.start, range.end) {
        let content = &decoded[chunk.offset as usize..chunk.end() as usize];
        let (mut codec, mut encoded) = (plan.encoding(&chunk).codec(), Vec::new());
        Encoder::new(plan.encoding(&chunk)).encode(content, &mut encoded).unwrap();
        if encoded.len() >= content.len() {
            (codec, encoded) = (Codec::Raw, content.to_vec());
        }
        let written = plan.stored(&chunk, codec, &encoded, bytes.len() as u64);
        bytes.extend(encoded);
        bytes.resize(bytes.len() + written.padding as usize, 0);
        stored.push(written);
    }
    let front = plan.front(&stored);
    assert_eq!(front.len() as u64, plan.data_offset());
    bytes[..front.len()].copy_from_slice(&front);
    bytes
}

/// Returns the decoded file of a pack: as if its blocks were stored as they are. Returns `None` if a checksum or a chunk is wrong.
pub fn decoded(bytes: &[u8]) -> Option<Vec<u8>> {
    let catalog = parse_pack_bytes(bytes).ok()?;
    let index = &catalog.pack.as_ref().unwrap().chunks;
    let range = index.range();
    let mut out = bytes[..range.start as usize].to_vec();
    for chunk in index.chunks(range.start, range.end) {
        let stored = &bytes[chunk.stored_offset as usize..chunk.stored_end() as usize];
        if checksum(stored) != chunk.checksum {
            return None;
        }
        let start = out.len();
        out.resize(start + chunk.bytes as usize, 0);
        chunk.codec.decode(chunk.encoded(stored), &mut out[start..]).ok()?;
    }
    Some(out)
}

/// Recomputes the checksums of header and sections, so that damage is not found by them.
pub fn reseal(pack: &mut [u8]) {
    for section in 0..4 {
        let at = 64 + 32 * section;
        let field = |at: usize| u64::from_le_bytes(pack[at..at + 8].try_into().unwrap());
        let (start, bytes) = (field(at) as usize, field(at + 8) as usize);
        let Some(end) = start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(4096))
        else {
            continue;
        };
        if let Some(content) = pack.get(start..end) {
            let sum = checksum(content);
            pack[at + 24..at + 32].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let sum = checksum(&pack[..4088]);
    pack[4088..4096].copy_from_slice(&sum.to_le_bytes());
}
