//! Checks of descriptions: every value must be one that the decoder can run.

use forebay_compute::{NormForm, Temperature};
use forebay_ops::{DeltaRule, Gating};

use super::architecture::{
    Architecture, Attention, AttentionBias, EmbeddingNorm, Experts, FeedForward, Layer, Mixer,
    OutputGate, QkNorm, Values,
};
use super::check::{check, check_size};
use super::recurrent::Recurrent;
use super::shapes::{ExpertInput, NormLayout};
use crate::ModelError;

impl Architecture {
    pub(super) fn validate(&self) -> Result<(), ModelError> {
        let sized = [
            ("hidden size", self.hidden),
            ("vocabulary size", self.vocabulary),
            ("layer count", self.layers.len()),
            ("trained context", self.context_trained),
        ];
        for (key, value) in sized {
            check_size(key, value)?;
        }
        let fits = self.embedding_rows >= self.vocabulary && self.embedding_rows < 1 << 24;
        let expected = "the embedding table has a row for every token, at most 16 million";
        check("rows of the embedding table", self.embedding_rows, fits, expected)?;
        self.attentions.iter().try_for_each(Attention::validate)?;
        for rope in &self.ropes {
            check_size("rotary dimension", rope.rotary_dim)?;
            let even = rope.rotary_dim.is_multiple_of(2);
            check("rotary dimension", rope.rotary_dim, even, "it must be even")?;
            let fits = rope.theta.is_finite() && rope.theta > 0.0;
            check("rope base", rope.theta, fits, "it must be positive")?;
        }
        for (key, epsilon) in [
            ("norm epsilon", self.norm_epsilon),
            ("epsilon of norms of outputs", self.post_norm_epsilon),
        ] {
            let fits = epsilon > 0.0 && epsilon < 1.0;
            check(key, epsilon, fits, "it must be between 0 and 1")?;
        }
        let fits = self.embedding_norm == EmbeddingNorm::None || self.streams.is_none();
        check("norm of embeddings", "present", fits, "forebay knows it with one residual stream")?;
        for (key, factor) in [
            ("scale of the embedding", Some(self.embedding_scale)),
            ("scale of outputs added to the residual stream", Some(self.residual_scale)),
            ("scale of the inputs of feed-forwards", Some(self.feed_forward_input_scale)),
            ("scale of logits", Some(self.logit_scale)),
            ("epsilon of norms of the residual stream", Some(self.stream_epsilon())),
            ("cap of logits", self.logit_softcap),
        ] {
            let factor = factor.unwrap_or(1.0);
            check(key, factor, factor.is_finite() && factor > 0.0, "it must be positive")?;
        }
        // A divided stream differs from the true one wherever no norm takes it.
        let is_normed = (0..self.layers.len()).all(|layer| self.norms_of(layer).before())
            && self.layer_embeddings.is_none();
        check(
            "scale of outputs added to the residual stream",
            self.residual_scale,
            self.residual_scale == 1.0 || is_normed,
            "it must be 1 if blocks take the residual stream without a norm",
        )?;
        check(
            "attention layers",
            0,
            self.attention_layers().next().is_some(),
            "forebay needs at least one layer with attention",
        )?;
        if self.recurrent_layers() > 0 {
            let recurrent = self.recurrent.ok_or_else(|| ModelError::BadValue {
                key: "recurrent layers".into(),
                value: self.recurrent_layers().to_string(),
                expected: "their shape must be described".into(),
            })?;
            recurrent.validate()?;
            self.validate_beside(recurrent)?;
        }
        self.validate_input_scale()?;
        self.validate_expert_inputs()?;
        let ropes = self.ropes.len();
        let fits = self.layers.iter().all(|layer| layer.rope.is_none_or(|rope| rope < ropes));
        check("rotations", ropes, fits, "every layer's rotation must be described")?;
        self.attention_layers().try_for_each(|layer| self.validate_rotation(layer))?;
        self.validate_temperature()?;
        self.attention_layers().try_for_each(|layer| self.validate_keys(layer))?;
        self.validate_layer_embeddings()?;
        self.validate_gatings()?;
        if let Some(of) = &self.ngrams {
            of.validate(self.layers.len())?;
            let fits = of.layers.iter().all(|layer| self.layers[*layer].mixer != Mixer::None);
            let given = format!("{:?}", of.layers);
            let expected = "they need attention or a recurrence";
            check("layers with n-grams", given, fits, expected)?;
            let fits = self.hidden.is_multiple_of(8);
            check("hidden size", self.hidden, fits, "n-grams need a multiple of 8")?;
            let fits = (of.separator as usize) < self.vocabulary;
            check("eos_token_id", of.separator, fits, "n-grams need a token of the vocabulary")?;
        }
        self.validate_gates_and_convolutions()?;
        self.validate_indexers()?;
        let whole = self.kv_groups().iter().filter(|group| group.window.is_none()).count();
        let expected = "forebay keeps keys and values of one shape in layers without a window";
        check("shapes of attention without a window", whole, whole <= 1, expected)?;
        self.validate_streams()?;
        self.validate_norms()?;
        self.validate_shared_keys()?;
        self.validate_mtp()?;
        self.layers.iter().try_for_each(|layer| layer.validate(self.hidden))
    }

