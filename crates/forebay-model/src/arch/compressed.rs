//! Attention to a window and to compressed entries (DeepSeek-V4).
//!
//! A sequence's data needs nothing but the KV cache:
//!
//! - The keys of positions, which are their values, are in the group of the layer's window.
//! - So are the positions' projections from which entries are computed, in pseudo layers of that group. The group keeps as many
//!   positions as the longer of the window and what an entry looks back to.
//! - Entries, and those that the indexer compares with, are in pseudo layers of a group without a window ([`Architecture::entry_group`]).
//!   An entry is in the block of its last position, so a block has as many rows as entries end in it.
//!
//! The pass with an entry's last position computes it from the projections in the cache. So blocks with entries are shared, saved,
//! copied and dropped like any others, and a sequence may go back to any position whose window it has: later entries are
//! computed again.

use forebay_compute::{RopeLayout, RopeScaling};
use forebay_ops::KV_BLOCK;

use super::architecture::{
    Architecture, Attention, AttentionBias, Layer, OutputGate, QkNorm, Rope, Values,
};
use super::check::{check, check_size};
use super::layers::KvGroup;
use super::shapes::{EntryIndexer, EntryShape, SharedKeys};
use crate::ModelError;

/// Number of the rotation of layers that see their windows only.
pub(super) const PLAIN_ROPE: usize = 0;
/// Number of the rotation of layers with entries.
const ENTRY_ROPE: usize = 1;

/// The entries that a layer sees beside its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    Nothing,
    /// Chosen entries, computed with an overlap.
    Chosen(usize),
    /// All entries.
    All(usize),
}

impl Beside {
    /// Returns what published files mean with a ratio.
    pub fn of_ratio(key: &str, ratio: usize) -> Result<Beside, ModelError> {
        match ratio {
            0 => Ok(Beside::Nothing),
            4 => Ok(Beside::Chosen(4)),
            128 => Ok(Beside::All(128)),
            other => Err(ModelError::BadValue {
                key: key.into(),
                value: other.to_string(),
                expected: "forebay knows 0, 4 and 128".into(),
            }),
        }
    }
}

/// Attention as the files of such a model describe it.
pub(super) struct CompressedShape {
    pub heads: usize,
    pub head_dim: usize,
    pub query_rank: usize,
    pub output_groups: usize,
    pub output_rank: usize,
    pub window: usize,
    /// Heads of indexers, the elements of each, and the number of entries that they choose.
    pub indexer: [usize; 3],
    /// The entries that each layer sees beside its window.
    pub beside: Vec<Beside>,
    /// Number of elements of a head that rotate: the last ones.
    pub rotary_dim: usize,
    /// Base of the rotation in layers that see their windows only, and in the others.
    pub thetas: [f64; 2],
    /// Scaling of the rotation in the others.
    pub scaling: RopeScaling,
}

impl CompressedShape {
    /// Returns the shapes of attention and the rotations, and writes their numbers and the window to the layers.
    pub fn describe(self, layers: &mut [Layer]) -> (Vec<Attention>, Vec<Rope>) {
        let [heads, head_dim, top_k] = self.indexer;
        let [plain, compressed] = self.thetas;
        let rope = |theta: f64, head_dim: usize, scaling: RopeScaling| Rope {
            theta,
            rotary_dim: self.rotary_dim,
            from: head_dim.saturating_sub(self.rotary_dim),
            layout: RopeLayout::Interleaved,
            scaling,
            factors: None,
        };
        let ropes = vec![
            rope(plain, self.head_dim, RopeScaling::None),
            rope(compressed, self.head_dim, self.scaling),
            // Rotated elements are the last ones, so heads of another length have a rotation of their own.
            rope(compressed, head_dim, self.scaling),
        ];
        let indexer = EntryIndexer { heads, head_dim, top_k, rope: 2 };
        let mut attentions: Vec<Attention> = Vec::new();
        for (layer, beside) in layers.iter_mut().zip(self.beside) {
            let entries = match beside {
                Beside::Nothing => None,
                Beside::Chosen(ratio) => {
                    Some(EntryShape { ratio, overlap: true, indexer: Some(indexer) })
                }
                Beside::All(ratio) => Some(EntryShape { ratio, overlap: false, indexer: None }),
            };
            let own = Attention {
                heads: self.heads,
                kv_heads: 1,
                head_dim: self.head_dim,
                value_dim: self.head_dim,
                scale: 1.0 / (self.head_dim as f32).sqrt(),
                softcap: None,
                sinks: true,
                output_norm: false,
                output_gate: OutputGate::None,
                bias: AttentionBias::None,
                clamp: None,
                qk_norm: QkNorm::None,
                values: Values::PLAIN,
                relative: None,
                latent: None,
                indexer: None,
                shared: Some(SharedKeys {
                    query_rank: self.query_rank,
                    output_groups: self.output_groups,
                    output_rank: self.output_rank,
                    entries,
                }),
            };
            let number = attentions.iter().position(|of| *of == own).unwrap_or(attentions.len());
            if number == attentions.len() {
                attentions.push(own);
            }
            layer.attention = number;
            layer.window = Some(self.window);
            layer.rope = Some(if entries.is_some() { ENTRY_ROPE } else { PLAIN_ROPE });
        }
        (attentions, ropes)
    }
}

