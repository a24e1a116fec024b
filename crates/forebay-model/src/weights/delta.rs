//! The weights of a recurrent layer.

use forebay_compute::DeltaColumns;
use forebay_format::Block;
use forebay_ops::{DeltaRule, HeadColumns};

use super::layer::LayerBuilder;
use super::parts::{DeltaParts, DeltaWeights, PartMatrix, SelectiveWeights};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{Naming, Recurrent};

/// The projections of a layer.
struct Projections {
    products: Vec<PartMatrix>,
    second: Vec<(PartMatrix, usize)>,
    parts: DeltaParts,
    columns: DeltaColumns,
    /// Factors of the columns of the first product.
    factors: Option<Vec<f32>>,
    selective: Option<Box<SelectiveWeights>>,
}

fn columns(first: usize, step: usize) -> HeadColumns {
    HeadColumns { first, step }
}

/// Returns where a file has a channel of the convolution. Channels are queries, keys, values; files of Mamba-2 have values, keys,
/// queries.
fn stored_channel(shape: &Recurrent, channel: usize) -> usize {
    let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
    match shape.rule {
        DeltaRule::GatedDelta
        | DeltaRule::KimiDelta
        | DeltaRule::Mamba
        | DeltaRule::Lightning
        | DeltaRule::ShortConvolution => channel,
        DeltaRule::Mamba2 if channel < keys => values + keys + channel,
        DeltaRule::Mamba2 if channel < 2 * keys => values + channel - keys,
        DeltaRule::Mamba2 => channel - 2 * keys,
    }
}

/// Returns the factor of each column of Mamba-2's projection, if they are not all 1.
fn factors_of_columns(shape: &Recurrent) -> Option<Vec<f32>> {
    let factors = shape.factors.inputs;
    let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
    let widths = [values, values, keys, keys, shape.value_heads];
    let of_parts = factors.into_iter().zip(widths);
    let all = of_parts.flat_map(|(factor, width)| std::iter::repeat_n(factor, width));
    (factors != [1.0; 5]).then(|| all.collect())
}

