//! Properties of the routing itself, without any cache: how soon experts come back and how evenly they are used.

use serde::Serialize;

use super::record::{Passage, RoutingShape};

/// Lengths of the windows in which distinct experts are counted, in tokens.
const WINDOWS: [usize; 3] = [16, 64, 256];
/// Number of points of the growth curve for each factor of e in tokens.
const GROWTH_STEPS_PER_E: usize = 8;

/// Routing statistics of a sequence of tokens: prompts and continuations, one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Locality {
    pub prompt_tokens: usize,
    pub generated_tokens: usize,
    /// Share of a token's experts that the previous token used in the same layer. The first tokens of prompts do not
    /// count.
    pub token_overlap: f64,
    /// The share that consecutive tokens would have in common if each chose its experts independently, as often as the
    /// sequence uses them.
    pub chance_overlap: f64,
    /// The same share for each layer; `None` for a layer without experts.
    pub token_overlap_per_layer: Vec<Option<f64>>,
    pub windows: Vec<WindowExperts>,
    /// Uses by reuse distance in tokens.
    pub reuse: Vec<ReuseClass>,
    /// Number of uses of experts that were not used before.
    pub first_uses: u64,
    /// Entropy of each layer's usage in bits; `None` for a layer without experts.
    pub usage_entropy_bits_per_layer: Vec<Option<f64>>,
    /// Mean entropy as a share of the entropy of even usage.
    pub usage_entropy_share: f64,
    /// Largest number of distinct experts that a layer used in the whole sequence. This says little: without a capacity
    /// it grows with the length of the text, up to the number of experts.
    pub max_resident_per_layer: usize,
    /// Growth curve: `(tokens, share of all experts used so far)`.
    pub growth: Vec<(usize, f64)>,
    /// Number of uses, `[layer][expert]`.
    pub usage: Vec<Vec<u64>>,
}

/// Distinct experts in windows of consecutive tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WindowExperts {
    pub tokens: usize,
    /// Mean over layers and windows; `None` if the sequence is shorter than a window.
    pub experts_per_layer: Option<f64>,
    /// The same mean as a share of the layer's experts.
    pub share: Option<f64>,
}

/// Number of uses of experts whose last use was `from` to `to` tokens earlier. A distance of 1 is the previous token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReuseClass {
    pub from: usize,
    pub to: usize,
    pub uses: u64,
}

/// Measures passages, one after the other.
pub fn measure(shape: &RoutingShape, passages: &[&Passage]) -> Locality {
    let mut layers: Vec<LayerUse> = shape.layers.iter().map(|l| LayerUse::new(l.0)).collect();
    let (k, row) = (shape.experts_per_token, shape.layers.len() * shape.experts_per_token);
    let experts: u64 = shape.layers.iter().map(|&(experts, _)| u64::from(experts)).sum();
    let total: usize = passages.iter().map(|passage| passage.tokens(shape)).sum();
    let prompt_tokens = passages.iter().map(|passage| passage.prompt_tokens).sum();
    let mut growth = Vec::new();
    let (mut time, mut next) = (0, 1);
    for passage in passages {
        for (index, token) in passage.routing.chunks(row).enumerate() {
            for (layer, chosen) in layers.iter_mut().zip(token.chunks(k)) {
                layer.token(chosen, time, index == 0);
            }
            time += 1;
            // Points are evenly spaced on a logarithmic scale.
            if time >= next || time == total {
                next = time + (time / GROWTH_STEPS_PER_E).max(1);
                let used: u64 = layers.iter().map(|layer| layer.distinct as u64).sum();
                growth.push((time, used as f64 / experts.max(1) as f64));
            }
        }
    }
    summary(layers, prompt_tokens, total - prompt_tokens, growth)
}

