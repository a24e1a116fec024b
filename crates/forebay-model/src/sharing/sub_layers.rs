//! Units of a dense model that VRAM does not hold: what moves, where each lives, and who computes it.
//!
//! Every layer has two units, attention (q, k, v, o) and feed-forward (gate, up, down). What has no place in VRAM lives in
//! host memory and passes through a ring in VRAM, in the order in which it is computed; of the feed-forwards, the CPU
//! computes some where they are while the ring fills. Units of either fate are spread evenly over the model, so that bus
//! and CPU are busy at the same time and a small ring is enough.

use std::ops::Range;

use forebay_stream::ModelBlocks;
use serde::Serialize;

use crate::weights::Weights;

/// Everything begins at a multiple of this. It is also the margin around weights, of which kernels may read some bytes.
pub const ALIGNMENT: u64 = 256;

/// Units of a layer.
const OF_LAYER: usize = 2;

/// The numbers of a layer's units, in the order of execution.
pub fn attention_of(layer: usize) -> usize {
    OF_LAYER * layer
}

pub fn feed_forward_of(layer: usize) -> usize {
    OF_LAYER * layer + 1
}

/// What is known of one unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubLayer {
    pub layer: usize,
    /// Of the layer's dense block: attention has the first.
    pub parts: Range<usize>,
    /// In VRAM, by part: with what aligns them.
    part_bytes: Vec<u64>,
    /// On disk and in host memory.
    pub bytes: u64,
    pub in_vram: bool,
    /// For batches of few tokens, the CPU computes it.
    pub on_cpu: bool,
}

impl SubLayer {
    fn device_bytes(&self) -> u64 {
        self.part_bytes.iter().sum()
    }

    pub fn is_feed_forward(&self) -> bool {
        self.parts.start > 0
    }
}

/// What decides who computes: rates of a machine while bus and CPU work at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SubLayerRates {
    /// From pinned memory to VRAM: bytes per second.
    pub copy_bytes_per_second: f64,
    /// One token's products on the CPU: bytes of weights per second.
    pub cpu_bytes_per_second: f64,
    /// The GPU's own time for a token, in which the CPU waits.
    pub gpu_seconds: f64,
}

/// The units of a dense model and where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubLayerPlan {
    /// In the order of execution.
    pub sub_layers: Vec<SubLayer>,
    /// Of the ring in VRAM; 0 where no unit passes through it.
    pub ring_bytes: u64,
}

/// Some units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SubLayerCounts {
    pub sub_layers: usize,
    pub bytes: u64,
}

/// Where units are, in numbers. There are two for each layer: attention and feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SubLayerPlacement {
    pub in_vram: SubLayerCounts,
    /// That always come over the bus.
    pub streamed: SubLayerCounts,
    /// That the CPU computes for few tokens at a time; for more, they come over the bus, too.
    pub on_cpu: SubLayerCounts,
    /// Of VRAM, for units on their way.
    pub ring_bytes: u64,
}

impl SubLayerPlan {
    pub fn placement(&self) -> SubLayerPlacement {
        let counts = |which: fn(&SubLayer) -> bool| {
            let of = self.sub_layers.iter().filter(|sub_layer| which(sub_layer));
            SubLayerCounts {
                sub_layers: of.clone().count(),
                bytes: of.map(|sub_layer| sub_layer.bytes).sum(),
            }
        };
        SubLayerPlacement {
            in_vram: counts(|sub_layer| sub_layer.in_vram),
            streamed: counts(|sub_layer| !sub_layer.in_vram && !sub_layer.on_cpu),
            on_cpu: counts(|sub_layer| sub_layer.on_cpu),
            ring_bytes: self.ring_bytes,
        }
    }

    /// All sub-layers are in VRAM.
    pub fn resident(weights: &Weights) -> SubLayerPlan {
        let mut sub_layers = Vec::new();
        for layer in 0..weights.layers.len() {
            let part_bytes = weights.blocks.dense[layer].part_bytes();
            let attention = weights.layers[layer].attention_parts;
            for parts in [0..attention, attention..part_bytes.len()] {
                let lengths = part_bytes[parts.clone()].iter().copied();
                sub_layers.push(SubLayer {
                    layer,
                    parts,
                    part_bytes: lengths.clone().map(|l| l.next_multiple_of(ALIGNMENT)).collect(),
                    bytes: lengths.sum(),
                    in_vram: true,
                    on_cpu: false,
                });
            }
        }
        SubLayerPlan { sub_layers, ring_bytes: 0 }
    }

    /// No unit in VRAM, and no ring yet.
    pub fn moved_out(mut self) -> SubLayerPlan {
        self.sub_layers.iter_mut().for_each(|sub_layer| sub_layer.in_vram = false);
        self
    }

