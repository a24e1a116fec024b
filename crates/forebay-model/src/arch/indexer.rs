//! The choice of the keys that a token attends to.

use forebay_compute::RopeLayout;

use super::architecture::{Architecture, Attention, AttentionBias, Layer, Rope};
use super::check::{check, check_size};
use super::family::Family;
use super::shapes::{Indexer, IndexerRule};
use crate::ModelError;

/// Epsilon of the layer norm of an indexer's keys.
pub(crate) const INDEXER_NORM_EPSILON: f32 = 1e-6;

/// Sizes of the indexers of a file, and the layout of their rotation.
pub(super) struct IndexerShape {
    pub heads: usize,
    pub head_dim: usize,
    pub top_k: usize,
    pub layout: RopeLayout,
    pub rule: IndexerRule,
}

/// The keys to which attention of a layer attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// All of its window.
    All,
    /// Those that the layer's indexer chooses.
    Own,
    /// Those that the indexer of the last layer before it with one chose.
    Shared,
}

impl Choice {
    /// Returns the choice of a layer with an indexer or without one.
    pub fn of(has_indexer: bool) -> Choice {
        if has_indexer { Choice::Own } else { Choice::All }
    }
}

/// Adds an indexer to the description of attention, and its rotation to the ropes if there is one. `choices` are those of the
/// layers, except that layers with a window see all of it in families that have such. If they differ, the shapes of attention
/// follow each other in the order of [`Choice`], and the layers get theirs.
pub(super) fn with_indexer(
    attentions: Vec<Attention>,
    mut ropes: Vec<Rope>,
    shape: Option<IndexerShape>,
    layers: &mut [Layer],
    (choices, family): (&[Choice], &Family),
) -> (Vec<Attention>, Vec<Rope>) {
    let attends = |layer: &Layer| layer.mixer.attends();
    // Other families have no windows beside indexers, and are refused with them.
    let sees_window = |layer: &Layer| family.attention.window.is_some() && layer.window.is_some();
    let of_layer = |(layer, own): (&Layer, &Choice)| match sees_window(layer) {
        true => Choice::All,
        false => *own,
    };
    let choices: Vec<Choice> = layers.iter().zip(choices).map(of_layer).collect();
    let is_made = |choice: Choice| {
        layers.iter().zip(&choices).any(|(layer, own)| attends(layer) && *own == choice)
    };
    let [all, own, shared] = [Choice::All, Choice::Own, Choice::Shared].map(is_made);
    let Some(shape) = shape.filter(|_| own || shared) else { return (attentions, ropes) };
    let IndexerShape { heads, head_dim, top_k, layout, rule } = shape;
    let rope = ropes.first().cloned().map(|rope| {
        let from = match family.attention.indexer_rotates_last {
            true => head_dim.saturating_sub(rope.rotary_dim),
            false => rope.from,
        };
        ropes.push(Rope { layout, from, ..rope });
        ropes.len() - 1
    });
    let with = |own: bool| Some(Indexer { heads, head_dim, top_k, rope, rule, own });
    let kinds = [
        (Choice::All, all, None),
        (Choice::Own, own, with(true)),
        (Choice::Shared, shared, with(false)),
    ];
    let mut found = Vec::new();
    for (choice, _, indexer) in kinds.into_iter().filter(|(_, is_made, _)| *is_made) {
        let of_choice = layers.iter_mut().zip(&choices).filter(|(_, own)| **own == choice);
        for (layer, _) in of_choice.filter(|(layer, _)| attends(layer)) {
            layer.attention += found.len();
        }
        found.extend(attentions.iter().map(|of| Attention { indexer, ..of.clone() }));
    }
    (only_used(found, layers), ropes)
}

/// Returns the shapes of attention that layers have, and writes their new numbers to the layers.
fn only_used(attentions: Vec<Attention>, layers: &mut [Layer]) -> Vec<Attention> {
    let mut attending: Vec<_> = layers.iter_mut().filter(|of| of.mixer.attends()).collect();
    let mut kept = Vec::new();
    for (number, attention) in attentions.into_iter().enumerate() {
        let mut is_used = false;
        attending.retain_mut(|layer| {
            let has_it = layer.attention == number;
            if has_it {
                layer.attention = kept.len();
            }
            is_used |= has_it;
            !has_it
        });
        kept.extend(is_used.then_some(attention));
    }
    kept
}

