//! The header of a routing trace: model, layers, and what is recorded.

use serde::{Deserialize, Serialize};

use super::RoutingError;

pub(super) const FORMAT: &str = "forebay-routing";
pub(super) const VERSION: u32 = 1;

/// Limits that no real model exceeds. A trace that does is damaged.
pub(super) const LAYERS_MAX: usize = 1 << 12;
pub(super) const EXPERTS_MAX: u32 = u16::MAX as u32;
pub(super) const EXPERT_BYTES_MAX: u64 = 1 << 40;
/// Most choices of one token in all layers.
const WIDTH_MAX: u64 = 1 << 13;
/// Most router scores of one token in all layers.
const SCORES_MAX: u64 = 1 << 20;

/// One layer of the recorded model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RoutingLayer {
    /// Number of experts; 0 for a dense layer.
    pub experts: u32,
    /// Number of experts that a token uses.
    pub used: u32,
    /// Bytes of one expert, the cost of keeping it in a cache.
    pub expert_bytes: u64,
}

/// Order in which the recording engine looks up the distinct experts of a batch. Later ones count as more recent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LookupOrder {
    /// By number, as forebay's engine does.
    Ascending,
    /// By last use in the batch, token by token, as the engine of the CSV form does.
    LastUse,
}

/// Description of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RoutingHeader {
    pub format: String,
    pub version: u32,
    /// Program that recorded the trace, with its version.
    pub recorder: String,
    pub model: String,
    pub architecture: String,
    pub layers: Vec<RoutingLayer>,
    /// Fingerprint of the tokenizer, in hexadecimal. Traces with the same fingerprint can be compared token by token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    pub order: LookupOrder,
    /// True if every choice has its weight.
    pub weights: bool,
    /// True if every token has its router scores, computed one layer early.
    pub scores: bool,
}

impl RoutingHeader {
    /// Creates a header of the current version.
    pub fn new(
        model: String,
        architecture: String,
        layers: Vec<RoutingLayer>,
        order: LookupOrder,
    ) -> RoutingHeader {
        RoutingHeader {
            format: FORMAT.to_owned(),
            version: VERSION,
            recorder: concat!("forebay ", env!("CARGO_PKG_VERSION")).to_owned(),
            model,
            architecture,
            layers,
            tokenizer: None,
            order,
            weights: false,
            scores: false,
        }
    }

    /// Returns `(experts, bytes of one expert)` of each layer.
    pub fn layer_sizes(&self) -> Vec<(u32, u64)> {
        self.layers.iter().map(|layer| (layer.experts, layer.expert_bytes)).collect()
    }

    /// Returns an error if the header is impossible for a model.
    pub(super) fn check(&self) -> Result<(), RoutingError> {
        let wrong = |why: String| Err(RoutingError::Header(why));
        if self.layers.len() > LAYERS_MAX {
            return wrong(format!("{} layers, {LAYERS_MAX} are possible", self.layers.len()));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            if layer.experts > EXPERTS_MAX || layer.used > layer.experts {
                return wrong(format!(
                    "layer {index} uses {} of {} experts; {EXPERTS_MAX} are possible",
                    layer.used, layer.experts
                ));
            }
            if layer.expert_bytes > EXPERT_BYTES_MAX {
                return wrong(format!(
                    "layer {index} has experts of {} bytes, {EXPERT_BYTES_MAX} are possible",
                    layer.expert_bytes
                ));
            }
        }
        let width: u64 = self.layers.iter().map(|layer| u64::from(layer.used)).sum();
        let scored: u64 = self.layers.iter().map(|layer| u64::from(layer.experts)).sum();
        if width == 0 || width > WIDTH_MAX || scored > SCORES_MAX {
            return wrong(format!("a token uses {width} of {scored} experts"));
        }
        Ok(())
    }
}
