//! Features that distinguish a model from a plain decoder, described in words.

use forebay_compute::{NormForm, RopeScaling};
use forebay_format::{Catalog, TensorInfo};
use forebay_model::Architecture;
use forebay_model::arch::{
    Attention, AttentionBias, EmbeddingNorm, ExpertInput, Experts, FeedForward, IndexerRule,
    Latent, LatentNorm, Layer, NormLayout, OutputGate, QkNorm, Rope, StreamRule, Streams,
};
use forebay_ops::{DeltaRule, GateFunction, Gating, Scoring};
use forebay_options::OptionName;
use serde::Serialize;

/// A feature that distinguishes a model from a plain decoder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Feature {
    /// The usual term for the feature in the literature.
    pub name: &'static str,
    pub detail: String,
}

/// Returns all features of a model, attention first.
pub(crate) fn features(architecture: &Architecture, catalog: &Catalog) -> Vec<Feature> {
    let mut found = Vec::new();
    let mut add = |name, detail| found.push(Feature { name, detail });
    attention(architecture, &mut add);
    recurrent(architecture, &mut add);
    rotations(architecture, &mut add);
    norms(architecture, &mut add);
    streams(architecture, &mut add);
    match architecture.gating {
        Gating::Silu => {}
        Gating::Situ { limit, up_limit } => {
            let words = format!("tangents keep gate and up within {limit} and {up_limit}");
            add("SiTU", words);
        }
        Gating::GeluTanh => add("GeGLU", "gates by GELU instead of SiLU".to_owned()),
        Gating::Clamped { limit, .. } | Gating::ClampedSilu { limit } => {
            add("clamped SwiGLU", format!("gate and up stay within {limit}"));
        }
        Gating::SiluClamped { limit } => {
            add("clamped feed-forwards", format!("SiLU and up within {limit}"));
        }
        Gating::Relu => add("ReGLU", "gates by ReLU instead of SiLU".to_owned()),
        Gating::Xielu { .. } => {
            add("xIELU", "feed-forwards without a gate, with numbers of each layer".to_owned());
        }
        Gating::SquaredRelu => add("squared ReLU", "feed-forwards without a gate".to_owned()),
        Gating::PlainGelu | Gating::PlainGeluTanh => {
            add("GELU", "feed-forwards without a gate".to_owned());
        }
    }
    let is_sparse =
        |layer: &&Layer| matches!(layer.feed_forward, FeedForward::Dense { cut: Some(_), .. });
    let sparse = architecture.layers.iter().filter(is_sparse).count();
    if sparse > 0 {
        let words = format!("{sparse} layers use the gates that stand out, and 0 for the others");
        add("sparse activations", words);
    }
    experts(architecture, &mut add);
    let by_token = architecture.expert_layers().filter(|of| of.by_token).count();
    if by_token > 0 {
        add("experts by token", format!("tables give them in {by_token} layers"));
    }
    if architecture.residual_scale != 1.0 {
        let scale = architecture.residual_scale;
        add(
            "scaled residuals",
            format!("outputs times {scale} before they are added to the stream"),
        );
    }
    if architecture.feed_forward_input_scale != 1.0 {
        let scale = architecture.feed_forward_input_scale;
        add("scaled feed-forwards", format!("inputs times {scale}"));
    }
    if architecture.logit_scale != 1.0 {
        add("scaled logits", format!("times {}", architecture.logit_scale));
    }
    if architecture.embedding_scale != 1.0 {
        add("scaled embedding", format!("rows times {:.2}", architecture.embedding_scale));
    }
    if architecture.embedding_norm != EmbeddingNorm::None {
        add("normed embedding", "each row is divided by its root mean square".to_owned());
    }
    if architecture.residual_gates.is_some() {
        add(
            "gated residuals",
            "gates mix the residual stream with the output of a block".to_owned(),
        );
    }
    if let Some(taps) = architecture.convolutions {
        let words = format!("over {taps} tokens, of keys, values and the outputs of blocks");
        add("short convolutions", words);
    }
    if let Some(of) = architecture.layer_embeddings {
        add("embeddings of layers", format!("{} numbers of each token for every layer", of.width));
    }
    if let Some(of) = &architecture.ngrams {
        add(
            "embeddings of n-grams",
            format!(
                "layers {:?} add {} numbers for the n-grams of up to {} tokens, from {} rows of a table on the disk",
                of.layers,
                of.width,
                of.size,
                of.rows_per_token()
            ),
        );
    }
    if architecture.layer_scales {
        add("layer scales", "each layer multiplies the residual stream by a number".to_owned());
    }
    if let Some(cap) = architecture.logit_softcap {
        add("soft cap of logits", format!("they stay within {cap}"));
    }
    if architecture.tied_embeddings {
        add("tied embeddings", "the embedding table is the output projection".to_owned());
    }
    if let Some(detail) = left_out(architecture, catalog) {
        add("parts left out", detail);
    }
    found
}

