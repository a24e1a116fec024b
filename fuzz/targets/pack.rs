//! Fuzzes whole packs, whose checksums are made right first. Every accepted tensor must lie inside the file, must not
//! overlap the others, and must be covered by a checksum.

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
            assert!(extent.offset >= last && extent.end() <= data.len() as u64);
            last = extent.end();
            let (start, end) = index.cover(extent.offset, extent.end()).expect("inside a block");
            assert!(start <= extent.offset && extent.end() <= end && end <= data.len() as u64);
        }
        for chunk in index.chunks(index.range().start, index.range().end) {
            let _ = checksum(&data[chunk.offset as usize..chunk.end() as usize]) == chunk.checksum;
        }
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