fn summary(
    layers: Vec<LayerUse>,
    prompt_tokens: usize,
    generated_tokens: usize,
    growth: Vec<(usize, f64)>,
) -> Locality {
    let routed = || layers.iter().filter(|layer| !layer.uses.is_empty());
    let pairs: u64 = routed().map(|layer| layer.pairs).sum();
    let kept: u64 = routed().map(|layer| layer.kept).sum();
    let by_chance: f64 = routed().map(|layer| layer.pairs as f64 * layer.chance_overlap()).sum();
    let window = |(index, &tokens): (usize, &usize)| {
        let counted = || routed().filter(|layer| layer.windows[index].count > 0);
        let mean = |of: &dyn Fn(&LayerUse) -> f64| {
            (counted().count() > 0)
                .then(|| counted().map(of).sum::<f64>() / counted().count() as f64)
        };
        WindowExperts {
            tokens,
            experts_per_layer: mean(&|layer| layer.windows[index].mean()),
            share: mean(&|layer| layer.windows[index].mean() / layer.uses.len() as f64),
        }
    };
    let classes = layers.iter().map(|layer| layer.reuse.len()).max().unwrap_or(0);
    let class = |class: usize| ReuseClass {
        from: 1 << class,
        to: (2 << class) - 1,
        uses: layers.iter().filter_map(|layer| layer.reuse.get(class)).sum(),
    };
    let entropy = |layer: &LayerUse| (!layer.uses.is_empty()).then(|| entropy_bits(&layer.uses));
    let shares: Vec<f64> = routed()
        .filter(|layer| layer.uses.len() > 1)
        .map(|layer| entropy_bits(&layer.uses) / (layer.uses.len() as f64).log2())
        .collect();
    Locality {
        prompt_tokens,
        generated_tokens,
        token_overlap: ratio(kept, pairs),
        chance_overlap: if pairs == 0 { 0.0 } else { by_chance / pairs as f64 },
        token_overlap_per_layer: layers
            .iter()
            .map(|layer| (!layer.uses.is_empty()).then(|| ratio(layer.kept, layer.pairs)))
            .collect(),
        windows: WINDOWS.iter().enumerate().map(window).collect(),
        reuse: (0..classes).map(class).collect(),
        first_uses: layers.iter().map(|layer| layer.distinct as u64).sum(),
        usage_entropy_bits_per_layer: layers.iter().map(entropy).collect(),
        usage_entropy_share: shares.iter().sum::<f64>() / shares.len().max(1) as f64,
        max_resident_per_layer: layers.iter().map(|layer| layer.distinct).max().unwrap_or(0),
        growth,
        usage: layers.into_iter().map(|layer| layer.uses).collect(),
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns Shannon's entropy of the distribution of uses over experts, in bits.
fn entropy_bits(uses: &[u64]) -> f64 {
    let total: u64 = uses.iter().sum();
    let term = |&count: &u64| {
        let share = count as f64 / total as f64;
        -share * share.log2()
    };
    // Adding zero turns the negative zero of a single term into a positive one.
    uses.iter().filter(|&&count| count > 0).map(term).sum::<f64>() + 0.0
}

/// State of one layer while tokens pass through it.
struct LayerUse {
    uses: Vec<u64>,
    /// Number of tokens that went through the layer.
    tokens: u64,
    /// Number of the last token that used each expert, counted from 1; 0 if none did.
    last: Vec<usize>,
    distinct: usize,
    /// Number of uses in tokens that follow another token of their passage.
    pairs: u64,
    /// Number of these uses whose expert the previous token used too.
    kept: u64,
    reuse: Vec<u64>,
    windows: [Window; WINDOWS.len()],
    /// Chosen experts of the most recent tokens, as many as the largest window.
    past: std::collections::VecDeque<Vec<usize>>,
}

/// Distinct experts of a sliding window.
#[derive(Default)]
struct Window {
    uses: Vec<u32>,
    distinct: usize,
    sum: u64,
    count: u64,
}

impl Window {
    fn mean(&self) -> f64 {
        ratio(self.sum, self.count)
    }
}

impl LayerUse {
    /// Returns the share of a token's experts that another token uses, too, if tokens choose independently: an expert
    /// that a share `p` of the tokens uses is in both with probability `p * p`.
    fn chance_overlap(&self) -> f64 {
        let share = |&uses: &u64| uses as f64 / self.tokens.max(1) as f64;
        let per_token: f64 = self.uses.iter().map(share).sum();
        let in_both: f64 = self.uses.iter().map(|uses| share(uses).powi(2)).sum();
        if per_token > 0.0 { in_both / per_token } else { 0.0 }
    }

    fn new(experts: u32) -> LayerUse {
        let experts = experts as usize;
        let window = || Window { uses: vec![0; experts], ..Window::default() };
        LayerUse {
            uses: vec![0; experts],
            tokens: 0,
            last: vec![0; experts],
            distinct: 0,
            pairs: 0,
            kept: 0,
            reuse: Vec::new(),
            windows: [window(), window(), window()],
            past: std::collections::VecDeque::new(),
        }
    }

    fn token(&mut self, chosen: &[i32], time: usize, is_first: bool) {
        let experts = self.uses.len();
        if experts == 0 {
            return;
        }
        self.tokens += 1;
        let known = chosen.iter().filter_map(|&expert| usize::try_from(expert).ok());
        let chosen: Vec<usize> = known.filter(|&expert| expert < experts).collect();
        for &expert in &chosen {
            let gap = time + 1 - self.last[expert];
            if !is_first {
                self.pairs += 1;
                self.kept += u64::from(self.last[expert] > 0 && gap == 1);
            }
            if self.last[expert] == 0 {
                self.distinct += 1;
            } else {
                let class = gap.ilog2() as usize;
                if self.reuse.len() <= class {
                    self.reuse.resize(class + 1, 0);
                }
                self.reuse[class] += 1;
            }
        }
        for &expert in &chosen {
            self.last[expert] = time + 1;
            self.uses[expert] += 1;
        }
        self.slide(chosen, time);
    }

    fn slide(&mut self, chosen: Vec<usize>, time: usize) {
        for (window, &tokens) in self.windows.iter_mut().zip(&WINDOWS) {
            for &expert in &chosen {
                window.distinct += usize::from(window.uses[expert] == 0);
                window.uses[expert] += 1;
            }
            if time >= tokens {
                for &expert in &self.past[self.past.len() - tokens] {
                    window.uses[expert] -= 1;
                    window.distinct -= usize::from(window.uses[expert] == 0);
                }
            }
            if time + 1 >= tokens {
                window.sum += window.distinct as u64;
                window.count += 1;
            }
        }
        self.past.push_back(chosen);
        if self.past.len() > WINDOWS[WINDOWS.len() - 1] {
            self.past.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::PromptForm;
    use super::*;

    /// One layer with experts and one without; every token uses two of four experts.
    fn passage(tokens: &[[i32; 2]], prompt_tokens: usize) -> Passage {
        let routing = tokens.iter().flat_map(|&[a, b]| [a, b, -1, -1]).collect();
        Passage {
            domain: 0,
            prompt_tokens,
            routing,
            form: PromptForm::Text,
            cut_tokens: 0,
            batch_tokens: 64,
        }
    }

    fn shape() -> RoutingShape {
        RoutingShape { layers: vec![(4, 100), (0, 0)], experts_per_token: 2 }
    }

    #[test]
    fn a_hand_made_trace() {
        let passages = [passage(&[[0, 1], [0, 2], [2, 0]], 2), passage(&[[0, 3], [1, 0]], 1)];
        let found = measure(&shape(), &[&passages[0], &passages[1]]);
        assert_eq!((found.prompt_tokens, found.generated_tokens), (3, 2));
        // Token 1 keeps expert 0, token 2 keeps both, and token 4 keeps expert 0: 4 of 6.
        assert_eq!(found.token_overlap, 4.0 / 6.0);
        assert_eq!(found.token_overlap_per_layer, [Some(4.0 / 6.0), None]);
        // Expert 0 after 1 token, 0 and 2 after 1, 0 after 1 (across the border of the passages), 0 after 1, 1 after 4.
        let classes: Vec<(usize, usize, u64)> =
            found.reuse.iter().map(|class| (class.from, class.to, class.uses)).collect();
        assert_eq!(classes, [(1, 1, 5), (2, 3, 0), (4, 7, 1)]);
        assert_eq!(found.first_uses, 4);
        assert_eq!(found.usage, [vec![5, 2, 2, 1], vec![]]);
        assert_eq!(found.max_resident_per_layer, 4);
        assert_eq!(found.growth, [(1, 0.5), (2, 0.75), (3, 0.75), (4, 1.0), (5, 1.0)]);
        let bits: f64 = [0.5, 0.2, 0.2, 0.1].iter().map(|p: &f64| -p * p.log2()).sum();
        let entropy = found.usage_entropy_bits_per_layer[0].unwrap();
        assert!((entropy - bits).abs() < 1e-12);
        assert!((found.usage_entropy_share - bits / 2.0).abs() < 1e-12);
        assert!(found.windows.iter().all(|window| window.experts_per_layer.is_none()));
    }

    #[test]
    fn windows_slide() {
        // 16 tokens of experts 0 and 1, then one of 2 and 3: windows of 16 contain 2, then 4 experts.
        let mut tokens = vec![[0, 1]; 16];
        tokens.push([2, 3]);
        let passage = passage(&tokens, 1);
        let found = measure(&shape(), &[&passage]);
        assert_eq!(found.windows[0].experts_per_layer, Some(3.0));
        assert_eq!(found.windows[0].share, Some(0.75));
        // After 16 more tokens of experts 2 and 3, the window no longer counts experts 0 and 1.
        tokens.extend([[2, 3]; 16]);
        let long = self::passage(&tokens, 1);
        let found = measure(&shape(), &[&long]);
        // Windows: 1 with {0, 1}, 15 with all four, 2 with {2, 3}.
        assert_eq!(found.windows[0].experts_per_layer, Some((2.0 + 15.0 * 4.0 + 4.0) / 18.0));
    }

    #[test]
    fn even_use_has_all_the_entropy_and_one_favourite_none() {
        assert_eq!(entropy_bits(&[3, 3, 3, 3]), 2.0);
        assert_eq!(entropy_bits(&[7, 0, 0]).to_bits(), 0.0_f64.to_bits());
        let found = measure(&shape(), &[]);
        assert_eq!((found.token_overlap, found.usage_entropy_share), (0.0, 0.0));
    }
}
