//! BF16 in compact blocks; `forebay-codec` describes them.

use forebay_codec::{Compact, decode_compact_block};
use half::bf16;

pub(super) fn c2048(block: &[u8], out: &mut [f32]) {
    decode(Compact::C2048, block, out);
}

pub(super) fn c256(block: &[u8], out: &mut [f32]) {
    decode(Compact::C256, block, out);
}

fn decode(of: Compact, block: &[u8], out: &mut [f32]) {
    decode_compact_block(of, block, |column, eight| {
        let out = &mut out[column..][..eight.len()];
        out.iter_mut().zip(eight).for_each(|(out, bits)| *out = bf16::from_bits(bits).to_f32());
    });
}
