//! Weights of residual streams beside each other.

use forebay_format::Block;

use super::layer::LayerBuilder;
use super::parts::{PartMatrix, PredictedWeights, ResidentMatrix, StreamWeights};
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
        if matches!(rule, StreamRule::Predicted { .. }) {
            return Ok([None, None]);
        }
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
                StreamRule::Predicted { .. } => {
                    unreachable!("blocks of such models collapse nothing")
                }
            });
        }
        Ok(found)
    }

    /// Returns the weights of a layer that computes one of several streams, if the model is of this kind. Its matrices become parts of
    /// the dense block.
    pub(super) fn predicted(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<Option<Box<PredictedWeights>>, ModelError> {
        let Some(Streams { count, rule: StreamRule::Predicted { scaled, clip, branch_rank, .. } }) =
            self.architecture.streams
        else {
            return Ok(None);
        };
        let hidden = self.architecture.hidden;
        let mut router = tensors.rows(&self.name("streams_router"), count, hidden)?;
        let norm = tensors.norm(&self.name("streams_router_norm"), hidden)?;
        for row in router.chunks_exact_mut(hidden) {
            // The normed row is divided by its width, too.
            let factors = norm.iter().map(|weight| weight / hidden as f32);
            row.iter_mut().zip(factors).for_each(|(weight, factor)| *weight *= factor);
        }
        let mut correction = tensors.rows(&self.name("streams_correction"), count, count)?;
        if let Some(clip) = clip {
            correction.iter_mut().for_each(|weight| *weight = weight.clamp(-clip, clip));
        }
        Ok(Some(Box::new(PredictedWeights {
            router,
            prediction: tensors.rows(&self.name("streams_prediction"), count * count, count)?,
            correction,
            output_scale: match scaled {
                true => Some(tensors.vector(&self.name("streams_output_scale"), hidden)?),
                false => None,
            },
            left: self.matrix(tensors, dense, "branch_left", branch_rank, hidden)?,
            right: self.matrix(tensors, dense, "branch_right", hidden, branch_rank)?,
            branch_norm: tensors.norm(&self.name("branch_norm"), hidden)?,
        })))
    }
}

/// Returns the projections of the usual embedding to the other streams of a model that predicts these; nothing for other models. They
/// stay in memory.
pub(super) fn at_begin(
    architecture: &Architecture,
    names: &Names,
    tensors: &mut Tensors<'_>,
) -> Result<Vec<ResidentMatrix>, ModelError> {
    match architecture.streams {
        Some(Streams { count, rule: StreamRule::Predicted { .. } }) => {
            let names = names.stream_projections(count, false);
            projections(tensors, &names, count, architecture.hidden)
        }
        _ => Ok(Vec::new()),
    }
}

/// Reads matrices `[hidden, hidden]` of all streams but the first, which have a name each or one for all.
fn projections(
    tensors: &mut Tensors<'_>,
    names: &[String],
    streams: usize,
    hidden: usize,
) -> Result<Vec<ResidentMatrix>, ModelError> {
    if let [name] = names
        && streams > 2
    {
        let all = tensors.matrices(name, streams - 1, [hidden; 2])?;
        let each = all.chunks_exact(hidden * hidden);
        return Ok(each.map(|values| in_memory(values, hidden, hidden)).collect());
    }
    names.iter().map(|name| resident(tensors, name, hidden, hidden)).collect()
}

/// Reads a matrix that stays in memory.
fn resident(
    tensors: &mut Tensors<'_>,
    name: &str,
    rows: usize,
    cols: usize,
) -> Result<ResidentMatrix, ModelError> {
    Ok(in_memory(&tensors.rows(name, rows, cols)?, rows, cols))
}

fn in_memory(values: &[f32], rows: usize, cols: usize) -> ResidentMatrix {
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    ResidentMatrix { rows, cols, data }
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
        resident(tensors, &names.streams_end(role), rows, cols)
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
        StreamRule::Predicted { .. } => {
            let names = names.stream_projections(count, true);
            StreamWeights::Projected(projections(tensors, &names, count, architecture.hidden)?)
        }
    }))
}