    /// Checks the factor of queries that grows with the position.
    fn validate_temperature(&self) -> Result<(), ModelError> {
        if let Some(Temperature { rate, step, .. }) = self.temperature {
            let rate_fits = rate.is_finite() && rate >= 0.0;
            check("rate of the temperature", rate, rate_fits, "it must not be negative")?;
            check("step of the temperature", step, step.is_finite() && step >= 1.0, "at least 1")?;
            // A norm behind the factor would take it back.
            let plain = |of: &Attention| {
                let unweighted = match of.qk_norm {
                    QkNorm::None | QkNorm::Weightless { .. } => true,
                    // The CPU, which alone computes such attention, norms first.
                    QkNorm::PerHead => of.relative.is_some(),
                    QkNorm::PerRotatedHead | QkNorm::WholeProjection => false,
                };
                of.bias == AttentionBias::None && unweighted
            };
            let fits = self.attentions.iter().all(plain);
            check(
                "temperature",
                true,
                fits,
                "the queries must have no biases and no norm weights",
            )?;
        }
        Ok(())
    }

    /// Checks the limits of gates.
    fn validate_gatings(&self) -> Result<(), ModelError> {
        let own = (0..self.layers.len()).map(|layer| self.gatings_of(layer));
        for gating in own.flat_map(|of| [of.experts, of.others]) {
            let limits = match gating {
                Gating::Clamped { limit, .. }
                | Gating::ClampedSilu { limit }
                | Gating::SiluClamped { limit } => [limit; 2],
                Gating::Situ { limit, up_limit } => [limit, up_limit],
                Gating::Xielu { positive, negative, slope, floor } => {
                    let all = [positive, negative, slope, floor];
                    let fits = all.iter().all(|number| number.is_finite()) && floor <= 0.0;
                    let expected = "they must be finite, and the last at most 0";
                    check("numbers of xIELU", format!("{all:?}"), fits, expected)?;
                    continue;
                }
                Gating::Silu
                | Gating::GeluTanh
                | Gating::Relu
                | Gating::SquaredRelu
                | Gating::PlainGelu
                | Gating::PlainGeluTanh => continue,
            };
            for limit in limits {
                let fits = limit.is_finite() && limit > 0.0;
                check("limit of gate and up", limit, fits, "it must be positive")?;
            }
        }
        Ok(())
    }

    /// Checks the experts that take the residual stream as it is before their layer.
    fn validate_expert_inputs(&self) -> Result<(), ModelError> {
        let takes = |layer: &&Layer| layer.expert_input() != ExpertInput::OfFeedForward;
        let plain = |layer: &Layer| {
            let FeedForward::Experts(of) = &layer.feed_forward else { return true };
            let is_other = of.own_norms || of.scaled_input || of.bias || of.by_token;
            layer.mixer == Mixer::Attention && !is_other && of.latent.is_none() && of.always == 0
        };
        let is_plain = self.norms == NormLayout::Pre
            && self.norm_form == NormForm::RootMeanSquare
            && self.streams.is_none()
            && self.residual_scale == 1.0
            && self.mtp.is_none();
        let mut layers = self.layers.iter().filter(takes).peekable();
        let fits = layers.peek().is_none() || is_plain && layers.all(plain);
        let expected = "forebay knows them behind attention, with one residual stream";
        check("experts that take the input of their layer", "present", fits, expected)
    }