impl Architecture {
    /// Returns the shape of a layer's entries; `None` if it has none.
    pub fn entries_of(&self, layer: usize) -> Option<EntryShape> {
        self.attention_of(layer).shared.and_then(|of| of.entries)
    }

    /// Returns true if some layers have compressed entries.
    pub fn has_entries(&self) -> bool {
        self.attention_layers().any(|layer| self.entries_of(layer).is_some())
    }

    /// Returns the most of something that attention with shared keys has; 0 if no layer has such attention.
    pub fn most_of_shared(&self, of: impl Fn(&SharedKeys) -> usize) -> usize {
        self.most_of_attentions(|a| a.shared.as_ref().map_or(0, &of))
    }

    /// Returns the most of something that entries have, given their shape and length; 0 if there are none.
    pub fn most_of_entries(&self, of: impl Fn(&EntryShape, usize) -> usize) -> usize {
        let entries = |a: &Attention| a.shared.and_then(|shared| shared.entries);
        self.most_of_attentions(|a| entries(a).map_or(0, |entries| of(&entries, a.head_dim)))
    }

    /// Returns the most of something that indexers of entries have; 0 if there are none.
    pub fn most_of_entry_indexers(&self, of: impl Fn(&EntryIndexer) -> usize) -> usize {
        self.most_of_entries(|entries, _| entries.indexer.as_ref().map_or(0, &of))
    }

    /// Returns the most elements of a position's values, which has as many gates: for entries, and for the keys of their indexer.
    pub fn entry_values(&self) -> [usize; 2] {
        let of_indexer = |of: &EntryShape| of.indexer.map_or(0, |own| of.parts() * own.head_dim);
        [
            self.most_of_entries(|of, dim| of.parts() * dim),
            self.most_of_entries(|of, _| of_indexer(of)),
        ]
    }

    /// Returns the group of a layer's entries; `None` if it has none. Its own keys are in [`Architecture::kv_group`]. Entries of all
    /// layers are in one group, because tiers keep whole sequences in one group only.
    pub fn entry_group(&self, layer: usize) -> Option<KvGroup> {
        self.entries_of(layer).filter(|_| self.kv_group(layer).is_some())?;
        let has_entries = |of: &Attention| of.shared.is_some_and(|of| of.entries.is_some());
        let attention = self.attentions.iter().position(has_entries)?;
        Some(KvGroup { window: None, attention })
    }

    /// Checks the numbers of attention with shared keys.
    pub(super) fn validate_shared_keys(&self) -> Result<(), ModelError> {
        let (has_entries, indexed) = (self.has_entries(), self.indexer().is_some());
        for layer in self.attention_layers() {
            let (own, attention) = (&self.layers[layer], self.attention_of(layer));
            // Tiers keep whole sequences in one group only, which is that of entries.
            let alone = own.window.is_some() || !has_entries;
            check("sliding window", "none", alone, "layers with compressed entries are beside it")?;
            let Some(shared) = attention.shared else { continue };
            let fits = own.rope.is_some()
                && own.window.is_some()
                && !own.chunked
                && own.keys_of.is_none()
                && attention.latent.is_none()
                && !indexed;
            check("attention with shared keys", layer, fits, "a layer with rotation and a window")?;
            self.validate_shared(attention, &shared)?;
        }
        Ok(())
    }

    fn validate_shared(&self, of: &Attention, shared: &SharedKeys) -> Result<(), ModelError> {
        let sized = [
            ("rank of queries", shared.query_rank),
            ("groups of the output projection", shared.output_groups),
            ("rank of the output projection", shared.output_rank),
            (
                "width of the output projection",
                shared.output_groups.saturating_mul(shared.output_rank),
            ),
        ];
        sized.into_iter().try_for_each(|(key, value)| check_size(key, value))?;
        let whole = of.heads.is_multiple_of(shared.output_groups);
        check("groups of the output projection", shared.output_groups, whole, "of as many heads")?;
        let fits = of.kv_heads == 1 && of.value_dim == of.head_dim;
        check("key/value heads", of.kv_heads, fits, "forebay knows 1 that all heads share")?;
        // Kernels take elements in vectors.
        let vectors = |dim: usize| dim.is_multiple_of(8);
        check("head dimension", of.head_dim, vectors(of.head_dim), "it must be a multiple of 8")?;
        let Some(entries) = shared.entries else { return Ok(()) };
        let ratio = entries.ratio;
        let in_blocks = ratio > 0
            && ratio <= 1 << 20
            && (KV_BLOCK.is_multiple_of(ratio) || ratio.is_multiple_of(KV_BLOCK));
        check(
            "positions of a compressed entry",
            ratio,
            in_blocks,
            &format!("it must divide {KV_BLOCK} or be a multiple of it"),
        )?;
        let Some(indexer) = entries.indexer else { return Ok(()) };
        check_size("indexer heads", indexer.heads)?;
        check_size("length of the indexer's heads", indexer.head_dim)?;
        check_size("entries that the indexer chooses", indexer.top_k)?;
        let rope = self.ropes.get(indexer.rope);
        let rotary = rope.map_or(usize::MAX, |rope| rope.rotary_dim);
        check(
            "length of the indexer's heads",
            indexer.head_dim,
            vectors(indexer.head_dim) && rotary <= indexer.head_dim,
            &format!("{rotary} elements of it rotate, and it must be a multiple of 8"),
        )
    }
}
