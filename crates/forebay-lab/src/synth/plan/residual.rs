//! Tensors of gated residual streams and of embeddings of n-grams (Qwen4-Exp).

use super::super::error::SynthError;
use super::super::recipe::Role;
use super::super::shapes::{NGrams, Streams};
use super::List;

/// Tables have a multiple of so many rows together.
const ROWS_TOGETHER: u64 = 128;

impl List<'_> {
    /// Adds the gates of both blocks of a layer, and what the blocks' outputs are added to the streams by.
    pub fn gated_blocks(&mut self, layer: u32, streams: (u32, u32)) -> Result<(), SynthError> {
        for block in ["attn", "ffn"] {
            let name = format!("blk.{layer}.hc_{block}");
            self.gated_streams(&name, layer, streams)?;
            let (count, width) = (u64::from(streams.0), self.streams_width(streams.0));
            let inject = format!("{name}_inject.weight");
            self.matrix(inject, Role::Other, layer, &[count, width])?;
        }
        Ok(())
    }

    /// Adds the gates of `streams.0` streams, which have the rank `streams.1`.
    pub fn gated_streams(
        &mut self,
        name: &str,
        layer: u32,
        (count, rank): (u32, u32),
    ) -> Result<(), SynthError> {
        let (width, rank) = (self.streams_width(count), u64::from(rank));
        self.matrix(format!("{name}_down.weight"), Role::Other, layer, &[rank, width])?;
        self.vector(format!("{name}_norm.weight"), &[width], 1.0);
        self.matrix(format!("{name}_up.weight"), Role::Other, layer, &[width, rank])
    }

    /// Adds the tables of n-grams, which are one tensor.
    pub fn ngram_tables(&mut self, of: &NGrams) -> Result<(), SynthError> {
        let rows: u64 = of.table_rows((self.layers, self.shape.layers)).iter().sum();
        let rows = rows.next_multiple_of(ROWS_TOGETHER);
        let name = "per_layer_token_embd.weight".to_owned();
        self.matrix(name, Role::Other, 0, &[rows, u64::from(of.row())])
    }

    /// Adds the tensors of the layer that adds embeddings of n-grams.
    pub fn ngrams(&mut self, of: &NGrams) -> Result<(), SynthError> {
        let layer = of.layer;
        let name = |part: &str| format!("blk.{layer}.ple_{part}.weight");
        let streams = match self.shape.streams {
            Some(Streams::Gated { count, .. } | Streams::Mixed(count)) => count,
            Some(Streams::Bank(_)) | None => 1,
        };
        let (hidden, width) = (u64::from(self.shape.hidden), self.streams_width(streams));
        let embedded = u64::from(of.width);
        self.vector(name("conv1d"), &[width, u64::from(of.convolution)], 0.25);
        self.matrix(name("key"), Role::Other, layer, &[width, embedded])?;
        for part in ["norm_conv", "norm_key", "norm_query"] {
            self.vector(name(part), &[width], 1.0);
        }
        self.matrix(name("value"), Role::Other, layer, &[hidden, embedded])
    }

    fn streams_width(&self, count: u32) -> u64 {
        u64::from(count) * u64::from(self.shape.hidden)
    }
}