impl LayerBuilder<'_> {
    /// Adds the output projection of a recurrent layer to the dense block.
    pub(super) fn delta_output(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
    ) -> Result<PartMatrix, ModelError> {
        let width = self.architecture.recurrent.map_or(0, |of| of.value_width());
        self.matrix(tensors, dense, "delta_o", self.architecture.hidden, width)
    }

    /// Adds the projections of a recurrent layer to the dense block, and reads its vectors.
    pub(super) fn recurrence(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<DeltaWeights, ModelError> {
        let shape = self.architecture.recurrent.as_ref();
        let shape = shape.expect("descriptions of such layers are checked");
        let projections = match shape.rule {
            DeltaRule::GatedDelta => self.gated_delta(tensors, dense, shape)?,
            DeltaRule::KimiDelta => self.kimi_delta(tensors, dense, shape)?,
            DeltaRule::Mamba2 => self.mamba2(tensors, dense, shape)?,
            DeltaRule::Mamba => self.mamba(tensors, dense, shape)?,
            DeltaRule::Lightning => self.lightning(tensors, dense, shape)?,
            DeltaRule::ShortConvolution => self.short_convolution(tensors, dense, shape)?,
        };
        let Projections { products, second, parts, columns, factors, selective } = projections;
        let weights = DeltaWeights {
            products,
            second,
            parts,
            columns,
            factors,
            selective,
            convolution: match shape.rule {
                // Values pass through as they are.
                DeltaRule::Lightning => vec![1.0; shape.channels()],
                _ => self.convolution(tensors, shape)?,
            },
            convolution_bias: None,
            decay: Vec::new(),
            step: Vec::new(),
            skip: None,
            norm: Vec::new(),
        };
        match shape.rule {
            DeltaRule::ShortConvolution => return Ok(weights),
            DeltaRule::Lightning => {
                let decay = shape.lightning_decays(self.index, self.architecture.main_layers());
                let norm = tensors.vector(&self.name("delta_norm"), shape.value_width())?;
                return Ok(DeltaWeights { decay, norm, ..weights });
            }
            _ => {}
        }
        let is_mamba = matches!(shape.rule, DeltaRule::Mamba | DeltaRule::Mamba2);
        // Numbers of rates, of steps, and of factors of values.
        let [rates, steps, skips] = match shape.rule {
            DeltaRule::Mamba => [shape.matrix_floats(), shape.value_width(), shape.value_width()],
            _ => [shape.value_heads, shape.value_heads * shape.decay_width(), shape.value_heads],
        };
        let mut decay = tensors.flat_vector(&self.name("delta_decay"), rates)?;
        match self.architecture.naming {
            // The logarithm of the rate. GGUF files hold the rate itself.
            Naming::HuggingFace { .. } => decay.iter_mut().for_each(|rate| *rate = -rate.exp()),
            Naming::Gguf if self.names.has_positive_rates() => {
                decay.iter_mut().for_each(|rate| *rate = -*rate);
            }
            Naming::Gguf => {}
        }
        Ok(DeltaWeights {
            convolution_bias: tensors
                .optional_vector(&self.name("delta_convolution_bias"), shape.channels())?
                .map(|stored| {
                    let bias = |channel| stored[stored_channel(shape, channel)];
                    (0..stored.len()).map(bias).collect()
                }),
            decay,
            step: tensors.vector(&self.name("delta_step"), steps)?,
            skip: match is_mamba {
                true => Some(tensors.flat_vector(&self.name("delta_skip"), skips)?),
                false => None,
            },
            norm: match is_mamba {
                true if shape.norm_width == 0 => Vec::new(),
                true => tensors.flat_vector(&self.name("delta_norm"), shape.value_width())?,
                false => tensors.vector(&self.name("delta_norm"), shape.value_dim)?,
            },
            ..weights
        })
    }

    /// Reads the weights of the convolution. Files hold them by channel, in one tensor or in three.
    fn convolution(
        &self,
        tensors: &mut Tensors<'_>,
        shape: &Recurrent,
    ) -> Result<Vec<f32>, ModelError> {
        let (channels, width) = (shape.channels(), shape.convolution);
        let keys = shape.key_heads * shape.key_dim;
        let all = [("delta_convolution", channels)];
        let mut apart = [
            ("delta_convolution_q", keys),
            ("delta_convolution_k", keys),
            ("delta_convolution_v", shape.value_width()),
        ];
        let is_apart = match shape.rule {
            DeltaRule::KimiDelta => true,
            DeltaRule::GatedDelta => tensors.optional(&self.name(apart[0].0)).is_some(),
            _ => false,
        };
        // Transformers 5 joins the three and writes them as equal parts, which do not end where queries and keys do.
        let rows = |role: &str| {
            let shape = &tensors.optional(&self.name(role))?.shape;
            shape.first().and_then(|rows| usize::try_from(*rows).ok())
        };
        if let [Some(q), Some(k), Some(v)] = apart.map(|(role, _)| rows(role))
            && q.checked_add(k).and_then(|rows| rows.checked_add(v)) == Some(channels)
        {
            apart.iter_mut().zip([q, k, v]).for_each(|(of, rows)| of.1 = rows);
        }
        let tensors_of: &[(&str, usize)] = if is_apart { &apart } else { &all };
        let mut by_channel = Vec::with_capacity(channels * width);
        for (role, channels) in tensors_of {
            by_channel.extend(tensors.convolution(&self.name(role), *channels, width)?);
        }
        let at = |index: usize| {
            let channel = stored_channel(shape, index % channels);
            by_channel[channel * width + index / channels]
        };
        Ok((0..width * channels).map(at).collect())
    }

    /// Adds the projection of a gated short convolution: factors of the values, factors of the output, values.
    fn short_convolution(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let (hidden, width) = (self.architecture.hidden, shape.value_width());
        let all = self.matrix(tensors, dense, "delta_in", 3 * width, hidden)?;
        let [b, z, v] = [0, 1, 2].map(|part| columns(part * width, width));
        Ok(Projections {
            products: vec![all],
            second: Vec::new(),
            parts: DeltaParts { q: 0, k: 0, v: 0, z: 0, b: 0, a: 0 },
            columns: DeltaColumns { q: v, k: v, v, z, b, a: b },
            factors: None,
            selective: None,
        })
    }

    /// Adds the projections of lightning attention: query, key and value of each head, then gates.
    fn lightning(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let (hidden, width, dim) = (self.architecture.hidden, shape.value_width(), shape.value_dim);
        let qkv = self.matrix(tensors, dense, "delta_qkv", 3 * width, hidden)?;
        let gates = self.matrix(tensors, dense, "delta_z", width, hidden)?;
        let [q, k, v] = [0, 1, 2].map(|part| columns(part * dim, 3 * dim));
        let z = columns(0, dim);
        Ok(Projections {
            products: vec![qkv, gates],
            second: Vec::new(),
            parts: DeltaParts { q: 0, k: 0, v: 0, z: 1, b: 1, a: 1 },
            // There are no shares and no steps.
            columns: DeltaColumns { q, k, v, z, b: z, a: z },
            factors: None,
            selective: None,
        })
    }

    /// Adds the projections of Mamba: values and gates, then compressed steps, keys and queries of what the convolution gives, then
    /// steps. Its papers call the last three dt, B and C.
    fn mamba(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let (hidden, values) = (self.architecture.hidden, shape.value_width());
        let (rank, dim) = (shape.low_rank, shape.key_dim);
        let mut matrix =
            |role: &str, rows: usize, cols: usize| self.matrix(tensors, dense, role, rows, cols);
        let both = matrix("delta_in", 2 * values, hidden)?;
        let compressed = matrix("delta_compressed", shape.compressed_width(), values)?;
        let steps = matrix("delta_steps", values, rank)?;
        let roles = [("delta_steps_norm", rank), ("delta_k_norm", dim), ("delta_q_norm", dim)];
        let norms = match tensors.optional(&self.name(roles[0].0)) {
            None => None,
            Some(_) => {
                let [a, k, q] = roles.map(|(role, length)| tensors.norm(&self.name(role), length));
                Some([a?, k?, q?])
            }
        };
        Ok(Projections {
            products: vec![both],
            second: Vec::new(),
            parts: DeltaParts { q: 1, k: 1, v: 0, z: 0, b: 2, a: 2 },
            columns: DeltaColumns {
                q: columns(rank + dim, dim),
                k: columns(rank, dim),
                v: columns(0, values),
                z: columns(values, values),
                // There are no shares.
                b: columns(0, values),
                a: columns(0, values),
            },
            factors: None,
            selective: Some(Box::new(SelectiveWeights { compressed, steps, norms })),
        })
    }

    /// Adds the projection of Mamba-2: gates, values, keys, queries and steps in this order. Its papers call the last four x, B, C
    /// and dt.
    fn mamba2(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let per_key = shape.value_heads / shape.key_heads;
        let of_values = per_key * shape.value_dim;
        let rows = 2 * values + 2 * keys + shape.value_heads;
        let all = self.matrix(tensors, dense, "delta_in", rows, self.architecture.hidden)?;
        let steps = columns(2 * values + 2 * keys, per_key);
        Ok(Projections {
            products: vec![all],
            second: Vec::new(),
            parts: DeltaParts { q: 0, k: 0, v: 0, z: 0, b: 0, a: 0 },
            columns: DeltaColumns {
                q: columns(2 * values + keys, shape.key_dim),
                k: columns(2 * values, shape.key_dim),
                v: columns(values, of_values),
                z: columns(0, of_values),
                // There are no shares.
                b: steps,
                a: steps,
            },
            factors: factors_of_columns(shape),
            selective: None,
        })
    }

    /// Adds the projections of the gated delta rule. Files hold queries, keys, values and gates in one matrix, ordered by key
    /// head, in two, or in four. The same holds for the shares of replacement and steps.
    fn gated_delta(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let hidden = self.architecture.hidden;
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let (heads, per_key) = (shape.value_heads, shape.value_heads / shape.key_heads);
        let (dim, of_values) = (shape.key_dim, per_key * shape.value_dim);
        let has = |role: &str| tensors.has_matrix(&self.name(role));
        let mut products = Vec::new();
        let mut add = |role: &str, rows: usize| {
            products.push(self.matrix(tensors, dense, role, rows, hidden)?);
            Ok::<_, ModelError>(products.len() - 1)
        };
        let ([q, k, v, z], [q_at, k_at, v_at, z_at]) = if has("delta_qkvz") {
            let all = add("delta_qkvz", 2 * (keys + values))?;
            let step = 2 * (dim + of_values);
            let first = [0, dim, 2 * dim, 2 * dim + of_values];
            ([all; 4], first.map(|first| columns(first, step)))
        } else if has("delta_q") {
            let rows = [("delta_q", keys), ("delta_k", keys), ("delta_v", values)];
            let [q, k, v] = rows.map(|(role, rows)| add(role, rows));
            let (z, [of_key, of_value]) =
                (add("delta_z", values), [dim, of_values].map(|step| columns(0, step)));
            ([q?, k?, v?, z?], [of_key, of_key, of_value, of_value])
        } else {
            let (qkv, z) = (add("delta_qkv", 2 * keys + values)?, add("delta_z", values)?);
            let [q, k] = [0, keys].map(|first| columns(first, dim));
            ([qkv, qkv, qkv, z], [q, k, columns(2 * keys, of_values), columns(0, of_values)])
        };
        let (b, a, [b_at, a_at]) = if has("delta_ba") {
            let both = add("delta_ba", 2 * heads)?;
            (both, both, [0, per_key].map(|first| columns(first, 2 * per_key)))
        } else {
            (add("delta_b", heads)?, add("delta_a", heads)?, [columns(0, per_key); 2])
        };
        Ok(Projections {
            products,
            second: Vec::new(),
            parts: DeltaParts { q, k, v, z, b, a },
            columns: DeltaColumns { q: q_at, k: k_at, v: v_at, z: z_at, b: b_at, a: a_at },
            factors: None,
            selective: None,
        })
    }

    /// Adds the projections of Kimi Delta Attention. Decays and gates pass through a low rank if there is one.
    fn kimi_delta(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<Projections, ModelError> {
        let (hidden, heads) = (self.architecture.hidden, shape.value_heads);
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let decays = heads * shape.decay_width();
        let mut matrix =
            |role: &str, rows: usize, cols: usize| self.matrix(tensors, dense, role, rows, cols);
        let mut products = vec![
            matrix("q", keys, hidden)?,
            matrix("k", keys, hidden)?,
            matrix("v", values, hidden)?,
            matrix("delta_b", heads, hidden)?,
        ];
        // Projections to decays and to gates: one matrix, or two with a low rank between them.
        let projections = [
            (["delta_f", "delta_f_a", "delta_f_b"], shape.low_rank, decays),
            (["delta_g", "delta_g_a", "delta_g_b"], shape.gate_rank, values),
        ];
        let mut places = [0; 2];
        for (place, ([whole, first, _], rank, rows)) in places.iter_mut().zip(projections) {
            *place = products.len();
            products.push(match rank {
                0 => matrix(whole, rows, hidden)?,
                _ => matrix(first, rank, hidden)?,
            });
        }
        let mut second = Vec::new();
        for (place, ([.., last], rank, rows)) in places.iter_mut().zip(projections) {
            if rank > 0 {
                second.push((matrix(last, rows, rank)?, *place));
                *place = products.len() + second.len() - 1;
            }
        }
        let [a, z] = places;
        let per_key = heads / shape.key_heads;
        let of_values = columns(0, per_key * shape.value_dim);
        Ok(Projections {
            products,
            second,
            parts: DeltaParts { q: 0, k: 1, v: 2, b: 3, a, z },
            columns: DeltaColumns {
                q: columns(0, shape.key_dim),
                k: columns(0, shape.key_dim),
                v: of_values,
                z: of_values,
                b: columns(0, per_key),
                a: columns(0, per_key * shape.decay_width()),
            },
            factors: None,
            selective: None,
        })
    }
}
