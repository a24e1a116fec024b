//! Conversion of weights while they are copied into a pack or out of one.

use forebay_codec::{Compact, decode_compact, encode_compact};

use crate::Extent;

/// Conversion of whole blocks of weights to blocks of another size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Conversion {
    /// From BF16 to compact BF16.
    Compact(Compact),
    /// From compact BF16 to BF16.
    Plain(Compact),
}

impl Conversion {
    /// Returns the bytes of a block before the conversion and after it.
    pub fn block_bytes(self) -> (u64, u64) {
        let bytes = |of: Compact| (of.plain_bytes() as u64, of.bytes() as u64);
        match self {
            Conversion::Compact(of) => bytes(of),
            Conversion::Plain(of) => {
                let (plain, compact) = bytes(of);
                (compact, plain)
            }
        }
    }

    /// Converts whole blocks. Returns false if they cannot be converted: too many exponents lie apart from the others, or
    /// compact blocks are damaged. `to` is then not to be used.
    pub fn convert(self, from: &[u8], to: &mut [u8]) -> bool {
        match self {
            Conversion::Compact(of) => encode_compact(of, from, to) == Ok(true),
            Conversion::Plain(of) => decode_compact(of, from, to).is_ok(),
        }
    }
}

/// An extent of a tensor, and where its bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackSpan {
    /// Offset in the output.
    pub to: u64,
    pub from: Extent,
    /// Index of the tensor in the source's catalog.
    pub tensor: usize,
    /// Conversion of the bytes. They are copied unchanged if there is none.
    pub conversion: Option<Conversion>,
}

impl PackSpan {
    /// Returns the number of bytes in the output.
    pub fn bytes(&self) -> u64 {
        match self.conversion {
            None => self.from.length,
            Some(conversion) => {
                let (from, to) = conversion.block_bytes();
                self.from.length / from * to
            }
        }
    }

    /// Returns the offset in the output at which the span ends.
    pub fn end(&self) -> u64 {
        self.to + self.bytes()
    }
}
