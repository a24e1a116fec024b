//! Tests of the streaming container: every flipped bit is found, hostile tables are refused, and
//! the file matches `docs/pack-format.md` byte for byte.

#[path = "common/small_pack.rs"]
mod small_pack;

use std::sync::Arc;

use forebay_codec::Codec;
use forebay_format::pack::{PackSpan, parse_pack_bytes, restore_gguf};
use forebay_format::{Catalog, FormatError};
use proptest::prelude::*;

use small_pack::{Small, coded, decoded, reseal, small};

/// Returns true if everything in a pack is as it was written.
fn is_whole(bytes: &[u8]) -> bool {
    decoded(bytes).is_some()
}

#[test]
fn a_pack_holds_what_its_source_holds() {
    for Small { gguf, source, pack, .. } in [small(), coded()] {
        holds_its_source(&source, &gguf, &pack);
    }
    let (plain, coded) = (small().pack, coded().pack);
    let version = |pack: &[u8]| parse_pack_bytes(pack).unwrap().pack.as_ref().unwrap().version;
    assert_eq!((version(&plain), version(&coded)), ((1, 0), (2, 0)));
    let index = Arc::clone(&parse_pack_bytes(&coded).unwrap().pack.as_ref().unwrap().chunks);
    let codecs = index.chunks(index.range().start, u64::MAX).map(|chunk| chunk.codec);
    let experts = [Codec::Raw, Codec::Raw, Codec::Zstd, Codec::Raw].repeat(2);
    assert!(codecs.collect::<Vec<_>>()[2..].starts_with(&experts), "behind the embedding");
}

fn holds_its_source(source: &Catalog, gguf: &[u8], pack: &[u8]) {
    let catalog = parse_pack_bytes(pack).unwrap();
    let pack = decoded(pack).unwrap();
    assert_eq!(catalog.gguf(), source.gguf());
    assert_eq!(catalog.total_bytes(), source.total_bytes());
    for tensor in source.tensors() {
        let packed = catalog.tensor(&tensor.name).unwrap();
        assert_eq!((packed.ty, &packed.shape), (tensor.ty, &tensor.shape));
        let bytes: Vec<u8> = packed
            .extents()
            .flat_map(|e| pack[e.offset as usize..e.end() as usize].to_vec())
            .collect();
        assert_eq!(bytes, gguf[tensor.extent.offset as usize..tensor.extent.end() as usize]);
    }
    let restored = restore_gguf(&catalog).unwrap();
    let mut back = restored.header.clone();
    back.resize(restored.bytes as usize, 0);
    for PackSpan { to, from, .. } in restored.spans {
        let data = &pack[from.offset as usize..from.end() as usize];
        back[to as usize..to as usize + data.len()].copy_from_slice(data);
    }
    assert!(back == *gguf, "the file comes back byte for byte");
}

#[test]
fn flipped_bits_and_all_truncations_are_found() {
    for pack in [small().pack, coded().pack] {
        all_damage_is_found(&pack);
    }
}

fn all_damage_is_found(pack: &[u8]) {
    let mut state = 1_u64;
    let mut broken = pack.to_vec();
    for _ in 0..5_000 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bit = (state >> 20) as usize % (pack.len() * 8);
        broken[bit / 8] ^= 1 << (bit % 8);
        assert!(!is_whole(&broken), "bit {bit}");
        broken[bit / 8] = pack[bit / 8];
    }
    for length in (0..pack.len()).step_by(13) {
        assert!(parse_pack_bytes(&pack[..length]).is_err(), "{length} bytes");
    }
    assert!(is_whole(&broken));
}

#[test]
fn what_no_reader_can_know_is_refused_in_words() {
    let pack = small().pack;
    let error = |at: usize, value: u8| {
        let mut broken = pack.clone();
        broken[at] = value;
        reseal(&mut broken);
        parse_pack_bytes(&broken).unwrap_err()
    };
    let version = error(8, 3);
    assert!(matches!(version, FormatError::PackVersion { major: 3, minor: 0, .. }), "{version}");
    let chunks = u64::from_le_bytes(pack[160..168].try_into().unwrap()) as usize;
    let codec = error(chunks, 9).to_string();
    assert!(codec.contains("codec 9") && codec.contains("the embedding"), "{codec}");
    assert!(matches!(error(0, b'X'), FormatError::NotAPack { .. }));

    let mut minor = pack.clone();
    minor[10] = 7;
    reseal(&mut minor);
    assert!(parse_pack_bytes(&minor).is_ok(), "a higher minor version is read");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Tables with false contents but valid checksums never cause a panic. Accepted tensors lie
    /// inside the file and do not overlap.
    #[test]
    fn hostile_tables_are_refused(
        changes in prop::collection::vec((0_usize..20_480, any::<u8>()), 1..4),
        section in 0_usize..5,
        is_coded in any::<bool>(),
    ) {
        let mut pack = PACKS.with(|packs| packs[usize::from(is_coded)].clone());
        let field = |at: usize| u64::from_le_bytes(pack[at..at + 8].try_into().unwrap()) as usize;
        // A section's entries are the bytes before its padding. Of the header, the first 200 bytes
        // are changed.
        let (start, length) = match section {
            4 => (0, 200),
            index => (field(64 + 32 * index), field(64 + 32 * index + 8)),
        };
        for (at, value) in changes {
            pack[start + at % length] = value;
        }
        reseal(&mut pack);
        if let Ok(catalog) = parse_pack_bytes(&pack) {
            let mut extents: Vec<_> =
                catalog.tensors().iter().flat_map(|tensor| tensor.extents()).collect();
            extents.sort();
            let index = &catalog.pack.as_ref().unwrap().chunks;
            let (range, stored) = (index.range(), index.stored_range());
            prop_assert!(stored.end == pack.len() as u64);
            prop_assert!(extents.iter().all(|extent| extent.end() <= range.end));
            for chunk in index.chunks(range.start, range.end) {
                prop_assert!(chunk.stored_end() <= pack.len() as u64);
                prop_assert!(chunk.padding <= chunk.stored_bytes);
            }
            let _ = decoded(&pack);
            prop_assert!(extents.windows(2).all(|pair| pair[0].end() <= pair[1].offset));
            let _ = restore_gguf(&catalog);
        }
    }
}

