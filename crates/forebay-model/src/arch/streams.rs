//! Residual streams beside each other (hyper-connections).

use forebay_compute::{STREAMS_MAX, StreamShape};

use super::architecture::{Architecture, FeedForward, Layer, Mixer, NormLayout};
use super::check::{check, check_size};
use super::config::Config;
use super::family::Family;
use super::gguf_keys::Keys;
use super::shapes::{StreamForm, StreamRule, Streams};
use crate::ModelError;

impl Architecture {
    /// Returns the shape of a row of the residual stream, if it has several streams.
    pub fn stream_shape(&self) -> Option<StreamShape> {
        self.streams.map(|streams| StreamShape { count: streams.count, width: self.hidden })
    }

    /// Returns the number of elements of a row of the residual stream.
    pub fn stream_width(&self) -> usize {
        self.stream_shape().map_or(self.hidden, |shape| shape.row())
    }

    /// Returns the widths of a row's coefficients, of its gated streams, and of the low-rank projection for the gates.
    pub(crate) fn stream_widths(&self) -> [usize; 3] {
        let Some((streams, shape)) = self.streams.zip(self.stream_shape()) else { return [0; 3] };
        match streams.rule {
            StreamRule::Mixed { .. } => [shape.coefficients(), 0, 0],
            StreamRule::Gated { rank } => [shape.count, shape.row(), rank],
            StreamRule::Predicted { .. } => [0; 3],
        }
    }

    pub(super) fn validate_streams(&self) -> Result<(), ModelError> {
        let is_gated = matches!(self.streams, Some(Streams { rule: StreamRule::Gated { .. }, .. }));
        check(
            "norms of blocks",
            if self.norms == NormLayout::None { "none" } else { "present" },
            (self.norms == NormLayout::None) == is_gated,
            "blocks take gated residual streams without a norm, and nothing else",
        )?;
        let Some(Streams { count, rule }) = self.streams else { return Ok(()) };
        check(
            "number of residual streams",
            count,
            (2..=STREAMS_MAX).contains(&count),
            &format!("it must be from 2 to {STREAMS_MAX}"),
        )?;
        check_size("width of all residual streams", count.saturating_mul(self.hidden))?;
        match rule {
            StreamRule::Predicted { active, clip, branch_rank, .. } => {
                return self.validate_predicted(count, (active, clip, branch_rank));
            }
            StreamRule::Gated { rank } => check_size("rank of the streams' gates", rank)?,
            StreamRule::Mixed { iterations, epsilon, .. } => {
                let fits = (1..=1000).contains(&iterations);
                check("iterations of hyper-connections", iterations, fits, "from 1 to 1000")?;
                let fits = (0.0..1.0).contains(&epsilon);
                check("epsilon of hyper-connections", epsilon, fits, "from 0 to less than 1")?;
            }
        }
        let own_norms = self.expert_layers().any(|of| of.own_norms);
        let is_plain = self.residual_scale == 1.0
            && self.logit_scale == 1.0
            && !self.layer_scales
            && self.layer_embeddings.is_none()
            && !own_norms
            && !(0..self.layers.len()).any(|layer| self.norms_of(layer).after());
        check(
            "residual streams",
            count,
            is_plain,
            "forebay knows several of them without scales, post-norms and embeddings of layers",
        )?;
        check(
            "residual streams",
            count,
            self.layers.iter().any(|layer| layer.feed_forward.has_experts()),
            "forebay knows several of them in models with experts",
        )
    }
}

impl Architecture {
    /// Checks a model of which layers compute one stream.
    fn validate_predicted(
        &self,
        count: usize,
        (active, clip, branch_rank): (usize, Option<f32>, usize),
    ) -> Result<(), ModelError> {
        check("altup_active_idx", active, active < count, "it must be one of the streams")?;
        check_size("laurel_rank", branch_rank)?;
        let clip = clip.unwrap_or(1.0);
        check("altup_coef_clip", clip, clip.is_finite() && clip > 0.0, "it must be positive")?;
        let fits = |layer: &Layer| {
            layer.mixer == Mixer::Attention
                && matches!(layer.feed_forward, FeedForward::Dense { .. })
        };
        let is_known = self.residual_scale == 1.0
            && !self.layer_scales
            && self.layer_embeddings.is_some()
            && self.ngrams.is_none()
            && self.norms == NormLayout::Sandwich
            && self.layers.iter().all(fits);
        check(
            "residual streams",
            count,
            is_known,
            "forebay knows alternating updates with embeddings of layers, norms on both sides of blocks, and layers of \
             attention and a dense feed-forward",
        )
    }

    /// Returns the widths of the hidden state, the branch beside attention and all streams, if layers compute one stream; otherwise 0.
    pub(crate) fn predicted_widths(&self) -> [usize; 3] {
        match self.streams {
            Some(Streams { rule: StreamRule::Predicted { branch_rank, .. }, .. }) => {
                [self.hidden, branch_rank, self.stream_width()]
            }
            _ => [0; 3],
        }
    }

    /// Returns the number of the stream that layers compute, if they compute one of several.
    pub(crate) fn active_stream(&self) -> Option<usize> {
        match self.streams?.rule {
            StreamRule::Predicted { active, .. } => Some(active),
            StreamRule::Mixed { .. } | StreamRule::Gated { .. } => None,
        }
    }
}

/// Reads the residual streams of a family that has several from `config.json`.
pub(super) fn of_huggingface(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<Streams>, ModelError> {
    let Some(form) = family.layers.streams else { return Ok(None) };
    let mixes = config.flag("mhc")?.unwrap_or(true);
    check("mhc", mixes, mixes, "forebay knows this family with hyper-connections")?;
    Ok(Some(match form {
        StreamForm::Mixed(end) => Streams {
            count: config.count("hc_mult")?,
            rule: StreamRule::Mixed {
                iterations: config.count("hc_sinkhorn_iters")?,
                epsilon: config.float("hc_eps")?.ok_or_else(|| config.missing("hc_eps"))? as f32,
                end,
            },
        },
        StreamForm::Gated => Streams {
            count: config.count("hc_count")?,
            rule: StreamRule::Gated { rank: config.count("hc_lowrank")? },
        },
        StreamForm::Predicted => {
            // Layers that share keys and values still have tensors for their own, so no tensor says how many there are.
            config.count("num_kv_shared_layers")?;
            Streams {
                count: config.count("altup_num_inputs")?,
                rule: StreamRule::Predicted {
                    active: config.count("altup_active_idx")?,
                    scaled: config.flag("altup_correct_scale")?.unwrap_or(true),
                    clip: config.float_or("altup_coef_clip", Some(120.0))?,
                    branch_rank: config.count("laurel_rank")?,
                },
            }
        }
    }))
}

/// Reads the residual streams of a family that has several from GGUF metadata.
pub(super) fn of_gguf(keys: &Keys<'_>, family: &Family) -> Result<Option<Streams>, ModelError> {
    let epsilon = "hyper_connection.epsilon";
    match family.layers.streams {
        None => Ok(None),
        Some(StreamForm::Mixed(end)) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Mixed {
                iterations: keys.count("hyper_connection.sinkhorn_iterations")?,
                epsilon: keys.optional_float(epsilon)?.ok_or_else(|| keys.missing(epsilon))?,
                end,
            },
        })),
        Some(StreamForm::Gated) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Gated { rank: keys.count("hyper_connection.low_rank")? },
        })),
        Some(StreamForm::Predicted) => unreachable!("such families have no GGUF files"),
    }
}
