//! Questions about the kinds of layers of a model.

use std::collections::BTreeSet;

use forebay_ops::Gating;

use super::architecture::{
    Architecture, Attention, FeedForward, Gatings, Latent, Layer, Mixer, Rope,
};
use super::recurrent::STATES_PER_SEQUENCE;
use super::shapes::{ExpertInput, NormLayout};
use crate::ModelError;

/// Layers whose keys and values share blocks: those that see as many positions as each other and have the same shape of
/// attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// Number of positions that a token needs, including itself; `None` means all.
    pub window: Option<usize>,
    /// Index into [`Architecture::attentions`].
    pub attention: usize,
}

/// Returns the layer whose keys and values a layer uses: none for the first `with_keys` layers, and the last of these with the same
/// window for others.
///
/// # Errors
/// Returns an error if no such layer has keys.
pub(super) fn keys_of(
    windows: &[Option<usize>],
    with_keys: usize,
    layer: usize,
) -> Result<Option<usize>, ModelError> {
    if layer < with_keys {
        return Ok(None);
    }
    let found = windows[..with_keys].iter().rposition(|window| *window == windows[layer]);
    found.map(Some).ok_or_else(|| ModelError::BadValue {
        key: "number of layers that use keys of others".into(),
        value: (windows.len() - with_keys).to_string(),
        expected: format!("no layer has keys for layer {layer}"),
    })
}

impl Layer {
    /// Returns what is subtracted from the gates of the layer's dense feed-forward, in standard deviations above their mean, if they
    /// are sparse.
    pub fn cut(&self) -> Option<f32> {
        match self.feed_forward {
            FeedForward::Dense { cut, .. } => cut,
            FeedForward::None | FeedForward::Experts(_) => None,
        }
    }

    /// Returns what router and experts take, if the layer has such.
    pub fn expert_input(&self) -> ExpertInput {
        match &self.feed_forward {
            FeedForward::None | FeedForward::Dense { .. } => ExpertInput::OfFeedForward,
            FeedForward::Experts(experts) => experts.input,
        }
    }

    /// Creates a layer that is only a mixer or only a feed-forward. Attention sees the whole context.
    pub(super) fn one_block(mixer: Mixer, feed_forward: FeedForward, rope: Option<usize>) -> Layer {
        Layer {
            mixer,
            window: None,
            chunked: false,
            attention: 0,
            keys_of: None,
            rope,
            tempered: false,
            feed_forward,
            gatings: None,
        }
    }
}

/// Returns the gatings of a layer with these limits behind SiLU, of experts and of other feed-forwards. 0 means none.
pub(super) fn limited([experts, others]: [f32; 2]) -> Gatings {
    let of = |limit: f32| match limit == 0.0 {
        true => Gating::Silu,
        false => Gating::SiluClamped { limit },
    };
    Gatings { experts: of(experts), others: of(others) }
}

/// Marks the layers whose queries a temperature multiplies: those without rotation, or all.
pub(super) fn temper(layers: &mut [Layer], is_in_all: bool) {
    for layer in layers {
        layer.tempered = is_in_all || layer.rope.is_none();
    }
}

impl Architecture {
    /// Returns the number of layers through which every token goes: all but the predicting one.
    pub fn main_layers(&self) -> usize {
        self.layers.len() - usize::from(self.mtp.is_some())
    }

    /// Returns the position of the norms in a layer.
    pub fn norms_of(&self, layer: usize) -> NormLayout {
        let own = self.recurrent.filter(|_| self.layers[layer].mixer == Mixer::Recurrent);
        own.and_then(|of| of.norms).unwrap_or(self.norms)
    }

    /// Returns the shape of an attention layer.
    pub fn attention_of(&self, layer: usize) -> &Attention {
        &self.attentions[self.layers[layer].attention]
    }

    /// Returns the largest value of the shapes of attention.
    pub fn most_of_attentions(&self, of: impl Fn(&Attention) -> usize) -> usize {
        self.attentions.iter().map(of).max().unwrap_or(0)
    }

    /// Returns the shapes of latent attention with their numbers of heads; none if no layer has it.
    pub fn latents(&self) -> impl Iterator<Item = (Latent, usize)> {
        self.attentions.iter().filter_map(|of| of.latent.map(|latent| (latent, of.heads)))
    }

    /// Returns the numbers of heads of layers with latent attention.
    pub(crate) fn latent_head_counts(&self) -> BTreeSet<usize> {
        self.latents().map(|(_, heads)| heads).collect()
    }

    /// Returns the largest value of the shapes of latent attention with their numbers of heads.
    pub(crate) fn most_of_latents(&self, of: impl Fn(Latent, usize) -> usize) -> usize {
        self.latents().map(|(latent, heads)| of(latent, heads)).max().unwrap_or(0)
    }

    /// Returns the groups of layers that keep keys and values, in the order in which they first occur, then the groups of compressed
    /// entries. Recurrent layers are in no group.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        let mut groups = Vec::new();
        let own = (0..self.layers.len()).filter_map(|layer| self.kv_group(layer));
        let entries = (0..self.layers.len()).filter_map(|layer| self.entry_group(layer));
        for group in own.chain(entries) {
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        groups
    }

    /// Returns the layer whose keys and values an attention layer uses, which may be itself.
    pub fn keys_of(&self, layer: usize) -> usize {
        self.layers[layer].keys_of.unwrap_or(layer)
    }

