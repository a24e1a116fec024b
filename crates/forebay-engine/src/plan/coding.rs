//! Coded blocks of a pack: how many bytes of the file store those in memory, and how long decoding takes.

use forebay_codec::Codec;
use forebay_format::Catalog;
use forebay_format::pack::BlockKind;
use forebay_store::checking_threads;

use crate::doctor::DecoderRate;

/// Rates of one core, in bytes after decoding per second, where `doctor` has not measured them: those of a CPU with AVX2.
const USUAL: [(Codec, f64); 3] =
    [(Codec::Exponents, 3e9), (Codec::Zstd, 1e9), (Codec::Gdeflate, 0.3e9)];

/// How the blocks of a model that are read again and again are stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Coding {
    /// Bytes in memory and in the file.
    bytes: u64,
    stored_bytes: u64,
    /// Bytes in memory of the chunks of each codec.
    of_codec: Vec<(Codec, u64)>,
}

impl Coding {
    /// Returns the coding of a model. Without coded blocks, nothing is counted.
    pub fn of(catalog: &Catalog) -> Coding {
        let mut coding = Coding::default();
        let index = catalog.pack.as_ref().map(|pack| &pack.chunks).filter(|of| of.is_coded());
        let Some(index) = index else { return coding };
        let read_again = |kind: BlockKind| {
            matches!(kind, BlockKind::Layer | BlockKind::Expert | BlockKind::Head)
        };
        for block in index.blocks().iter().filter(|block| read_again(block.kind)) {
            coding.bytes += block.bytes;
            coding.stored_bytes += block.stored_bytes;
            if !block.is_coded() {
                continue;
            }
            for chunk in index.chunks_of(block) {
                match coding.of_codec.iter_mut().find(|(codec, _)| *codec == chunk.codec) {
                    Some((_, bytes)) => *bytes += chunk.bytes,
                    None => coding.of_codec.push((chunk.codec, chunk.bytes)),
                }
            }
        }
        coding
    }

    /// Returns the bytes that reach memory in a second if the disk reads `disk` bytes per second.
    pub fn rate(&self, disk: f64, decoders: &[DecoderRate], processors: usize) -> f64 {
        if self.stored_bytes == 0 {
            return disk;
        }
        let decoder = |codec: Codec| {
            let measured = decoders.iter().find(|rate| rate.codec == codec.name());
            let usual = USUAL.iter().find(|(of, _)| *of == codec).map(|(_, rate)| *rate);
            measured.map(|rate| rate.bytes_per_second).or(usual)
        };
        let seconds = |(codec, bytes): &(Codec, u64)| {
            decoder(*codec).map_or(0.0, |rate| *bytes as f64 / rate)
        };
        let threads = checking_threads(processors) as f64;
        let decoding = self.of_codec.iter().map(seconds).sum::<f64>() / threads;
        // Chunks are decoded while others are being read.
        let reading = self.stored_bytes as f64 / disk;
        self.bytes as f64 / reading.max(decoding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_bounds_what_a_fast_disk_brings() {
        let coding = Coding {
            bytes: 150,
            stored_bytes: 100,
            of_codec: vec![(Codec::Exponents, 100), (Codec::Raw, 50)],
        };
        let decoders = [DecoderRate { codec: "exponents".into(), bytes_per_second: 10e9 }];
        assert_eq!(coding.rate(2e9, &decoders, 16), 3e9);
        // 4 threads decode 40 GB/s of two thirds of the bytes.
        assert!((coding.rate(1e12, &decoders, 8) / 60e9 - 1.0).abs() < 1e-9);
        // Not measured.
        assert!((coding.rate(1e12, &[], 2) / 4.5e9 - 1.0).abs() < 1e-9);
        assert_eq!(Coding::default().rate(2e9, &decoders, 16), 2e9);
    }
}