fn norms(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    let which = match architecture.norms {
        NormLayout::Pre | NormLayout::None => None,
        NormLayout::Sandwich => Some(("sandwich norms", "the output of each block is normed, too")),
        NormLayout::Post => {
            Some(("post-norms", "the output of each block is normed, not its input"))
        }
        NormLayout::Parallel => {
            Some(("parallel blocks", "attention and feed-forward take the same input"))
        }
    };
    let others = match architecture.recurrent.and_then(|of| of.norms) {
        Some(of) if of != architecture.norms => ", except in recurrent layers",
        _ => "",
    };
    if let Some((name, what)) = which {
        add(name, format!("{what}{others}"));
    }
    if architecture.norm_form == NormForm::Layer {
        add("layer norms", "they subtract the mean".to_owned());
    }
}

fn streams(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    match architecture.streams {
        None => {}
        Some(Streams { count, rule: StreamRule::Mixed { .. } }) => {
            add("hyper-connections", format!("{count} residual streams, mixed by every block"));
        }
        Some(Streams { count, rule: StreamRule::Independent { .. } }) => {
            add("hyper-connections", format!("{count} residual streams, not mixed"));
        }
        Some(Streams { count, rule: StreamRule::Gated { .. } }) => {
            add("gated residual streams", format!("{count} of them"));
        }
        Some(Streams { count, rule: StreamRule::Bank { period } }) => {
            let kept = count - 1;
            let words = format!("{kept} states, one of every {period} layers, beside the last");
            add("attention over earlier residuals", words);
        }
        Some(Streams { count, rule: StreamRule::Predicted { branch_rank, .. } }) => {
            let words =
                format!("layers compute one of {count} residual streams and predict the others");
            add("alternating updates (AltUp)", words);
            let words =
                format!("a branch of rank {branch_rank} beside the attention of every layer");
            add("augmented residuals (LAuReL)", words);
        }
    }
}

fn attention(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    let attentions = &architecture.attentions;
    let attention = &attentions[0];
    let mut words: Vec<String> =
        architecture.latents().map(|(latent, heads)| latent_words(&latent, heads)).collect();
    words.dedup();
    if !words.is_empty() {
        add("latent attention (MLA)", words.join("; in other layers, "));
    }
    if let Some(of) = architecture.indexer() {
        let what = match of.rule {
            IndexerRule::Keys => "keys".to_owned(),
            IndexerRule::Blocks { length, .. } => format!("blocks of {length} keys"),
            IndexerRule::GatedPools { length } | IndexerRule::MeanPools { length } => {
                format!("pools of {length} keys")
            }
        };
        let words = format!("{} {what}, by scores of {} heads", of.top_k, of.heads);
        add("sparse attention with an indexer", words);
    }
    for of in attentions.iter().filter_map(|of| of.shared?.entries) {
        let seen = match of.indexer {
            Some(indexer) => {
                format!("{} of them by scores of {} heads", indexer.top_k, indexer.heads)
            }
            None => "all of them".to_owned(),
        };
        let words = format!("an entry for {} positions, beside the window: {seen}", of.ratio);
        add("compressed attention", words);
    }
    if let Some(detail) = windows(architecture) {
        let chunked = architecture.layers.iter().any(|layer| layer.chunked);
        add(if chunked { "attention in chunks" } else { "sliding window" }, detail);
    }
    if let [_, _, ..] = &attentions[..] {
        let words: Vec<String> = attentions.iter().map(shape_words).collect();
        add("attention by layer", words.join("; "));
    }
    if let Some(words) = attentions.iter().find_map(|of| gate_words(of.output_gate)) {
        add("gated attention", words);
    }
    if let Some(limit) = attention.clamp {
        add("clamped attention", format!("queries, keys and values within {limit}"));
    }
    if attentions.iter().any(|of| of.output_norm) {
        add("norm of attention's output", "of each head, without weights".to_owned());
    }
    let biases: Vec<_> = attentions.iter().filter_map(|of| of.relative).collect();
    if let Some(of) = biases.iter().max_by_key(|of| of.extent) {
        let words = format!("up to {} positions, mixed from {} profiles", of.extent, of.rank);
        add("biases by distance", words);
    }
    if attentions.iter().any(|of| of.sinks) {
        let all = attentions.iter().all(|of| of.sinks);
        let which = if all { "" } else { ", in some layers" };
        add("attention sinks", format!("a score of each head that no position has{which}"));
    }
    if attentions.iter().any(|of| of.values.of_keys) {
        add("keys as values", "some layers have no projection of values".to_owned());
    }
    if attentions.iter().any(|of| of.values.normed) {
        add("value norm", "of each head, without weights".to_owned());
    }
    let shared = architecture.attention_layers().filter(|of| architecture.keys_of(*of) != *of);
    let shared = shared.count();
    if shared > 0 {
        let layers = architecture.main_layers();
        add("shared keys and values", format!("{shared} of {layers} layers use those of another"));
    }
    match attention.bias {
        AttentionBias::None => {}
        AttentionBias::Qkv => add("biases", "of queries, keys and values".to_owned()),
        AttentionBias::All => add("biases", "of all projections of attention".to_owned()),
    }
    match attention.qk_norm {
        QkNorm::None => {}
        QkNorm::PerHead => add("query/key norm", "of each head".to_owned()),
        QkNorm::PerRotatedHead => {
            add("query/key norm", "of each head, after the rotation".to_owned());
        }
        QkNorm::WholeProjection => add("query/key norm", "of the whole projection".to_owned()),
        QkNorm::Weightless { .. } => {
            add("query/key norm", "of each head, without weights".to_owned())
        }
    }
    if let Some(cap) = attention.softcap {
        add("soft cap of scores", format!("they stay within {cap}"));
    }
}

