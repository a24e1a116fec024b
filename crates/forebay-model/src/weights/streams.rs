//! Weights of residual streams beside each other.

use forebay_format::Block;

use super::layer::LayerBuilder;
use super::parts::{PartMatrix, ResidentMatrix, StreamWeights};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{Architecture, Mixer, Names, StreamRule, Streams, StreamsEnd};

impl LayerBuilder<'_> {
    /// Returns what collapses the streams for the attention and for the feed-forward of the layer, if there are several. Their
    /// matrices become parts of the dense block.
    pub(super) fn streams(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<[Option<StreamWeights<PartMatrix>>; 2], ModelError> {
        let Some(Streams { count, rule }) = self.architecture.streams else {
            return Ok([None, None]);
        };
        let layer = &self.architecture.layers[self.index];
        let has = [layer.mixer != Mixer::None, !layer.feed_forward.is_none()];
        let shape = self.architecture.stream_shape().expect("there are several streams");
        let width = shape.row();
        let mut found = [None, None];
        for (found, (of, has)) in
            found.iter_mut().zip(["attention", "feed_forward"].into_iter().zip(has))
        {
            if !has {
                continue;
            }
            let role = |part: &str| format!("{of}_streams_{part}");
            *found = Some(match rule {
                StreamRule::Mixed { .. } | StreamRule::Independent { .. } => {
                    let [rows, ..] = self.architecture.stream_widths();
                    let parts = if rows == shape.factors() { 2 } else { 3 };
                    StreamWeights::Mixed {
                        mix: self.matrix(tensors, dense, &role("mix"), rows, width)?,
                        base: tensors.vector(&self.name(&role("base")), rows)?,
                        scales: tensors.vector(&self.name(&role("scale")), parts)?,
                    }
                }
                StreamRule::Gated { rank } => StreamWeights::Gated {
                    norm: tensors.norm(&self.name(&role("norm")), width)?,
                    down: self.matrix(tensors, dense, &role("down"), rank, width)?,
                    up: self.matrix(tensors, dense, &role("up"), width, rank)?,
                    inject: Some(self.matrix(tensors, dense, &role("inject"), count, width)?),
                },
                StreamRule::Bank { .. } => StreamWeights::Bank {
                    scores: tensors.vector(&self.name(&role("scores")), shape.width)?,
                },
            });
        }
        Ok(found)
    }
}

/// Returns what collapses the streams behind the last layer, if there are several. It stays in memory.
pub(super) fn at_end(
    architecture: &Architecture,
    names: &Names,
    tensors: &mut Tensors<'_>,
) -> Result<Option<StreamWeights<ResidentMatrix>>, ModelError> {
    let Some(Streams { count, rule }) = architecture.streams else { return Ok(None) };
    let width = architecture.stream_width();
    let mut matrix = |role: &str, rows: usize, cols: usize| {
        let values = tensors.rows(&names.streams_end(role), rows, cols)?;
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok::<_, ModelError>(ResidentMatrix { rows, cols, data })
    };
    Ok(Some(match rule {
        StreamRule::Mixed { end: StreamsEnd::Mean, .. } => StreamWeights::Mean,
        StreamRule::Mixed { end: StreamsEnd::Weighted, .. } | StreamRule::Independent { .. } => {
            StreamWeights::Mixed {
                mix: matrix("mix", count, width)?,
                base: tensors.vector(&names.streams_end("base"), count)?,
                scales: tensors.vector(&names.streams_end("scale"), 1)?,
            }
        }
        StreamRule::Gated { rank } => StreamWeights::Gated {
            down: matrix("down", rank, width)?,
            up: matrix("up", width, rank)?,
            norm: tensors.norm(&names.streams_end("norm"), width)?,
            inject: None,
        },
        StreamRule::Bank { .. } => StreamWeights::Bank {
            scores: tensors.vector(&names.streams_end("scores"), architecture.hidden)?,
        },
    }))
}
