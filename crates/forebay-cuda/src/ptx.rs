//! The PTX of all modules: an archive that `cargo xtask ptx` writes, with one compressed frame per module.
//!
//! A module is decompressed when it is loaded, which takes about a millisecond. Tests compare every text with its
//! hash. The program does not, because the archive is part of the program.

use std::io::Read;
use std::ops::Range;
use std::sync::OnceLock;

static ARCHIVE: &[u8] = include_bytes!("../kernels/ptx.zst");
/// Manifest with one line per frame; comments in the file describe the columns.
static MANIFEST: &str = include_str!("../kernels/ptx.txt");

struct Entry {
    name: &'static str,
    /// First half of the SHA-256 of the text.
    #[cfg(test)]
    hash: &'static str,
    /// Length of the text in bytes.
    bytes: usize,
    /// Module whose text is the dictionary of this frame.
    base: Option<&'static str>,
    /// Byte range of the frame in the archive.
    frame: Range<usize>,
}

/// Returns true if there is such a module.
#[cfg(test)]
pub(crate) fn has(name: &str) -> bool {
    find(name).is_some()
}

#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    entries().iter().map(|entry| entry.name)
}

/// Returns the PTX of a module, or `None` if there is no such module.
///
/// # Panics
/// Panics if the archive is damaged, which tests exclude.
pub(crate) fn text(name: &str) -> Option<String> {
    let entry = find(name)?;
    let base = match entry.base {
        Some(base) => decompress(find(base).expect("the base is a module"), &[]),
        None => Vec::new(),
    };
    Some(String::from_utf8(decompress(entry, &base)).expect("PTX is text"))
}

fn decompress(entry: &Entry, base: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(entry.bytes);
    zstd::stream::read::Decoder::with_ref_prefix(&ARCHIVE[entry.frame.clone()], base)
        .and_then(|mut decoder| decoder.read_to_end(&mut text))
        .unwrap_or_else(|error| panic!("PTX of {}: {error}", entry.name));
    assert_eq!(text.len(), entry.bytes, "PTX of {}", entry.name);
    text
}

fn find(name: &str) -> Option<&'static Entry> {
    entries().iter().find(|entry| entry.name == name)
}

fn entries() -> &'static [Entry] {
    static ENTRIES: OnceLock<Vec<Entry>> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        let mut end = 0;
        let words = MANIFEST.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words
            .filter_map(|words| match words[..] {
                [name, _, _, _hash, bytes, base, stored] if name != "#" => {
                    let number = |word: &str| word.parse().expect("the manifest holds numbers");
                    let frame = end..end + number(stored);
                    end = frame.end;
                    Some(Entry {
                        name,
                        #[cfg(test)]
                        hash: _hash,
                        bytes: number(bytes),
                        base: (base != "-").then_some(base),
                        frame,
                    })
                }
                _ => None,
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn every_text_has_the_hash_of_the_manifest() {
        assert!(entries().len() > 100);
        for entry in entries() {
            let text = text(entry.name).unwrap();
            let hash = Sha256::digest(text.as_bytes());
            let hash: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hash, entry.hash, "{}", entry.name);
            assert!(text.starts_with(&format!("// {} ", entry.name)), "{}", entry.name);
            assert!(entry.bytes > 0);
        }
        assert_eq!(entries().last().unwrap().frame.end, ARCHIVE.len());
        assert!(text("no_such_module").is_none() && !has("no_such_module"));
    }
}
