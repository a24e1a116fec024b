//! Sub-layers of a dense model that VRAM does not hold: which of them are streamed, where each is stored, and which
//! device computes it.
//!
//! Every layer has two sub-layers, attention (q, k, v, o) and feed-forward (gate, up, down). Those that are not in
//! VRAM are stored in host memory and pass through a ring in VRAM, in the order in which they are computed. Some
//! feed-forwards do not use the ring: the CPU computes them in host memory while the ring fills. The sub-layers in
//! each place are spread evenly over the model. Bus and CPU are then busy at the same time, and a small ring is
//! enough.

use std::ops::Range;

use forebay_stream::ModelBlocks;
use serde::Serialize;

use crate::weights::Weights;

/// Alignment in bytes of everything in device memory. It is also the margin around weights, because kernels may read
/// a few bytes of it.
pub const ALIGNMENT: u64 = 256;

/// Number of sub-layers of a layer.
const OF_LAYER: usize = 2;

/// Returns the number of a layer's attention. Sub-layers are numbered in the order of execution.
pub fn attention_of(layer: usize) -> usize {
    OF_LAYER * layer
}

/// Returns the number of a layer's feed-forward.
pub fn feed_forward_of(layer: usize) -> usize {
    OF_LAYER * layer + 1
}

/// A sub-layer, and where it is stored and computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubLayer {
    pub layer: usize,
    /// Parts of the layer's dense block. Attention has the first ones.
    pub parts: Range<usize>,
    /// Bytes in VRAM by part, including alignment.
    part_bytes: Vec<u64>,
    /// Bytes on disk and in host memory.
    pub bytes: u64,
    pub in_vram: bool,
    /// True if the CPU can compute the sub-layer: it has gate, up and down only, without biases.
    pub for_cpu: bool,
    /// True if the CPU computes the sub-layer for batches of few tokens.
    pub on_cpu: bool,
}

impl SubLayer {
    fn device_bytes(&self) -> u64 {
        self.part_bytes.iter().sum()
    }

    /// Returns true if the layer has no such sub-layer. It counts as being in VRAM.
    fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

/// Rates of a machine while bus and CPU work at the same time. They decide which device computes a sub-layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SubLayerRates {
    /// Bytes per second of copies from pinned memory to VRAM.
    pub copy_bytes_per_second: f64,
    /// Bytes of weights per second of one token's products on the CPU.
    pub cpu_bytes_per_second: f64,
    /// Seconds per token in which the GPU computes and the CPU waits.
    pub gpu_seconds: f64,
}

/// The sub-layers of a dense model and where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubLayerPlan {
    /// Sub-layers in the order of execution.
    pub sub_layers: Vec<SubLayer>,
    /// Bytes of the ring in VRAM; 0 if no sub-layer passes through it.
    pub ring_bytes: u64,
}

/// Number and bytes of some sub-layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SubLayerCounts {
    pub sub_layers: usize,
    pub bytes: u64,
}