    /// As many bytes of sub-layers in VRAM as fit `bytes` beside a ring for the others.
    ///
    /// Attention comes first: it cannot be the CPU's. Whatever stays is spread evenly. The ring holds the largest unit
    /// and the part of the next that makes it go on filling while that one waits for its turn; with room for two of the
    /// largest, a llama-70b on a PCIe 5 bus generates 3 % faster than with the least, and with three 1 % faster still,
    /// which is less than the same bytes save as places of units.
    ///
    /// # Errors
    /// The bytes that would be enough.
    pub fn within(mut self, bytes: u64) -> Result<SubLayerPlan, u64> {
        let largest = self.sub_layers.iter().map(SubLayer::device_bytes).max().unwrap_or(0);
        let part = self
            .sub_layers
            .iter()
            .flat_map(|sub_layer| &sub_layer.part_bytes)
            .max()
            .copied()
            .unwrap_or(0);
        // A unit goes round the end of the ring part by part, and each may leave a gap there.
        let least = largest + part;
        self.ring_bytes = bytes.min(2 * largest.max(part));
        let left = bytes.checked_sub(least).map(|_| bytes - self.ring_bytes).ok_or(least)?;
        let layers = self.sub_layers.len() / OF_LAYER;
        let counts = (0..=layers).map(|attention| (attention, 0));
        let counts = counts.chain((1..layers).map(|feed_forward| (layers, feed_forward)));
        let resident = |&counts: &(usize, usize)| self.bytes_of(counts);
        let best = counts.filter(|counts| resident(counts) <= left).max_by_key(resident);
        let best = best.unwrap_or((0, 0));
        for index in 0..self.sub_layers.len() {
            self.sub_layers[index].in_vram = self.is_chosen(index, best);
        }
        Ok(self)
    }

    /// Whether a unit is one of so many of its kind, spread evenly.
    fn is_chosen(&self, sub_layer: usize, (attention, feed_forward): (usize, usize)) -> bool {
        let count = if sub_layer.is_multiple_of(OF_LAYER) { attention } else { feed_forward };
        is_spread(sub_layer / OF_LAYER, count, self.sub_layers.len() / OF_LAYER)
    }

    fn bytes_of(&self, counts: (usize, usize)) -> u64 {
        let chosen = self
            .sub_layers
            .iter()
            .enumerate()
            .filter(|(sub_layer, _)| self.is_chosen(*sub_layer, counts));
        chosen.map(|(_, sub_layer)| sub_layer.device_bytes()).sum()
    }

    /// Units that have no place in VRAM.
    pub fn outside(&self) -> impl Iterator<Item = (usize, &SubLayer)> {
        self.sub_layers.iter().enumerate().filter(|(_, sub_layer)| !sub_layer.in_vram)
    }

    /// Whether a part of a layer's dense block is.
    pub fn is_in_vram(&self, layer: usize, part: usize) -> bool {
        let sub_layers = &self.sub_layers[OF_LAYER * layer..][..OF_LAYER];
        sub_layers.iter().any(|sub_layer| sub_layer.in_vram && sub_layer.parts.contains(&part))
    }

    pub fn all_in_vram(&self) -> bool {
        self.outside().next().is_none()
    }

    /// Whether the CPU has something to compute.
    pub fn cpu_takes_part(&self) -> bool {
        self.sub_layers.iter().any(|sub_layer| sub_layer.on_cpu)
    }

    /// The blocks that host memory is for: sub-layers that are not in VRAM, in order.
    pub fn host_blocks(&self, weights: &Weights) -> ModelBlocks {
        let block = |sub_layer: &SubLayer| {
            weights.blocks.dense[sub_layer.layer].slice(sub_layer.parts.clone())
        };
        ModelBlocks {
            dense: self.outside().map(|(_, sub_layer)| block(sub_layer)).collect(),
            experts: Vec::new(),
            experts_per_token: 0,
        }
    }

