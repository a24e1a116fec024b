//! Encryption of segments: AES-256-GCM with one key for each segment.
//!
//! The key of a segment is derived from the user's secret and the segment's random tag by HKDF with SHA-256. No part of a
//! segment is written twice, so its offset is a nonce that never repeats.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};

/// Bytes that the cipher adds to what it encrypts.
pub const TAG_BYTES: usize = 16;

/// A secret from which all keys are derived.
#[derive(Clone)]
pub struct Secret(Prk);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Least bytes of a secret.
    pub const BYTES_MIN: usize = 32;

    /// Makes a secret of random bytes, such as the content of a key file. Returns `None` if they are fewer than 32.
    pub fn new(bytes: &[u8]) -> Option<Secret> {
        let salt = Salt::new(HKDF_SHA256, b"forebay KV store 1");
        (bytes.len() >= Secret::BYTES_MIN).then(|| Secret(salt.extract(bytes)))
    }

    /// Returns 32 bytes that depend on the secret, on `purpose` and on `tag`.
    fn derive(&self, purpose: &[u8], tag: &[u8]) -> [u8; 32] {
        let mut bytes = [0; 32];
        let info = [purpose, tag];
        let filled = self.0.expand(&info, HKDF_SHA256).and_then(|key| key.fill(&mut bytes));
        filled.expect("32 bytes are the length of this hash");
        bytes
    }

    /// Returns bytes from which a store recognises its secret. They do not reveal it.
    pub fn check(&self, tag: &[u8]) -> [u8; 32] {
        self.derive(b"check", tag)
    }

    /// Returns the cipher of the segment with this tag.
    pub fn cipher(&self, tag: &[u8]) -> Cipher {
        let key = UnboundKey::new(&AES_256_GCM, &self.derive(b"segment", tag));
        Cipher(LessSafeKey::new(key.expect("32 bytes are the length of this key")))
    }
}

/// Encrypts and decrypts the parts of one segment.
#[derive(Debug)]
pub struct Cipher(LessSafeKey);

/// The parts of a record that are encrypted.
#[derive(Debug, Clone, Copy)]
pub enum Sealed {
    Meta = 0,
    Payload = 1,
    /// The list of records in a segment's index file.
    Index = 2,
}

fn nonce(part: Sealed, offset: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&offset.to_le_bytes());
    bytes[8] = part as u8;
    Nonce::assume_unique_for_key(bytes)
}

impl Cipher {
    /// Encrypts the bytes before the last [`TAG_BYTES`], which get the tag. `offset` is that of the record in its segment.
    pub fn seal(&self, part: Sealed, offset: u64, bytes: &mut [u8]) {
        let (content, tag) = bytes.split_at_mut(bytes.len() - TAG_BYTES);
        let sealed = self.0.seal_in_place_separate_tag(nonce(part, offset), Aad::empty(), content);
        tag.copy_from_slice(sealed.expect("blocks are shorter than 64 GiB").as_ref());
    }

    /// Decrypts what [`Cipher::seal`] made, in place. Returns false if the bytes are not those.
    pub fn open(&self, part: Sealed, offset: u64, bytes: &mut [u8]) -> bool {
        self.0.open_in_place(nonce(part, offset), Aad::empty(), bytes).is_ok()
    }
}

/// Returns random bytes.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let filled = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
    filled.expect("the system has random numbers");
    bytes
}