/// Counts of sub-layers by location. Every layer has two: attention and feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SubLayerPlacement {
    pub in_vram: SubLayerCounts,
    /// Sub-layers that always come over the bus.
    pub streamed: SubLayerCounts,
    /// Sub-layers that the CPU computes for few tokens at a time. For more tokens, they come over the bus too.
    pub on_cpu: SubLayerCounts,
    /// Bytes of the ring in VRAM for streamed sub-layers.
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

    /// Creates a plan with all sub-layers in VRAM.
    pub fn resident(weights: &Weights) -> SubLayerPlan {
        let mut sub_layers = Vec::new();
        for layer in 0..weights.layers.len() {
            let part_bytes = weights.blocks.dense[layer].part_bytes();
            let attention = weights.layers[layer].attention_parts;
            let of = &weights.layers[layer];
            let is_plain = of.embeddings.is_none() && of.biases.is_empty();
            let both = [(0..attention, false), (attention..part_bytes.len(), true)];
            for (parts, is_feed_forward) in both {
                let lengths = part_bytes[parts.clone()].iter().copied();
                sub_layers.push(SubLayer {
                    for_cpu: is_plain && is_feed_forward,
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

    /// Moves all sub-layers out of VRAM. The plan has no ring yet.
    pub fn moved_out(mut self) -> SubLayerPlan {
        self.sub_layers.iter_mut().for_each(|sub_layer| sub_layer.in_vram = sub_layer.is_empty());
        self
    }

    /// Places as many bytes of sub-layers in VRAM as fit in `bytes` beside a ring for the others.
    ///
    /// Attention comes first, because the CPU cannot compute it. The sub-layers in VRAM are spread evenly. The ring
    /// holds at least the largest sub-layer and a part of the next. It then continues to fill while the first one
    /// waits for its turn. The ring gets up to twice the largest sub-layer. On a PCIe 5 bus, a llama-70b generates
    /// 3 % faster with two than with the least, and another 1 % faster with three. The third would save less time
    /// than sub-layers in the same bytes.
    ///
    /// # Errors
    /// Returns the smallest number of bytes that is enough if `bytes` is too small.
    pub fn within(mut self, bytes: u64) -> Result<SubLayerPlan, u64> {
        let largest = self.sub_layers.iter().map(SubLayer::device_bytes).max().unwrap_or(0);
        let part = self
            .sub_layers
            .iter()
            .flat_map(|sub_layer| &sub_layer.part_bytes)
            .max()
            .copied()
            .unwrap_or(0);
        // A sub-layer wraps around the end of the ring part by part, and each part may leave a gap there.
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
            self.sub_layers[index].in_vram =
                self.sub_layers[index].is_empty() || self.is_chosen(index, best);
        }
        Ok(self)
    }

    /// Returns true if a sub-layer is among those chosen. The counts say how many of each kind are chosen, spread
    /// evenly.
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

    /// Returns the sub-layers that are not in VRAM, with their numbers.
    pub fn outside(&self) -> impl Iterator<Item = (usize, &SubLayer)> {
        self.sub_layers.iter().enumerate().filter(|(_, sub_layer)| !sub_layer.in_vram)
    }

    /// Returns true if a part of a layer's dense block is in VRAM.
    pub fn is_in_vram(&self, layer: usize, part: usize) -> bool {
        let sub_layers = &self.sub_layers[OF_LAYER * layer..][..OF_LAYER];
        sub_layers.iter().any(|sub_layer| sub_layer.in_vram && sub_layer.parts.contains(&part))
    }

    pub fn all_in_vram(&self) -> bool {
        self.outside().next().is_none()
    }

    /// Returns true if the CPU computes any sub-layer.
    pub fn cpu_takes_part(&self) -> bool {
        self.sub_layers.iter().any(|sub_layer| sub_layer.on_cpu)
    }

    /// Returns the blocks for host memory: the sub-layers that are not in VRAM, in order.
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

    /// Assigns feed-forwards outside VRAM to the CPU, as many as minimise the time of a token. The others come over
    /// the bus meanwhile. Of equally fast numbers, the smallest is used. The feed-forwards are spread evenly.
    pub fn share_with_cpu(&mut self, rates: &SubLayerRates) {
        let candidates: &[usize] = &(0..self.sub_layers.len())
            .filter(|&sub_layer| {
                !self.sub_layers[sub_layer].in_vram && self.sub_layers[sub_layer].for_cpu
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

/// Returns true if number `index` of `all` is one of `count` that are spread evenly.
fn is_spread(index: usize, count: usize, all: usize) -> bool {
    (index + 1) * count / all > index * count / all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers with the sizes of llama-70b in units of 64 KiB, some with a larger down matrix.
    fn model(layers: usize) -> SubLayerPlan {
        let sub_layer = |layer: usize, parts: Range<usize>, sizes: &[u64]| {
            let part_bytes: Vec<u64> = sizes.iter().map(|size| size << 16).collect();
            let bytes = part_bytes.iter().sum();
            SubLayer {
                layer,
                for_cpu: parts.start > 0,
                parts,
                part_bytes,
                bytes,
                in_vram: true,
                on_cpu: false,
            }
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
        assert!(outside.iter().all(|sub_layer| sub_layer.for_cpu), "attention comes first");
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
            assert!(plan.sub_layers.iter().all(|sub_layer| !sub_layer.on_cpu || sub_layer.for_cpu));
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