/// Says how the output of attention is gated.
fn gate_words(gate: OutputGate) -> Option<String> {
    let (function, each) = match gate {
        OutputGate::None => return None,
        OutputGate::InQueries => (GateFunction::Sigmoid, "element"),
        OutputGate::ByElement(function) => (function, "element"),
        OutputGate::ByHead(function) => (function, "head"),
    };
    let function = match function {
        GateFunction::Sigmoid => "sigmoid",
        GateFunction::Softplus => "softplus",
    };
    Some(format!("the output times the {function} of a gate for each {each}"))
}

fn shape_words(attention: &Attention) -> String {
    let Attention { heads, kv_heads, head_dim, value_dim, .. } = attention;
    let values = match value_dim == head_dim {
        true => String::new(),
        false => format!(", values of {value_dim}"),
    };
    format!("{heads} heads of {head_dim} and {kv_heads} key/value heads{values}")
}

fn recurrent(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    let Some(shape) = &architecture.recurrent else { return };
    let name = match shape.rule {
        DeltaRule::GatedDelta if shape.share_scale > 1.0 => {
            "gated DeltaNet with negative eigenvalues"
        }
        DeltaRule::GatedDelta => "gated DeltaNet",
        DeltaRule::KimiDelta => "Kimi Delta Attention",
        DeltaRule::Mamba2 => "Mamba-2",
        DeltaRule::Mamba => "Mamba",
        DeltaRule::Lightning => "lightning attention",
        DeltaRule::ShortConvolution => "gated short convolutions",
    };
    let kept = shape.convolution - 1;
    let state = match shape.rule {
        DeltaRule::ShortConvolution => {
            format!("the last {kept} inputs of a convolution over {} channels", shape.channels())
        }
        DeltaRule::Mamba => format!(
            "a state of {} numbers for each of {} values and the last {kept} inputs of a convolution",
            shape.key_dim, shape.value_dim
        ),
        DeltaRule::Lightning => format!(
            "a state of {} heads of {} x {} numbers",
            shape.value_heads, shape.key_dim, shape.value_dim
        ),
        _ => format!(
            "a state of {} heads of {} x {} numbers and the last {kept} inputs of a convolution",
            shape.value_heads, shape.key_dim, shape.value_dim
        ),
    };
    let beside =
        architecture.layers.iter().any(|layer| layer.mixer.attends() && layer.mixer.recurs());
    let instead = if beside { "have beside attention" } else { "keep no keys and values, but" };
    add(
        name,
        format!(
            "{} of {} layers {instead} {state}: {:.1} MB for a sequence of any length",
            architecture.recurrent_layers(),
            architecture.layers.len(),
            architecture.state_bytes() as f64 / 1e6
        ),
    );
}