    /// Checks gates of the residual stream and short convolutions.
    fn validate_gates_and_convolutions(&self) -> Result<(), ModelError> {
        if let Some(temperature) = self.residual_gates {
            let fits = temperature.is_finite() && temperature > 0.0;
            check("residual_gate_temperature", temperature, fits, "it must be positive")?;
            let plain = self.norms == NormLayout::Sandwich
                && self.streams.is_none()
                && self.layer_embeddings.is_none()
                && self.residual_scale == 1.0;
            let expected = "forebay knows gates of one residual stream, behind norms of outputs";
            check("gates of the residual stream", "present", plain, expected)?;
        }
        let Some(taps) = self.convolutions else { return Ok(()) };
        let fits = (2..=8).contains(&taps);
        check("width of the short convolutions", taps, fits, "forebay knows 2 to 8")?;
        let plain = self.layers.iter().enumerate().all(|(index, layer)| {
            let of = self.attention_of(index);
            layer.mixer == Mixer::Attention
                && !layer.feed_forward.is_none()
                && layer.keys_of.is_none()
                && of.latent.is_none()
                && of.shared.is_none()
                && of.bias == AttentionBias::None
                && of.values == Values::PLAIN
        });
        let expected =
            "forebay knows them in layers of attention with keys and values of their own";
        check("short convolutions", "present", plain, expected)
    }

    /// Checks the factor of the inputs of feed-forwards, which is in the weights of the norms before them.
    fn validate_input_scale(&self) -> Result<(), ModelError> {
        let scale = self.feed_forward_input_scale;
        let is_dense = self.expert_layers().next().is_none();
        check(
            "scale of the inputs of feed-forwards",
            scale,
            scale == 1.0 || (self.norms.before() && is_dense),
            "it must be 1 with experts, or without a norm before the feed-forward",
        )
    }

    /// Checks the layers that have attention and a recurrence.
    fn validate_beside(&self, recurrent: Recurrent) -> Result<(), ModelError> {
        let beside = |layer: &&Layer| layer.mixer == Mixer::AttentionAndRecurrent;
        let count = self.layers.iter().filter(beside).count();
        let output = recurrent.factors.output;
        check(
            "factor of the output of recurrent layers",
            output,
            output == 1.0 || count == self.recurrent_layers(),
            "it must be 1 if they have no attention",
        )?;
        let plain = |layer: &Layer| {
            let of = &self.attentions[layer.attention];
            of.latent.is_none() && of.shared.is_none()
        };
        let fits = recurrent.rule == DeltaRule::Mamba2
            && self.streams.is_none()
            && self.layers.iter().filter(beside).all(plain);
        check(
            "layers with attention and a recurrence",
            count,
            count == 0 || fits,
            "forebay knows grouped attention beside Mamba-2, with one residual stream",
        )
    }

    /// Checks the embeddings for layers, and that nothing needs them if there are none.
    fn validate_layer_embeddings(&self) -> Result<(), ModelError> {
        let is_sparse = self.layers.iter().any(|layer| layer.cut().is_some());
        let Some(of) = self.layer_embeddings else {
            return check(
                "activation_sparsity_pattern",
                "set",
                !is_sparse,
                "forebay knows sparse gates in models with embeddings of layers only",
            );
        };
        check_size("width of a layer's embeddings", of.width)?;
        check_size("tokens with embeddings for layers", of.tokens)?;
        let all = of.width.saturating_mul(self.layers.len());
        check_size("width of all layers' embeddings", all)
    }

    /// Checks that the rotation of a layer fits its heads.
    fn validate_rotation(&self, layer: usize) -> Result<(), ModelError> {
        let Some(rope) = self.layers[layer].rope else { return Ok(()) };
        let (rope, attention) = (&self.ropes[rope], self.attention_of(layer));
        check(
            "rotary dimension",
            rope.rotary_dim,
            rope.rotary_dim.saturating_add(rope.from) <= attention.head_dim,
            "it must be at most the head dimension",
        )
    }

    /// Checks that a layer that uses the keys and values of another can do so.
    fn validate_keys(&self, layer: usize) -> Result<(), ModelError> {
        let Some(of) = self.layers[layer].keys_of else { return Ok(()) };
        let fits = self.may_use_keys(layer, of);
        check(
            &format!("layer whose keys and values layer {layer} uses"),
            of,
            fits,
            "it must be an earlier one with the same window and shape, and with keys of its own",
        )
    }
}

