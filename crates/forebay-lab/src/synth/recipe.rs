//! Chooses the type of each tensor. The mixes follow llama-quantize for the same file types, so sizes and speeds match
//! published files.

use forebay_format::TensorType;

use super::shapes::{FeedForward, Shape};

/// Function of a matrix in the model, as far as the mixes distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Embedding,
    Output,
    Query,
    Key,
    Value,
    AttentionOutput,
    GateOrUp,
    Down,
    /// All other matrices, which get the base type.
    Other,
}

/// A named quantisation: one type for all matrices, or a mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub name: &'static str,
    /// Value of `general.file_type`.
    pub file_type: u32,
    base: TensorType,
    mix: Mix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    Uniform,
    Q2K,
    Q3KM,
    Q4KM,
    Q5KM,
    /// Experts get the base type; everything else gets Q8_0.
    ExpertsOnly,
}

const MIXES: [Recipe; 5] = [
    Recipe { name: "Q2_K", file_type: 10, base: TensorType::Q2_K, mix: Mix::Q2K },
    Recipe { name: "Q3_K_M", file_type: 12, base: TensorType::Q3_K, mix: Mix::Q3KM },
    Recipe { name: "Q4_K_M", file_type: 15, base: TensorType::Q4_K, mix: Mix::Q4KM },
    Recipe { name: "Q5_K_M", file_type: 17, base: TensorType::Q5_K, mix: Mix::Q5KM },
    Recipe { name: "MXFP4_MOE", file_type: 38, base: TensorType::MXFP4, mix: Mix::ExpertsOnly },
];

impl Recipe {
    /// Returns the mix with this name, or a recipe that uses the type with this name for every matrix.
    pub fn find(name: &str) -> Option<Self> {
        if let Some(mix) = MIXES.iter().find(|mix| mix.name.eq_ignore_ascii_case(name)) {
            return Some(*mix);
        }
        let base = TensorType::all().iter().find(|ty| ty.name().eq_ignore_ascii_case(name))?;
        let file_type = uniform_file_type(*base)?;
        Some(Self { name: base.name(), file_type, base: *base, mix: Mix::Uniform })
    }