fn latent_words(latent: &Latent, heads: usize) -> String {
    let queries = match latent.query_rank {
        Some(rank) => format!("queries by way of {rank}"),
        None => "queries directly".to_owned(),
    };
    format!(
        "{} + {} numbers cached for a position and layer, instead of the {} of all heads' keys and \
         values; {queries}",
        latent.rank,
        latent.rotary,
        heads * (latent.plain + latent.rotary + latent.value),
    )
}

/// Describes the window size, how many layers have a window, and which do not.
fn windows(architecture: &Architecture) -> Option<String> {
    let layers = &architecture.layers;
    let window = layers.iter().filter_map(|layer| layer.window).max()?;
    let full: Vec<usize> =
        (0..layers.len()).filter(|layer| layers[*layer].window.is_none()).collect();
    let sliding = layers.len() - full.len();
    let others = match &full[..] {
        [] => "all layers".to_owned(),
        [first, rest @ ..] => {
            // A period is clearer than a list of layers.
            let period = rest.first().map_or(layers.len(), |second| second - first);
            let regular = full.windows(2).all(|pair| pair[1] - pair[0] == period);
            let every = match regular && rest.len() > 1 {
                true => format!("; one in {period} sees all"),
                false => String::new(),
            };
            format!("{sliding} of {} layers{every}", layers.len())
        }
    };
    Some(format!("{window} positions in {others}"))
}

fn rotations(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    let ropes = &architecture.ropes;
    let partial = architecture.attention_layers().find_map(|layer| {
        let attention = architecture.attention_of(layer);
        let rotary_dim = ropes[architecture.layers[layer].rope?].rotary_dim;
        let is_partial = attention.latent.is_none() && rotary_dim < attention.head_dim;
        is_partial.then_some((rotary_dim, attention.head_dim))
    });
    if let Some((rotary_dim, head_dim)) = partial {
        add("partial rotation", format!("{rotary_dim} of {head_dim} elements of a head"));
    }
    let unrotated = || {
        let attends = architecture.attention_layers();
        attends.filter(|layer| architecture.layers[*layer].rope.is_none())
    };
    if let Some(first) = unrotated().next() {
        let (count, all) = (unrotated().count(), architecture.layers.len());
        let grows = match architecture.temperature {
            Some(_) => "; their queries grow with the position",
            None => "",
        };
        let words = format!("{count} of {all} layers, the first is layer {first}{grows}");
        add("layers without rotation", words);
    }
    if let [_, _, ..] = &ropes[..] {
        let words: Vec<String> = ropes.iter().map(rope_words).collect();
        add("rotation by layer", words.join("; "));
    } else if let Some(scaling) = ropes.first().and_then(scaling_words) {
        add("scaled rotation", scaling);
    }
}

fn rope_words(rope: &Rope) -> String {
    let scaling = scaling_words(rope).map_or(String::new(), |words| format!(", {words}"));
    format!("base {}{scaling}", rope.theta)
}

fn scaling_words(rope: &Rope) -> Option<String> {
    match rope.scaling {
        RopeScaling::None => None,
        RopeScaling::Linear { factor } => Some(format!("linear, {factor} times")),
        RopeScaling::Llama3 { factor, original_context, .. } => {
            Some(format!("Llama 3's, {factor} times {original_context} positions"))
        }
        RopeScaling::Yarn { factor, original_context, .. } => {
            Some(format!("YaRN, {factor} times {original_context} positions"))
        }
        RopeScaling::LongRope { original_context, .. } => Some(format!(
            "LongRoPE, other factors for a context beyond {original_context} positions"
        )),
    }
}