impl Architecture {
    /// Returns the shape of the indexers, if there are any. It is the same in all layers.
    pub fn indexer(&self) -> Option<&Indexer> {
        self.attentions.iter().find_map(|attention| attention.indexer.as_ref())
    }

    /// Returns true if attention of some layer takes the choice of keys of a layer before it.
    pub fn shares_choices(&self) -> bool {
        (0..self.layers.len()).any(|layer| self.takes_choice(layer))
    }

    /// Returns true if attention of a layer takes the choice of keys of a layer before it.
    pub(crate) fn takes_choice(&self, layer: usize) -> bool {
        let is_other = |attention: &Attention| attention.indexer.is_some_and(|of| !of.own);
        self.layers[layer].mixer.attends() && is_other(self.attention_of(layer))
    }

    /// Checks the numbers of indexers, and that the layers with indexers are of a known kind.
    pub(super) fn validate_indexers(&self) -> Result<(), ModelError> {
        for layer in self.attention_layers() {
            let windowed = self.layers[layer].window.is_some();
            let chosen = self.attention_of(layer).indexer.is_some();
            check("indexer of layer", layer, !(windowed && chosen), "it has a window too")?;
        }
        let first =
            self.attention_layers().find(|layer| self.attention_of(*layer).indexer.is_some());
        if let Some(first) = first.filter(|first| self.takes_choice(*first)) {
            let expected = "a layer before it must have an indexer";
            check("layer that takes the choice of another", first, false, expected)?;
        }
        let mut with =
            self.attentions.iter().filter_map(|of| of.indexer.map(|indexer| (of, indexer)));
        with.try_for_each(|(of, indexer)| self.validate_indexer(of, &indexer))
    }

    fn validate_indexer(&self, of: &Attention, indexer: &Indexer) -> Result<(), ModelError> {
        check_size("indexer heads", indexer.heads)?;
        check_size("length of the indexer's heads", indexer.head_dim)?;
        check_size("keys that the indexer chooses", indexer.top_k)?;
        let rope = indexer.rope.map(|rope| &self.ropes[rope]);
        let rotary_dim = rope.map_or(0, |rope| rope.rotary_dim.saturating_add(rope.from));
        check(
            "length of the indexer's heads",
            indexer.head_dim,
            rotary_dim <= indexer.head_dim,
            &format!("{rotary_dim} elements of it rotate"),
        )?;
        match indexer.rule {
            IndexerRule::Keys => {}
            IndexerRule::Blocks { length, before } => {
                let fits = length.is_power_of_two() && length <= 128;
                let expected = "forebay knows powers of two up to 128";
                check("length of the indexer's blocks", length, fits, expected)?;
                let fits = indexer.top_k > before + 1;
                let expected = "it must be more than the blocks that are always chosen";
                check("blocks that the indexer chooses", indexer.top_k, fits, expected)?;
                let fits = indexer.heads == of.kv_heads && of.latent.is_none();
                let expected = "forebay knows one for each key/value head";
                check("indexer heads", indexer.heads, fits, expected)?;
            }
            IndexerRule::GatedPools { length } | IndexerRule::MeanPools { length } => {
                let fits = (1..=64).contains(&length);
                check("length of the indexer's pools", length, fits, "forebay knows 1 to 64")?;
                let fits = indexer.head_dim.is_multiple_of(8);
                let expected = "it must be a multiple of 8";
                check("length of the indexer's heads", indexer.head_dim, fits, expected)?;
            }
        }
        let pools = indexer.pools();
        check_size("keys that the indexer chooses", pools.positions_max())?;
        check_size("lists of chosen keys", pools.most.saturating_mul(indexer.lists()))?;
        let low_rank = of.latent.is_some_and(|latent| latent.query_rank.is_some());
        let of_queries = matches!(indexer.rule, IndexerRule::Keys | IndexerRule::GatedPools { .. });
        let plain = of.latent.is_none() && of.bias == AttentionBias::None;
        check(
            "indexer",
            "set",
            if of_queries { low_rank } else { plain },
            "forebay knows indexers of latent attention with low-rank queries, and those of blocks and means of other attention",
        )
    }
}