    /// Returns every name that [`find`](Self::find) knows.
    pub fn names() -> Vec<&'static str> {
        let uniform = TensorType::all().iter().filter(|ty| uniform_file_type(**ty).is_some());
        let mut names: Vec<_> = MIXES.iter().map(|mix| mix.name).collect();
        names.extend(uniform.map(|ty| ty.name()).filter(|name| *name != "Q2_K"));
        names
    }

    /// Returns the type of a tensor `[.., rows, columns]` in layer `layer` of `layers`.
    pub fn type_of(
        &self,
        role: Role,
        shape: &Shape,
        layer: u32,
        layers: u32,
        dimensions: &[u64],
    ) -> TensorType {
        let columns = dimensions.last().copied().unwrap_or_default();
        let wanted = match self.mix {
            Mix::Uniform => self.base,
            Mix::ExpertsOnly if is_expert(role, dimensions) => self.base,
            Mix::ExpertsOnly => TensorType::Q8_0,
            _ => self.wanted(role, shape, layer, layers),
        };
        if columns.is_multiple_of(wanted.block_elements() as u64) {
            wanted
        } else {
            narrower(wanted, columns)
        }
    }

    fn wanted(&self, role: Role, shape: &Shape, layer: u32, layers: u32) -> TensorType {
        use TensorType::{Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
        let few_experts = match shape.feed_forward {
            FeedForward::Dense { .. } => false,
            FeedForward::Experts(experts) => experts.experts == 8,
        };
        let shared_heads = shape.heads / shape.kv_heads >= 4;
        let favoured = favoured(layer, layers);
        match (role, self.mix) {
            (Role::Output, _) => Q6_K,
            (Role::Embedding, _) if shape.tied => Q6_K,
            // These matrices are small beside eight experts, so precision is nearly free.
            (Role::Key | Role::Value, _) if few_experts => Q8_0,
            (Role::Value, Mix::Q2K) => {
                if shared_heads {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            (Role::Value, Mix::Q3KM) => {
                if layer < 2 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            (Role::Value | Role::Down, Mix::Q4KM | Mix::Q5KM) if favoured => Q6_K,
            // In the largest llama eight query heads share a value head, so the value matrices are small.
            (Role::Value, Mix::Q4KM) if shape.architecture == "llama" && layers == 80 => Q5_K,
            (Role::AttentionOutput, Mix::Q2K | Mix::Q3KM | Mix::Q4KM) if few_experts => Q5_K,
            (Role::AttentionOutput | Role::Down, Mix::Q2K) => Q3_K,
            (Role::AttentionOutput, Mix::Q3KM) => Q4_K,
            (Role::Down, Mix::Q3KM) => {
                if layer < layers / 16 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            _ => self.base,
        }
    }
}

/// Returns true for the stacks of experts. Latent attention has stacks, too.
fn is_expert(role: Role, dimensions: &[u64]) -> bool {
    dimensions.len() > 2 && matches!(role, Role::GateOrUp | Role::Down)
}

/// Returns true for the layers that get more bits: the first and last eighth, and every third between.
fn favoured(layer: u32, layers: u32) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Returns the type that llama-quantize takes if rows are not a multiple of the block.
fn narrower(ty: TensorType, columns: u64) -> TensorType {
    let narrower = match ty {
        TensorType::Q4_K => TensorType::Q5_0,
        TensorType::Q5_K => TensorType::Q5_1,
        TensorType::Q6_K => TensorType::Q8_0,
        TensorType::Q2_K | TensorType::Q3_K | TensorType::TQ1_0 | TensorType::TQ2_0 => {
            TensorType::Q4_0
        }
        _ => TensorType::IQ4_NL,
    };
    if columns.is_multiple_of(narrower.block_elements() as u64) {
        narrower
    } else {
        TensorType::F16
    }
}

/// Returns the `general.file_type` of a file whose matrices all have this type; `None` for types that cannot hold
/// weights.
fn uniform_file_type(ty: TensorType) -> Option<u32> {
    Some(match ty {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q8_0 => 7,
        TensorType::Q5_0 => 8,
        TensorType::Q5_1 => 9,
        TensorType::Q2_K => 10,
        TensorType::Q3_K => 11,
        TensorType::Q4_K => 14,
        TensorType::Q5_K => 16,
        TensorType::Q6_K => 18,
        TensorType::IQ2_XXS => 19,
        TensorType::IQ2_XS => 20,
        TensorType::IQ3_XXS => 23,
        TensorType::IQ1_S => 24,
        TensorType::IQ4_NL => 25,
        TensorType::IQ3_S => 26,
        TensorType::IQ2_S => 28,
        TensorType::IQ4_XS => 30,
        TensorType::IQ1_M => 31,
        TensorType::BF16 => 32,
        TensorType::TQ1_0 => 36,
        TensorType::TQ2_0 => 37,
        TensorType::MXFP4 => 38,
        TensorType::NVFP4 => 39,
        TensorType::Q1_0 => 40,
        TensorType::Q2_0 => 41,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::known::find;
    use super::*;

    fn type_of(recipe: &str, shape: &str, role: Role, layer: u32) -> TensorType {
        let (recipe, shape) = (Recipe::find(recipe).unwrap(), find(shape).unwrap());
        recipe.type_of(role, shape, layer, shape.layers, &[64, 4096])
    }

    #[test]
    fn q4_k_m_favours_some_layers() {
        let with_more: Vec<u32> = (0..48)
            .filter(|layer| {
                type_of("Q4_K_M", "qwen3moe-30b", Role::Down, *layer) == TensorType::Q6_K
            })
            .collect();
        let expected: Vec<u32> = (0..6).chain((8..42).step_by(3)).chain(42..48).collect();
        assert_eq!(with_more, expected);
        assert_eq!(type_of("Q4_K_M", "qwen3moe-30b", Role::GateOrUp, 0), TensorType::Q4_K);
        assert_eq!(type_of("q4_k_m", "qwen3moe-30b", Role::Output, 0), TensorType::Q6_K);
        assert_eq!(type_of("Q4_K_M", "qwen3moe-30b", Role::Embedding, 0), TensorType::Q4_K);
        assert_eq!(type_of("Q4_K_M", "llama-1b", Role::Embedding, 0), TensorType::Q6_K);
        assert_eq!(type_of("Q4_K_M", "mixtral-8x7b", Role::Key, 5), TensorType::Q8_0);
        assert_eq!(type_of("Q4_K_M", "llama-70b", Role::Value, 10), TensorType::Q5_K);
    }

    #[test]
    fn every_name_is_found_and_unknown_ones_are_not() {
        for name in Recipe::names() {
            assert_eq!(Recipe::find(name).map(|recipe| recipe.name), Some(name));
        }
        assert_eq!(Recipe::find("Q9_Z"), None);
        assert_eq!(Recipe::find("I32"), None);
    }

    #[test]
    fn rows_that_do_not_fit_get_smaller_blocks() {
        let recipe = Recipe::find("Q4_K").unwrap();
        let shape = find("llama-8b").unwrap();
        assert_eq!(recipe.type_of(Role::Down, shape, 0, 32, &[8, 96]), TensorType::Q5_0);
        assert_eq!(recipe.type_of(Role::Down, shape, 0, 32, &[8, 97]), TensorType::F16);
        // gpt-oss: its experts, and its other matrices.
        let (recipe, shape) = (Recipe::find("MXFP4_MOE").unwrap(), find("gpt-oss-20b").unwrap());
        let experts = [32, 2880, 2880];
        assert_eq!(recipe.type_of(Role::Down, shape, 0, 24, &experts), TensorType::MXFP4);
        assert_eq!(recipe.type_of(Role::Query, shape, 0, 24, &experts[1..]), TensorType::Q8_0);
    }
}
