//! Residual streams beside each other (hyper-connections).

use forebay_compute::{STREAMS_MAX, StreamMixing, StreamShape};
use serde::Serialize;
use serde_json::Value;

use super::architecture::{Architecture, FeedForward, NormLayout};
use super::check::{check, check_size};
use super::config::Config;
use super::families::Family;
use super::gguf_keys::Keys;
use crate::ModelError;

/// Residual streams beside each other. Every block collapses them to its input, and its output is added to all of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Streams {
    pub count: usize,
    pub rule: StreamRule,
}

/// How blocks read and write residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum StreamRule {
    /// Manifold-constrained hyper-connections (DeepSeek-V4, GLM-5-Next): products of the streams give a factor of every stream for
    /// the input, one for the output, and a matrix that mixes the streams.
    Mixed {
        /// Number of times that the columns of the matrix are divided by their sums.
        iterations: usize,
        epsilon: f32,
        /// How the streams collapse behind the last layer.
        end: StreamsEnd,
    },
    /// Gated residuals (Qwen4): every element has a gate for the input, from a low-rank projection, and products give a factor of
    /// every stream for the output. The streams collapse behind the last layer in the same way, and blocks have no other norm.
    Gated {
        /// Width of the low-rank projection.
        rank: usize,
    },
}

/// How mixed streams collapse behind the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum StreamsEnd {
    /// Products of the streams give a factor of each (DeepSeek-V4).
    Weighted,
    /// Their mean (GLM-5-Next).
    Mean,
}

/// The rule of a family whose models have residual streams beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamForm {
    Mixed(StreamsEnd),
    Gated,
}

impl Architecture {
    /// Returns the shape of a row of the residual stream, if it has several streams.
    pub fn stream_shape(&self) -> Option<StreamShape> {
        self.streams.map(|streams| StreamShape { count: streams.count, width: self.hidden })
    }

    /// Returns the number of elements of a row of the residual stream.
    pub fn stream_width(&self) -> usize {
        self.stream_shape().map_or(self.hidden, |shape| shape.row())
    }

    /// Returns the widths of the products of a row of mixed streams or of gated ones: coefficients, and the low-rank projection.
    pub(crate) fn stream_products(&self) -> (usize, usize) {
        match (self.streams, self.stream_shape()) {
            (Some(Streams { rule: StreamRule::Gated { rank }, count }), _) => (count, rank),
            (_, Some(shape)) => (shape.coefficients(), 0),
            _ => (0, 0),
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
            && !self.norms.after();
        check(
            "residual streams",
            count,
            is_plain,
            "forebay knows several of them without scales, post-norms and embeddings of layers",
        )?;
        let has_experts = |of: &FeedForward| of.has_experts();
        check(
            "residual streams",
            count,
            self.layers.iter().any(|layer| has_experts(&layer.feed_forward)),
            "forebay knows several of them in models with experts",
        )
    }
}

impl Streams {
    /// Returns what turns products of mixed streams into coefficients.
    ///
    /// # Panics
    /// Panics if the streams are gated.
    pub(crate) fn mixing<'a>(
        &self,
        scales: &'a [f32],
        base: &'a [f32],
        norm_epsilon: f32,
    ) -> StreamMixing<'a> {
        let StreamRule::Mixed { iterations, epsilon, .. } = self.rule else {
            unreachable!("gated streams have no such weights");
        };
        StreamMixing { scales, base, iterations, epsilon, norm_epsilon }
    }
}

/// Reads the residual streams of a family that has several from `config.json`.
pub(super) fn of_huggingface(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<Streams>, ModelError> {
    let Some(form) = family.streams else { return Ok(None) };
    if config.json.get("mhc").and_then(Value::as_bool) == Some(false) {
        return Err(ModelError::BadValue {
            key: "mhc".into(),
            value: "false".into(),
            expected: "forebay knows this family with hyper-connections".into(),
        });
    }
    Ok(Some(match form {
        StreamForm::Mixed(end) => Streams {
            count: config.count("hc_mult")?,
            rule: StreamRule::Mixed {
                iterations: config.count("hc_sinkhorn_iters")?,
                epsilon: config.float("hc_eps").ok_or_else(|| config.missing("hc_eps"))? as f32,
                end,
            },
        },
        StreamForm::Gated => Streams {
            count: config.count("hc_count")?,
            rule: StreamRule::Gated { rank: config.count("hc_lowrank")? },
        },
    }))
}

/// Reads the residual streams of a family that has several from GGUF metadata.
pub(super) fn of_gguf(keys: &Keys<'_>, family: &Family) -> Result<Option<Streams>, ModelError> {
    let epsilon = "hyper_connection.epsilon";
    match family.streams {
        None => Ok(None),
        Some(StreamForm::Mixed(end)) => Ok(Some(Streams {
            count: keys.count("hyper_connection.count")?,
            rule: StreamRule::Mixed {
                iterations: keys.count("hyper_connection.sinkhorn_iterations")?,
                epsilon: keys.optional_float(epsilon).ok_or_else(|| keys.missing(epsilon))?,
                end,
            },
        })),
        Some(StreamForm::Gated) => Err(ModelError::BadValue {
            key: "general.architecture".into(),
            value: keys.architecture.into(),
            expected: "forebay reads gated residual streams from Hugging Face folders".into(),
        }),
    }
}