thread_local! {
    static PACKS: [Vec<u8>; 2] = [small().pack, coded().pack];
}

/// The hexdump in the document shows this pack, and the offsets below are those of the document.
#[test]
fn the_document_describes_this_file() {
    let Small { pack, .. } = small();
    let document = include_str!("../../../docs/pack-format.md");
    let dump = hexdump(&pack[..0xc0]);
    assert!(document.contains(&dump), "docs/pack-format.md should show:\n{dump}");

    // The checks below do not use the reader.
    let u16_at = |at: usize| u16::from_le_bytes(pack[at..at + 2].try_into().unwrap());
    let u32_at = |at: usize| u32::from_le_bytes(pack[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(pack[at..at + 8].try_into().unwrap());
    let sum = |range: std::ops::Range<usize>| twox_hash::XxHash3_64::oneshot(&pack[range]);
    assert_eq!(&pack[0..8], b"FBAY\r\n\x1a\n");
    assert_eq!((u16_at(8), u16_at(10), u32_at(12)), (1, 0, 1));
    assert_eq!(u64_at(16), pack.len() as u64);
    assert_eq!(u64_at(4088), sum(0..4088));
    let mut end = 4096;
    let section = |index: usize| {
        let at = 64 + 32 * index;
        (u64_at(at) as usize, u64_at(at + 8) as usize, u64_at(at + 16), u64_at(at + 24))
    };
    for (offset, bytes, _, checksum) in (0..4).map(section) {
        assert_eq!(offset, end);
        end = (offset + bytes).next_multiple_of(4096);
        assert_eq!(checksum, sum(offset..end));
    }
    assert_eq!(u64_at(24) as usize, end);

    // The documents are one header.
    let (at, bytes, count, _) = section(0);
    assert_eq!((count, u32_at(at), u32_at(at + 4)), (1, 2, 10));
    assert_eq!(&pack[at + 24..at + 34], b"model.gguf");
    assert_eq!(u64_at(at + 8) as usize, bytes - 34);
    assert_eq!(&pack[at + 34..at + 38], b"GGUF");

    // The second tensor is a stack of two pieces.
    let (at, _, count, _) = section(1);
    assert_eq!(count, 4);
    let first = 24 + 8 * 2 + 3 + 4;
    assert_eq!(&pack[at + first - 7..at + first], b"F32embd");
    let at = at + first;
    assert_eq!((u32_at(at), pack[at + 4], pack[at + 5]), (9, 4, 3));
    assert_eq!((u32_at(at + 8), u32_at(at + 12), u64_at(at + 16)), (1, 2, 0));
    assert_eq!([24, 32, 40].map(|field| u64_at(at + field)), [2, 4, 32]);
    assert_eq!(&pack[at + 48..at + 61], b"Q8_0gate_exps");

    // The blocks are the embedding, two experts and the rest. They tile the file.
    let (at, bytes, count, _) = section(2);
    assert_eq!((count, bytes), (4, 4 * 48));
    let block = |index: usize| at + 48 * index;
    let kinds: Vec<u32> = (0..4).map(|index| u32_at(block(index))).collect();
    assert_eq!(kinds, [1, 3, 3, 5]);
    assert_eq!((u32_at(block(2) + 4), u32_at(block(2) + 8)), (0, 1));
    assert_eq!(u32_at(block(0) + 4), u32::MAX);
    let mut chunks = Vec::new();
    for index in 0..4 {
        let (offset, bytes) = (u64_at(block(index) + 16), u64_at(block(index) + 24));
        let chunk_bytes = u64::from(u32_at(block(index) + 12));
        assert_eq!((offset as usize, u64_at(block(index) + 32)), (end, bytes));
        assert_eq!(u64_at(block(index) + 40), chunks.len() as u64);
        let starts = (offset..offset + bytes).step_by(chunk_bytes as usize);
        chunks.extend(starts.map(|start| (start, chunk_bytes.min(offset + bytes - start))));
        end = (offset + bytes) as usize;
    }
    assert_eq!(end, pack.len());

    // Every chunk has its size and checksum.
    let (at, _, count, _) = section(3);
    assert_eq!(count, chunks.len() as u64);
    for (index, (start, bytes)) in chunks.into_iter().enumerate() {
        let entry = at + 24 * index;
        assert_eq!((u16_at(entry), u16_at(entry + 2)), (0, 0));
        assert_eq!((u32_at(entry + 4), u32_at(entry + 8)), (bytes as u32, bytes as u32));
        assert_eq!(u64_at(entry + 16), sum(start as usize..(start + bytes) as usize));
    }
}

/// Formats bytes as `hexdump -C` does.
fn hexdump(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (line, row) in bytes.chunks(16).enumerate() {
        let half = |half: &[u8]| {
            half.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
        };
        let letters: String =
            row.iter().map(|b| if (32..127).contains(b) { *b as char } else { '.' }).collect();
        text +=
            &format!("{:08x}  {}  {}  |{letters}|\n", line * 16, half(&row[..8]), half(&row[8..]));
    }
    text
}