fn experts(architecture: &Architecture, add: &mut impl FnMut(&'static str, String)) {
    let layers = &architecture.layers;
    let Some(experts) = architecture.expert_layers().next() else { return };
    let dense = layers
        .iter()
        .take_while(|layer| matches!(layer.feed_forward, FeedForward::Dense { .. }))
        .count();
    if dense > 0 {
        add("leading dense layers", format!("{dense} of {} have no experts", layers.len()));
    }
    if let Some(groups) = experts.groups {
        let (kept, of) = (groups.groups_kept, groups.n_groups);
        let best = match groups.experts_scored {
            1 => "best expert".to_owned(),
            scored => format!("best {scored} experts"),
        };
        add("group-limited routing", format!("{kept} of {of} groups, by their {best}"));
    }
    let routing = routing_words(experts);
    if !routing.is_empty() {
        add("routing", routing.join(", "));
    }
    if experts.scaled_input {
        add(
            "scaled inputs",
            "the weight of an expert multiplies its input, not its output".to_owned(),
        );
    }
    match experts.input {
        ExpertInput::OfFeedForward => {}
        ExpertInput::RouterOfLayer => {
            add("early routers", "they take the stream as it is before the layer".to_owned());
        }
        ExpertInput::OfLayer => {
            let words = "they take the stream as it is before the layer, behind a norm";
            add("experts beside attention", words.to_owned());
        }
    }
    if experts.bias {
        add("expert biases", "of the router and of every matrix".to_owned());
    }
    if let Some(of) = experts.latent {
        let words = match of.norm {
            LatentNorm::Before => "with a norm of the input",
            LatentNorm::After => "with a norm of the sum",
        };
        add("experts in a space of their own", format!("of {} elements, {words}", of.width));
    }
    if experts.output_norms {
        add("norms of experts", "the output of every expert is normed".to_owned());
    }
    if experts.always > 0 {
        let words = format!("{} for every token, scored with the others", experts.always);
        add("shared experts", words);
    }
    if experts.own_norms {
        add("norms of experts", "router, experts and shared experts have their own".to_owned());
    }
    if experts.shared_width > 0 {
        let (width, one) = (experts.shared_width, experts.width);
        let gated = if experts.shared_gate { ", times the sigmoid of a gate" } else { "" };
        let words = match width.checked_div(one) {
            Some(count) if count * one == width => {
                format!("{count} for every token, of width {one}")
            }
            _ => format!("of width {width} together, for every token"),
        };
        let averaged = if experts.averaged { ", averaged with the others" } else { "" };
        add("shared experts", format!("{words}{gated}{averaged}"));
    }
}

fn routing_words(experts: &Experts) -> Vec<String> {
    let mut words = Vec::new();
    match experts.scoring {
        Scoring::Softmax => {}
        Scoring::Sigmoid => words.push("sigmoid scores".to_owned()),
        Scoring::SigmoidOfChosen => words.push("sigmoids of the chosen logits".to_owned()),
        Scoring::SqrtSoftplus => words.push("scores are roots of softplus".to_owned()),
        Scoring::SparseMixer => words.push("weights are shares among near logits".to_owned()),
    }
    if experts.correction_bias {
        words.push("a bias corrects the choice".to_owned());
    }
    if !experts.renormalise {
        words.push("weights not normalised".to_owned());
    }
    if experts.scale != 1.0 {
        words.push(format!("weights times {}", experts.scale));
    }
    words
}

/// Describes the tensors that are not read: those of layers that predict further tokens, unless they are loaded, and those of other parts of a multimodal model.
pub(crate) fn left_out(architecture: &Architecture, catalog: &Catalog) -> Option<String> {
    let predicts = |tensor: &TensorInfo| architecture.leaves_out(&tensor.name);
    let sees = |tensor: &TensorInfo| {
        let parts = ["visual.", "vision_", "audio_", "multi_modal_projector.", "mm_projector."];
        let name = tensor.name.strip_prefix("model.").unwrap_or(&tensor.name);
        parts.iter().any(|part| name.starts_with(part))
    };
    let words = |which: &dyn Fn(&TensorInfo) -> bool, why: &str| {
        let tensors = || catalog.tensors().iter().filter(|tensor| which(tensor));
        let bytes: u64 = tensors().map(|tensor| tensor.bytes()).sum();
        let count = tensors().count();
        (count > 0).then(|| {
            format!("{count} tensors, {:.1} MB, are left out: they {why}", bytes as f64 / 1e6)
        })
    };
    let usable = architecture.mtp.is_none() && Architecture::with_mtp(catalog).is_ok();
    let why = match usable {
        true => format!(
            "predict further tokens, and {} uses the first layer of them",
            OptionName::Mtp.with("on")
        ),
        false => "predict further tokens".to_owned(),
    };
    let all = [words(&predicts, &why), words(&sees, "see images or hear sound")];
    let found: Vec<String> = all.into_iter().flatten().collect();
    (!found.is_empty()).then(|| found.join("; "))
}