    /// Returns the numbers of the layers that keep keys and values.
    pub fn kv_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.layers.len()).filter(|layer| self.kv_group(*layer).is_some())
    }

    /// Returns the group of a layer; `None` if it keeps no keys and values of its own.
    pub fn kv_group(&self, layer: usize) -> Option<KvGroup> {
        let looks_back = self.entries_of(layer).map_or(0, |entries| entries.looks_back());
        let layer = &self.layers[layer];
        let group = self.group_of(layer, looks_back);
        (layer.mixer.attends() && layer.keys_of.is_none()).then_some(group)
    }

    /// Returns the group in which a layer's keys and values are, its own or those of another layer. If some layers have an indexer
    /// and others of the same shape do not, their blocks are alike: those with room for the keys of an indexer.
    /// A window reaches at least `looks_back` positions.
    fn group_of(&self, layer: &Layer, looks_back: usize) -> KvGroup {
        let kept = |of: &Attention| (of.kv_heads, of.head_dim, of.value_dim, of.latent.is_some());
        let own = kept(&self.attentions[layer.attention]);
        let indexed = |of: &Attention| of.indexer.is_some() && kept(of) == own;
        let attention = self.attentions.iter().position(indexed).unwrap_or(layer.attention);
        KvGroup { window: layer.window.map(|window| window.max(looks_back)), attention }
    }

    /// Returns true if a layer may use the keys and values of layer `of`.
    pub(super) fn may_use_keys(&self, layer: usize, of: usize) -> bool {
        let own = self.group_of(&self.layers[layer], 0);
        of < layer && self.kv_group(of) == Some(own)
    }

    /// Returns the numbers of the layers with attention.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.mixer.attends()).map(|(index, _)| index)
    }

    /// Returns the number of recurrent layers, with those that have attention, too.
    pub fn recurrent_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.mixer.recurs()).count()
    }

    /// Returns true if layers have attention and a recurrence.
    pub(crate) fn has_beside(&self) -> bool {
        self.layers.iter().any(|layer| layer.mixer == Mixer::AttentionAndRecurrent)
    }

    /// Returns the number of a recurrent layer among those.
    pub fn recurrent_index(&self, layer: usize) -> usize {
        self.layers[..layer].iter().filter(|layer| layer.mixer.recurs()).count()
    }

    /// Returns the number of floats of each part of a sequence's state: that of each recurrent layer, then that of each layer with
    /// n-grams.
    pub fn state_parts(&self) -> impl Iterator<Item = usize> {
        let floats = self.recurrent.map_or(0, |of| of.state_floats());
        let recurrent = std::iter::repeat_n(floats, self.recurrent_layers());
        let floats = self.ngram_shape().map_or(0, |of| of.state_floats());
        let ngrams = self.ngrams.as_ref().map_or(0, |of| of.layers.len());
        let layers = 0..if self.convolutions.is_some() { self.layers.len() } else { 0 };
        let convolutions = layers.map(|layer| self.convolution_floats(layer));
        recurrent.chain(std::iter::repeat_n(floats, ngrams)).chain(convolutions)
    }

    /// Returns the channels of a layer's short convolutions: keys, values, and the outputs of attention and feed-forward.
    pub fn convolved(&self, layer: usize) -> [usize; 4] {
        let of = self.attention_of(layer);
        [of.kv_heads * of.head_dim, of.kv_heads * of.value_dim, self.hidden, self.hidden]
    }

    /// Returns the most channels of a short convolution of any layer; 0 if there are none.
    pub fn convolved_width(&self) -> usize {
        let layers = 0..self.convolutions.map_or(0, |_| self.layers.len());
        layers.flat_map(|layer| self.convolved(layer)).max().unwrap_or(0)
    }

    /// Returns the number of floats that the short convolutions of a layer keep of a sequence.
    fn convolution_floats(&self, layer: usize) -> usize {
        let seen = self.convolutions.map_or(0, |taps| taps.saturating_sub(1));
        self.convolved(layer)
            .iter()
            .fold(0, |sum: usize, of| sum.saturating_add(*of))
            .saturating_mul(seen)
    }

    /// Returns the number of the part of a state that belongs to the short convolutions of a layer.
    pub fn convolution_part(&self, layer: usize) -> usize {
        self.recurrent_layers() + self.ngrams.as_ref().map_or(0, |of| of.layers.len()) + layer
    }

    /// Returns the number of a layer with n-grams among those.
    pub fn ngram_index(&self, layer: usize) -> usize {
        let of = self.ngrams.as_ref().expect("the layer has n-grams");
        of.layers.partition_point(|with| *with < layer)
    }

    /// Returns the number of the part of a state that belongs to a layer with n-grams.
    pub fn ngram_part(&self, layer: usize) -> usize {
        self.recurrent_layers() + self.ngram_index(layer)
    }

    /// Returns true if sequences have states beside keys and values.
    pub fn has_states(&self) -> bool {
        self.state_parts().next().is_some()
    }

    /// Returns the bytes of one state of a sequence: all its parts after some token.
    pub fn state_bytes(&self) -> u64 {
        self.state_parts().map(|floats| floats as u64).sum::<u64>() * 4
    }

    /// Returns the bytes of the states of so many sequences.
    pub fn states_bytes(&self, sequences: usize) -> u64 {
        self.state_bytes().saturating_mul((STATES_PER_SEQUENCE * sequences) as u64)
    }
}

/// Returns the rotations without those at the end that no layer uses.
pub(super) fn used(mut ropes: Vec<Rope>, layers: &[Layer]) -> Vec<Rope> {
    let last = layers.iter().filter_map(|layer| layer.rope).max();
    ropes.truncate(last.map_or(0, |last| last + 1));
    ropes
}
