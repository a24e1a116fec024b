//! Codecs of chunks of bytes, behind one interface.

use zstd::bulk;

use crate::container::{Container, container_bytes_max, encode_container};
use crate::gdeflate::{self, TileDecoder, TileEncoder};
use crate::{CodecError, Weights};

/// Most bytes of a chunk, before encoding.
pub const CHUNK_BYTES: usize = 4 << 20;

/// How the bytes of a chunk are stored. A chunk is decoded without other chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// The bytes themselves.
    Raw,
    /// Coded exponents of BF16, F16, FP8 or compact BF16.
    Exponents,
    /// Zstandard frames.
    Zstd,
    /// GDeflate: Deflate in 32 interleaved streams, which a GPU decodes in parallel.
    Gdeflate,
}

impl Codec {
    pub const ALL: [Codec; 4] = [Codec::Raw, Codec::Exponents, Codec::Zstd, Codec::Gdeflate];

    /// Returns the number by which files name the codec.
    pub const fn number(self) -> u16 {
        match self {
            Codec::Raw => 0,
            Codec::Exponents => 1,
            Codec::Zstd => 2,
            Codec::Gdeflate => 3,
        }
    }

    /// Returns the version of the codec's bytes that this crate reads and writes.
    pub const fn version(self) -> u16 {
        match self {
            Codec::Raw => 0,
            Codec::Exponents | Codec::Zstd | Codec::Gdeflate => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Codec::Raw => "raw",
            Codec::Exponents => "exponents",
            Codec::Zstd => "zstd",
            Codec::Gdeflate => "gdeflate",
        }
    }

    /// Returns the codec with this number.
    ///
    /// # Errors
    /// Returns an error if there is none.
    pub fn from_number(number: u16) -> Result<Codec, CodecError> {
        let found = Codec::ALL.into_iter().find(|codec| codec.number() == number);
        found.ok_or(CodecError::UnknownCodec { number })
    }

    pub fn from_name(name: &str) -> Option<Codec> {
        Codec::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// Returns the most bytes that a chunk of `bytes` bytes has after encoding.
    pub fn encoded_bytes_max(self, bytes: usize) -> usize {
        match self {
            Codec::Raw => bytes,
            Codec::Exponents => {
                let all = Weights::ALL.map(|weights| container_bytes_max(weights, bytes));
                all.into_iter().max().unwrap_or(0)
            }
            Codec::Zstd => zstd::zstd_safe::compress_bound(bytes),
            Codec::Gdeflate => gdeflate::stream_bytes_max(bytes),
        }
    }

    /// Decodes one chunk. [`Decoder`] does the same and keeps its memory from chunk to chunk.
    ///
    /// # Errors
    /// Returns the errors of [`Decoder::decode`].
    pub fn decode(self, encoded: &[u8], decoded: &mut [u8]) -> Result<(), CodecError> {
        Decoder::default().decode(self, encoded, decoded)
    }
}

/// A codec with the choices that only its encoder knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    Raw,
    /// For weights of this type, or compact blocks. Other bytes come back as well, but grow.
    Exponents(Weights),
    Zstd {
        /// 1 is fast and 22 is slow; 3 is usual. Others become the nearest of these, and 0 becomes 3.
        level: i32,
    },
    Gdeflate,
}

impl Encoding {
    pub const fn codec(self) -> Codec {
        match self {
            Encoding::Raw => Codec::Raw,
            Encoding::Exponents(_) => Codec::Exponents,
            Encoding::Zstd { .. } => Codec::Zstd,
            Encoding::Gdeflate => Codec::Gdeflate,
        }
    }
}

/// Encodes chunks, and keeps its memory from chunk to chunk.
pub struct Encoder {
    encoding: Encoding,
    zstd: Option<bulk::Compressor<'static>>,
    tiles: Option<Box<TileEncoder>>,
}

impl Encoder {
    pub fn new(encoding: Encoding) -> Encoder {
        Encoder { encoding, zstd: None, tiles: None }
    }

    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Appends the encoded bytes of a chunk to `encoded`: at most [`Codec::encoded_bytes_max`]. The same bytes and encoding give the
    /// same result with the same version of this crate.
    ///
    /// # Errors
    /// Returns an error if the chunk has more than [`CHUNK_BYTES`]. `encoded` is then as it was.
    pub fn encode(&mut self, bytes: &[u8], encoded: &mut Vec<u8>) -> Result<(), CodecError> {
        check_bytes(bytes.len())?;
        match self.encoding {
            Encoding::Raw => encoded.extend_from_slice(bytes),
            Encoding::Exponents(weights) => encode_container(weights, bytes, encoded)?,
            Encoding::Zstd { level } => {
                let compressor = match &mut self.zstd {
                    Some(compressor) => compressor,
                    none => none.insert(bulk::Compressor::new(zstd_level(level)).map_err(of_zstd)?),
                };
                let start = encoded.len();
                encoded.resize(start + Codec::Zstd.encoded_bytes_max(bytes.len()), 0);
                let written = compressor.compress_to_buffer(bytes, &mut encoded[start..]);
                encoded.truncate(start + *written.as_ref().unwrap_or(&0));
                written.map_err(of_zstd)?;
            }
            Encoding::Gdeflate => {
                let tiles = self.tiles.get_or_insert_default();
                gdeflate::encode_stream(tiles, bytes, encoded);
            }
        }
        Ok(())
    }
}

/// Decodes chunks of all codecs, and keeps its memory from chunk to chunk: after the first chunk of a codec, nothing is allocated.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<bulk::Decompressor<'static>>,
    tiles: Option<Box<TileDecoder>>,
}

impl Decoder {
    /// Decodes one chunk to `decoded`, whose length says how many bytes the chunk has.
    ///
    /// # Errors
    /// Returns an error if the bytes are no chunk of this codec, or one with another length. `decoded` then holds anything.
    pub fn decode(
        &mut self,
        codec: Codec,
        encoded: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), CodecError> {
        check_bytes(decoded.len())?;
        match codec {
            Codec::Raw => {
                check_decoded(encoded.len(), decoded.len())?;
                decoded.copy_from_slice(encoded);
                Ok(())
            }
            Codec::Exponents => Container::read(encoded, decoded.len())?.decode(decoded),
            Codec::Zstd => {
                let decompressor = match &mut self.zstd {
                    Some(decompressor) => decompressor,
                    none => none.insert(bulk::Decompressor::new().map_err(of_zstd)?),
                };
                let bytes = decompressor.decompress_to_buffer(encoded, decoded).map_err(of_zstd)?;
                check_decoded(bytes, decoded.len())
            }
            Codec::Gdeflate => {
                let tiles = self.tiles.get_or_insert_default();
                gdeflate::decode_stream(tiles, encoded, decoded)
            }
        }
    }
}

fn check_bytes(bytes: usize) -> Result<(), CodecError> {
    if bytes > CHUNK_BYTES {
        return Err(CodecError::ChunkBytes { bytes, most: CHUNK_BYTES });
    }
    Ok(())
}

fn check_decoded(bytes: usize, expected: usize) -> Result<(), CodecError> {
    if bytes != expected {
        return Err(CodecError::DecodedBytes { bytes, expected });
    }
    Ok(())
}

fn zstd_level(level: i32) -> i32 {
    if level == 0 { zstd::DEFAULT_COMPRESSION_LEVEL } else { level.clamp(1, 22) }
}

fn of_zstd(error: std::io::Error) -> CodecError {
    CodecError::Zstd { reason: error.to_string() }
}
