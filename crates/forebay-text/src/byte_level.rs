//! The byte alphabet of byte-level BPE: every byte is written as one printable character.
//!
//! Bytes that are printable in Latin-1 stand for themselves. The other 68 use the characters from U+0100 on, in order
//! (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

use std::sync::OnceLock;

/// End of the characters in use. The last one is U+0143.
const ALPHABET_END: usize = 0x144;

struct Alphabet {
    of_byte: [char; 256],
    of_char: [Option<u8>; ALPHABET_END],
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

fn alphabet() -> &'static Alphabet {
    static ALPHABET: OnceLock<Alphabet> = OnceLock::new();
    ALPHABET.get_or_init(|| {
        let mut of_byte = ['\0'; 256];
        let mut of_char = [None; ALPHABET_END];
        let mut stand_ins = '\u{100}'..;
        for byte in 0..=255u8 {
            let stand_in = if is_printable(byte) { Some(byte as char) } else { stand_ins.next() };
            // The default is never used: 68 stand-ins are taken from a range of a million.
            let character = stand_in.unwrap_or('\0');
            of_byte[byte as usize] = character;
            of_char[character as usize] = Some(byte);
        }
        Alphabet { of_byte, of_char }
    })
}

/// Returns the character that stands for `byte`.
pub fn char_of_byte(byte: u8) -> char {
    alphabet().of_byte[byte as usize]
}

/// Returns the byte that `character` stands for.
pub fn byte_of_char(character: char) -> Option<u8> {
    alphabet().of_char.get(character as usize).copied().flatten()
}

/// Returns the bytes that a token's text stands for. Characters outside the alphabet stand for their own UTF-8 bytes,
/// because some vocabularies hold plain text among their normal tokens.
pub fn decode(token: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(token) else { return token.to_vec() };
    let mut bytes = Vec::with_capacity(token.len());
    for character in text.chars() {
        match byte_of_char(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_a_bijection() {
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(char_of_byte(0xAD), '\u{143}');
        for byte in 0..=255 {
            assert_eq!(byte_of_char(char_of_byte(byte)), Some(byte));
        }
        assert_eq!(byte_of_char('\u{144}'), None);
        assert_eq!(decode("Ġa｜".as_bytes()), " a｜".as_bytes());
    }
}
