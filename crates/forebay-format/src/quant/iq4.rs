//! Four bits per element through a table of 16 unevenly spaced levels: IQ4_NL, IQ4_XS.
//!
//! Every 32 elements take 16 bytes of nibbles: byte `i` holds element `i` (low) and `i + 16`
//! (high).
//!
//! | type | elements | bytes, in order | value |
//! |---|---|---|---|
//! | IQ4_NL | 32 | `d` f16, 16 nibble bytes | `d * LEVELS[q]` |
//! | IQ4_XS | 256 | `d` f16, `high` u16, `low` 4, 128 nibble bytes | `d * (sc - 32) * LEVELS[q]` |
//!
//! The low four bits of the scale `sc` of group `g` (32 elements) are a nibble of `low`, the low
//! one for even groups. Its high two bits are bits `2*g` and `2*g + 1` of `high`.

use super::{half, u16_at};

const LEVELS: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

fn decode_group(scale: f32, nibbles: &[u8], out: &mut [f32]) {
    for (i, byte) in nibbles.iter().enumerate() {
        out[i] = scale * LEVELS[usize::from(byte & 15)];
        out[i + 16] = scale * LEVELS[usize::from(byte >> 4)];
    }
}

pub(super) fn iq4_nl(block: &[u8], out: &mut [f32]) {
    decode_group(half(block, 0), &block[2..], out);
}

pub(super) fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high, low) = (half(block, 0), u16_at(block, 2), &block[4..8]);
    let groups = block[8..].chunks_exact(16).zip(out.chunks_exact_mut(32));
    for (g, (nibbles, out)) in groups.enumerate() {
        let low = low[g / 2] >> (g % 2 * 4) & 15;
        let high = (high >> (2 * g) & 3) as u8;
        decode_group(d * (f32::from(high << 4 | low) - 32.0), nibbles, out);
    }
}
