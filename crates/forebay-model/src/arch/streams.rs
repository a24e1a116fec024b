//! Residual streams beside each other (hyper-connections).

use forebay_compute::{STREAMS_MAX, StreamShape};
use forebay_format::Catalog;

use super::architecture::{Architecture, FeedForward, Layer, Mixer};
use super::check::{check, check_size};
use super::config::Config;
use super::family::Family;
use super::gguf_keys::Keys;
use super::shapes::{NormLayout, StreamForm, StreamRule, Streams};
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
            StreamRule::Independent { .. } => [shape.factors(), 0, 0],
            StreamRule::Bank { .. } | StreamRule::Predicted { .. } => [0; 3],
        }
    }

    /// Returns true if the residual streams are a state and a bank of earlier ones.
    pub(crate) fn has_bank(&self) -> bool {
        self.streams.is_some_and(|streams| matches!(streams.rule, StreamRule::Bank { .. }))
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
            StreamRule::Bank { .. } => {
                let whole =
                    |layer: &Layer| layer.mixer != Mixer::None && !layer.feed_forward.is_none();
                let fits = self.layers.iter().all(whole) && self.mtp.is_none();
                let expected = "every layer must have attention or a recurrence and a feed-forward";
                check("layers that keep earlier states", count - 1, fits, expected)?;
            }
            StreamRule::Independent { magnitude, epsilon } => {
                let fits = magnitude.is_finite() && magnitude > 0.0;
                check("magnitude of hyper-connections", magnitude, fits, "it must be positive")?;
                let fits = (0.0..1.0).contains(&epsilon);
                check("epsilon of hyper-connections", epsilon, fits, "from 0 to less than 1")?;
            }
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
            StreamRule::Mixed { .. }
            | StreamRule::Gated { .. }
            | StreamRule::Independent { .. }
            | StreamRule::Bank { .. } => None,
        }
    }
}

/// Reads the residual streams of a family that has several from `config.json`.
pub(super) fn of_huggingface(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<Streams>, ModelError> {
    let Some(form) = family.layers.streams else { return Ok(None) };
    let number = |key: &str| {
        let found = config.float(key)?.ok_or_else(|| config.missing(key))?;
        Ok::<_, ModelError>(found as f32)
    };
    let mixes = config.flag("mhc")?.unwrap_or(true);
    check("mhc", mixes, mixes, "forebay knows this family with hyper-connections")?;
    Ok(Some(match form {
        StreamForm::Mixed(end) => Streams {
            count: config.count("hc_mult")?,
            rule: StreamRule::Mixed {
                iterations: config.count("hc_sinkhorn_iters")?,
                epsilon: number("hc_eps")?,
                end,
            },
        },
        StreamForm::Gated => Streams {
            count: config.count("hc_count")?,
            rule: StreamRule::Gated { rank: config.count("hc_lowrank")? },
        },
        StreamForm::Independent => Streams {
            count: config.count("hc_mult")?,
            rule: StreamRule::Independent {
                magnitude: number("hc_magnitude")?,
                epsilon: number("hc_eps")?,
            },
        },
        StreamForm::Bank => return Err(ModelError::GgufOnly { name: family.name.into() }),
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

/// Returns the streams of a model with so many layers, in every `period`-th of which a bank takes the state.
fn bank(period: usize, layers: usize) -> Result<Streams, ModelError> {
    check("layers between those that keep earlier states", period, period > 0, "at least 1")?;
    Ok(Streams { count: 1 + layers.div_ceil(period), rule: StreamRule::Bank { period } })
}

/// Returns the width of the low-rank branch beside attention, which only a tensor says.
fn branch_rank(catalog: &Catalog, family: &Family) -> Result<usize, ModelError> {
    const NAME: &str = "blk.0.laurel_l.weight";
    let tensor = catalog.tensor(NAME);
    let tensor = tensor
        .ok_or_else(|| ModelError::MissingTensor { name: NAME.into(), family: family.name })?;
    Ok(tensor.shape.first().map_or(0, |rows| usize::try_from(*rows).unwrap_or(usize::MAX)))
}

/// Reads the residual streams of a family that has several from GGUF metadata.
pub(super) fn of_gguf(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    layers: usize,
) -> Result<Option<Streams>, ModelError> {
    let number = |key: &str| keys.optional_float(key)?.ok_or_else(|| keys.missing(key));
    match family.layers.streams {
        None => Ok(None),
        Some(StreamForm::Mixed(end)) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Mixed {
                iterations: keys.count("hyper_connection.sinkhorn_iterations")?,
                epsilon: number("hyper_connection.epsilon")?,
                end,
            },
        })),
        Some(StreamForm::Independent) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Independent {
                magnitude: number("hyper_connection.magnitude")?,
                epsilon: number("hyper_connection.epsilon")?,
            },
        })),
        Some(StreamForm::Gated) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Gated { rank: keys.count("hyper_connection.low_rank")? },
        })),
        Some(StreamForm::Bank) => Ok(Some(bank(keys.count("attn_res.block_size")?, layers)?)),
        Some(StreamForm::Predicted) => {
            // Layers that share keys and values still have tensors for their own, so no tensor says how many there are.
            keys.count("attention.shared_kv_layers")?;
            Ok(Some(Streams {
                count: keys.count("altup.num_inputs")?,
                rule: StreamRule::Predicted {
                    active: keys.count("altup.active_idx")?,
                    scaled: true,
                    // No key says the limit. Published weights are far below it.
                    clip: None,
                    branch_rank: branch_rank(catalog, family)?,
                },
            }))
        }
    }
}