impl Attention {
    fn validate(&self) -> Result<(), ModelError> {
        let sized = [
            ("attention heads", self.heads),
            ("key/value heads", self.kv_heads),
            ("head dimension", self.head_dim),
            ("value dimension", self.value_dim),
        ];
        for (key, value) in sized {
            check_size(key, value)?;
        }
        check(
            "attention heads",
            self.heads,
            self.heads.is_multiple_of(self.kv_heads),
            "it must be a multiple of the key/value heads",
        )?;
        let Values { of_keys, normed, scale } = self.values;
        check(
            "value dimension",
            self.value_dim,
            !of_keys || self.value_dim == self.head_dim,
            "it must be the head dimension if keys are values",
        )?;
        check(
            "biases of attention",
            "present",
            !(of_keys || normed || scale != 1.0) || self.bias == AttentionBias::None,
            "forebay knows keys as values, normed values and scaled ones without biases",
        )?;
        if let Some(limit) = self.clamp {
            let fits = limit.is_finite() && limit > 0.0;
            check("bound of queries, keys and values", limit, fits, "it must be positive")?;
            let plain = self.bias == AttentionBias::None
                && self.values == Values::PLAIN
                && self.qk_norm == QkNorm::None
                && self.output_gate != OutputGate::InQueries
                && self.latent.is_none()
                && self.shared.is_none();
            let expected = "forebay knows it for projections without biases, norms and gates";
            check("bound of queries, keys and values", limit, plain, expected)?;
        }
        check("scale of values", scale, scale.is_finite() && scale > 0.0, "it must be positive")?;
        for (key, factor) in
            [("scale of attention", Some(self.scale)), ("cap of attention", self.softcap)]
        {
            let factor = factor.unwrap_or(1.0);
            check(key, factor, factor.is_finite() && factor > 0.0, "it must be positive")?;
        }
        if let Some(of) = self.relative {
            for of_each in [of.extent, self.heads] {
                check_size("biases by distance", of.rank.saturating_mul(of_each))?;
            }
            let plain = self.latent.is_none() && self.shared.is_none() && self.indexer.is_none();
            let expected = "forebay knows them in attention to all keys of a window";
            check("biases by distance", "present", plain, expected)?;
        }
        let fits = !self.output_norm || self.latent.is_none() && self.shared.is_none();
        let expected = "forebay knows them with grouped queries";
        check("norms of attention's outputs", "present", fits, expected)?;
        let Some(latent) = self.latent else { return Ok(()) };
        let sized = [
            ("latent rank of queries", latent.query_rank.unwrap_or(1)),
            ("latent rank", latent.rank),
            ("part of a head that does not rotate", latent.plain),
            // Heads may have no such part.
            ("part of a head that rotates", latent.rotary.max(1)),
            ("value length", latent.value),
        ];
        sized.into_iter().try_for_each(|(key, value)| check_size(key, value))
    }
}

impl Layer {
    fn validate(&self, hidden: usize) -> Result<(), ModelError> {
        let is_empty = self.mixer == Mixer::None && self.feed_forward.is_none();
        check(
            "layer",
            "nothing",
            !is_empty,
            "it must have attention, a recurrence or a feed-forward",
        )?;
        if let Some(window) = self.window {
            check("sliding window", window, window > 0, "it must be positive")?;
        }
        match &self.feed_forward {
            FeedForward::None => Ok(()),
            FeedForward::Dense { width, cut } => {
                let cut = cut.unwrap_or(0.0);
                check("share of gates that are 0", cut, cut.is_finite(), "it must be below 1")?;
                check_size("feed-forward width", *width)
            }
            FeedForward::Experts(experts) => experts.validate(hidden),
        }
    }
}

impl Experts {
    fn validate(&self, hidden: usize) -> Result<(), ModelError> {
        let fits = self.count > 0 && self.count <= 65_536;
        check("expert count", self.count, fits, "it must be from 1 to 65536")?;
        let fits = self.used > 0 && self.used <= self.count.min(256);
        check(
            "experts per token",
            self.used,
            fits,
            "it must be from 1 to the expert count (at most 256)",
        )?;
        check_size("expert width", self.width)?;
        check_size("shared experts' width", self.shared_width.max(1))?;
        check(
            "experts per token",
            self.used,
            self.used == 1 || !self.scaled_input,
            "it must be 1 if inputs of experts are scaled",
        )?;
        check(
            "experts by token",
            true,
            !(self.by_token && (self.correction_bias || self.groups.is_some())),
            "forebay knows such tables without a correction bias and groups of experts",
        )?;
        check(
            "norms of experts",
            true,
            !(self.own_norms && self.scaled_input),
            "inputs are scaled",
        )?;
        if let Some(latent) = self.latent {
            let fits = (1..=hidden).contains(&latent.width);
            let expected = "from 1 to the hidden size";
            check("width of the space of experts", latent.width, fits, expected)?;
        }
        let is_other = self.latent.is_some() || self.output_norms || self.always > 0;
        check(
            "experts with a space, norms or shared experts of their own",
            true,
            !is_other || !(self.own_norms || self.scaled_input || self.bias || self.by_token),
            "forebay knows them with plain experts",
        )?;
        Ok(self.rule(None, None).check(self.count, self.used)?)
    }
}
