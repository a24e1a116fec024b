//! Fuzzes whole packs, whose checksums are made right first. Every accepted tensor must lie inside the decoded file, must not
//! overlap the others, and must be covered by checksums. Chunks tile the blocks and are decoded.

#![no_main]

use forebay_format::pack::{checksum, parse_pack_bytes, restore_gguf, restore_hugging_face};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let sealed = seal(data.to_vec());
    forebay_fuzz::bounded(&sealed, |data| {
        let Ok(catalog) = parse_pack_bytes(data) else { return };
        let index = &catalog.pack.as_ref().expect("it was read as a pack").chunks;
        let mut last = 0;
        let mut extents: Vec<_> = catalog.tensors().iter().flat_map(|t| t.extents()).collect();
        extents.sort();
        for extent in extents {
            assert!(extent.offset >= last && extent.end() <= index.range().end);
            last = extent.end();
            let (start, end) = index.cover(extent.offset, extent.end()).expect("inside a block");
            assert!(start <= extent.offset && extent.end() <= end);
            let stored = index.stored_for(extent.offset, extent.end()).expect("inside a block");
            assert!(stored.end <= data.len() as u64);
        }
        let mut end = index.stored_range().start;
        for chunk in index.chunks(index.range().start, index.range().end) {
            assert_eq!(chunk.stored_offset, end);
            end = chunk.stored_end();
            let stored = &data[chunk.stored_offset as usize..end as usize];
            let own = chunk.encoded(stored);
            let mut decoded = vec![0; chunk.bytes as usize];
            let _ = (checksum(stored) == chunk.checksum, chunk.codec.decode(own, &mut decoded));
        }
        assert_eq!(end, index.stored_range().end);
        let _ = restore_gguf(&catalog);
        let _ = restore_hugging_face(&catalog);
    });
});

/// Sets the right size and checksums of the header and of those sections that are inside the file.
fn seal(mut data: Vec<u8>) -> Vec<u8> {
    if data.len() < 4096 {
        return data;
    }
    data.resize(data.len().next_multiple_of(4096), 0);
    let file_bytes = data.len() as u64;
    data[16..24].copy_from_slice(&file_bytes.to_le_bytes());
    for section in 0..4 {
        let at = 64 + 32 * section;
        let field = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().expect("8 bytes"));
        let (start, bytes) = (field(at), field(at + 8));
        let end = start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(4096));
        let Some(end) = end.filter(|end| *end <= file_bytes) else { continue };
        let sum = checksum(&data[start as usize..end as usize]);
        data[at + 24..at + 32].copy_from_slice(&sum.to_le_bytes());
    }
    let sum = checksum(&data[..4088]);
    data[4088..4096].copy_from_slice(&sum.to_le_bytes());
    data
}
