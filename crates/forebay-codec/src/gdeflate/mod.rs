//! GDeflate, as in DirectStorage: a stream of tiles of 64 KiB, each decoded without the others.
//!
//! A tile has the blocks of Deflate64 (RFC 1951 with distances to 65536 and lengths to 65538), but its bits are dealt to 32 lanes, which a
//! decoder reads in turn. `docs/codec.md` describes the bytes.

mod decode;
mod encode;
mod huffman;
mod matches;

pub(crate) use decode::TileDecoder;
pub(crate) use encode::TileEncoder;

use crate::CodecError;
use crate::bits::table_word;

/// Bytes of a tile before encoding; the last may have fewer.
const TILE: usize = 1 << 16;

const LANES: usize = 32;

/// Bytes of a stream before the offsets of its tiles.
const HEADER: usize = 8;

/// The format's identifier, and the same with all bits inverted.
const IDENTIFIER: [u8; 2] = [4, 0xfb];

/// Bits 0 and 1 of the last word of the header: tiles of 64 KiB.
const TILE_SIZE: u32 = 1;

/// Returns the most bytes of a stream for `bytes` bytes.
pub(crate) fn stream_bytes_max(bytes: usize) -> usize {
    let tiles = bytes.div_ceil(TILE);
    // A tile that does not become smaller is up to two stored blocks. Each lane fills its last word, and may have one in advance.
    HEADER + tiles * (4 + 8 + 2 * 4 * LANES) + bytes.next_multiple_of(4)
}

/// Appends the stream of `bytes` to `out`.
pub(crate) fn encode_stream(encoder: &mut TileEncoder, bytes: &[u8], out: &mut Vec<u8>) {
    let tiles = bytes.len().div_ceil(TILE);
    out.extend(IDENTIFIER);
    out.extend((tiles as u16).to_le_bytes());
    let last = (bytes.len() % TILE) as u32;
    out.extend((TILE_SIZE | last << 2).to_le_bytes());
    let offsets = out.len();
    out.resize(offsets + 4 * tiles, 0);
    let data = out.len();
    let mut at = 0;
    for (index, tile) in bytes.chunks(TILE).enumerate() {
        at = out.len() - data;
        encoder.encode(tile, out);
        out[offsets + 4 * index..][..4].copy_from_slice(&(at as u32).to_le_bytes());
    }
    // The first tile's offset is 0, so this place holds the length of the last.
    if tiles > 0 {
        let length = (out.len() - data - at) as u32;
        out[offsets..offsets + 4].copy_from_slice(&length.to_le_bytes());
    }
}

/// Decodes a stream to `decoded`, whose length must be that of the stream.
pub(crate) fn decode_stream(
    decoder: &mut TileDecoder,
    stream: &[u8],
    decoded: &mut [u8],
) -> Result<(), CodecError> {
    let Some((header, rest)) = stream.split_first_chunk::<HEADER>() else {
        return Err(CodecError::Stream { reason: "it has no header" });
    };
    if header[..2] != IDENTIFIER {
        return Err(CodecError::Stream { reason: "it has another identifier" });
    }
    let tiles = usize::from(u16::from_le_bytes([header[2], header[3]]));
    let word = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    let (size, last, reserved) = (word & 3, (word >> 2 & 0x3_ffff) as usize, word >> 20);
    if size != TILE_SIZE || reserved != 0 {
        return Err(CodecError::Stream { reason: "its tiles have another size than 64 KiB" });
    }
    let expected = decoded.len();
    if tiles != expected.div_ceil(TILE) || last != expected % TILE {
        let before = tiles.saturating_sub(usize::from(last > 0)) * TILE;
        return Err(CodecError::DecodedBytes { bytes: before + last, expected });
    }
    let Some((offsets, data)) = rest.split_at_checked(4 * tiles) else {
        return Err(CodecError::Stream { reason: "offsets of its tiles are missing" });
    };
    let mut start = 0_usize;
    for (tile, decoded) in decoded.chunks_mut(TILE).enumerate() {
        let end = match tile + 1 {
            next if next < tiles => Some(table_word(offsets, next)),
            _ => start.checked_add(table_word(offsets, 0)),
        };
        let Some(bytes) = end.and_then(|end| data.get(start..end)) else {
            return Err(CodecError::Tile { tile, reason: "it does not lie in the stream" });
        };
        decoder.decode(bytes, decoded).map_err(|reason| CodecError::Tile { tile, reason })?;
        start += bytes.len();
    }
    if start != data.len() {
        return Err(CodecError::Stream { reason: "bytes follow the last tile" });
    }
    Ok(())
}