    /// Gives the CPU as many of the feed-forwards outside of VRAM as make a token take the least time: the others come
    /// over the bus meanwhile. Of equals the fewest, spread evenly.
    pub fn share_with_cpu(&mut self, rates: &SubLayerRates) {
        let candidates: &[usize] = &(0..self.sub_layers.len())
            .filter(|&sub_layer| {
                !self.sub_layers[sub_layer].in_vram && self.sub_layers[sub_layer].is_feed_forward()
            })
            .collect::<Vec<_>>();
        let all: u64 = self.outside().map(|(_, sub_layer)| sub_layer.bytes).sum();
        let share = |count: usize| {
            let placement = candidates.iter().enumerate();
            let chosen =
                placement.filter(move |(place, _)| is_spread(*place, count, candidates.len()));
            chosen.map(|(_, sub_layer)| *sub_layer)
        };
        let seconds = |count: usize| {
            let on_cpu: u64 = share(count).map(|sub_layer| self.sub_layers[sub_layer].bytes).sum();
            let copying = (all - on_cpu) as f64 / rates.copy_bytes_per_second;
            let computing = on_cpu as f64 / rates.cpu_bytes_per_second;
            copying.max(computing + rates.gpu_seconds)
        };
        let counts = 0..=candidates.len();
        let best = counts.min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).unwrap_or(0);
        for sub_layer in share(best) {
            self.sub_layers[sub_layer].on_cpu = true;
        }
    }
}

/// Whether number `index` of `all` is one of `count` that are spread evenly.
fn is_spread(index: usize, count: usize, all: usize) -> bool {
    (index + 1) * count / all > index * count / all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers as those of llama-70b, in units of 64 KiB: some have larger matrices.
    fn model(layers: usize) -> SubLayerPlan {
        let sub_layer = |layer: usize, parts: Range<usize>, sizes: &[u64]| {
            let part_bytes: Vec<u64> = sizes.iter().map(|size| size << 16).collect();
            let bytes = part_bytes.iter().sum();
            SubLayer { layer, parts, part_bytes, bytes, in_vram: true, on_cpu: false }
        };
        let sub_layers = (0..layers).flat_map(|layer| {
            let down = if layer % 3 == 0 { 193 } else { 132 };
            [sub_layer(layer, 0..4, &[38, 5, 7, 38]), sub_layer(layer, 4..7, &[132, 132, down])]
        });
        SubLayerPlan { sub_layers: sub_layers.collect(), ring_bytes: 0 }
    }

    #[test]
    fn more_memory_never_holds_fewer_bytes() {
        let least = model(80).within(0).unwrap_err();
        assert!(model(80).within(least - 1).is_err());
        let mut before = 0;
        for bytes in (least..least + (40_000 << 16)).step_by(37 << 16) {
            let plan = model(80).within(bytes).unwrap();
            let inside = plan.sub_layers.iter().filter(|sub_layer| sub_layer.in_vram);
            let resident: u64 = inside.map(SubLayer::device_bytes).sum();
            assert!(resident + plan.ring_bytes <= bytes && resident >= before, "{bytes}");
            let unused = bytes - resident - plan.ring_bytes;
            let outside = plan.outside().count();
            assert!(
                unused < 2 * (457 << 16) || outside == 1,
                "{bytes}: {} of {outside}",
                unused >> 16
            );
            before = resident;
        }
        let plan = model(80).within(least + (8000 << 16)).unwrap();
        let outside: Vec<&SubLayer> = plan.outside().map(|(_, sub_layer)| sub_layer).collect();
        assert!(
            outside.iter().all(|sub_layer| sub_layer.is_feed_forward()),
            "attention comes first"
        );
        assert!(outside.windows(2).all(|pair| pair[1].layer - pair[0].layer <= 2), "spread");
    }

    #[test]
    fn bus_and_cpu_are_done_about_together() {
        let rates = |copy: f64, cpu: f64| SubLayerRates {
            copy_bytes_per_second: copy,
            cpu_bytes_per_second: cpu,
            gpu_seconds: 0.0,
        };
        let shared = |rates: SubLayerRates| {
            let mut plan = model(80).within(2000 << 16).unwrap();
            plan.share_with_cpu(&rates);
            let on_cpu: Vec<usize> = plan
                .sub_layers
                .iter()
                .filter(|sub_layer| sub_layer.on_cpu)
                .map(|sub_layer| sub_layer.layer)
                .collect();
            assert!(
                plan.sub_layers
                    .iter()
                    .all(|sub_layer| !sub_layer.on_cpu || sub_layer.is_feed_forward())
            );
            on_cpu
        };
        let two_thirds = shared(rates(50e9, 100e9));
        assert!((58..=68).contains(&two_thirds.len()), "{}", two_thirds.len());
        assert!(two_thirds.windows(2).all(|pair| pair[1] - pair[0] <= 2), "spread evenly");
        assert!(shared(rates(50e9, 1e6)).is_empty(), "a slow CPU is left alone");
        assert_eq!(shared(rates(1e6, 100e9)).len(), 80, "attention alone goes over a slow bus");
        let late = SubLayerRates { gpu_seconds: 0.05, ..rates(50e9, 100e9) };
        assert!(shared(late).len() < two_thirds.len(), "the CPU waits for the GPU");
    }
}
