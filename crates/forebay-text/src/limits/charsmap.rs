//! Character maps of SentencePiece: the length of a tree, the tree, and texts that end with a NUL.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// Returns the bytes of the longest text that a character becomes. `map` is Base64.
///
/// # Errors
/// Returns an error if the lengths in the map do not match.
pub fn longest(map: &str) -> Result<usize, String> {
    let bytes =
        BASE64_STANDARD.decode(map).map_err(|error| format!("its character map: {error}"))?;
    let wrong = || "its character map is damaged".to_owned();
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or_else(wrong)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| wrong())?;
    if !length.is_multiple_of(4) || length > rest.len() || length == 0 {
        return Err(wrong());
    }
    let texts = rest[length..].split(|byte| *byte == 0);
    Ok(texts.map(<[u8]>::len).max().unwrap_or(0).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_must_match() {
        let map = |length: u32, rest: &[u8]| {
            longest(&BASE64_STANDARD.encode([&length.to_le_bytes()[..], rest].concat()))
        };
        assert_eq!(map(4, b"treeabc\0de\0"), Ok(3));
        assert_eq!(map(4, b"tree"), Ok(1));
        for (length, rest) in [(0x8000_0000, &b"tree"[..]), (8, b"tree"), (3, b"tree"), (0, b"")] {
            assert!(map(length, rest).is_err(), "{length}");
        }
        assert!(longest("A").is_err() && longest("").is_err());
    }
}
