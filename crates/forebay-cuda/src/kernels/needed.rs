//! The modules that the passes of a model need, so that they can be loaded before the first pass.

use forebay_format::TensorType;

use super::attention::attention_modules;
use super::attention_inputs::inputs_module;
use super::kv::KvLayerShape;
use super::router::router_modules;
use super::weights::modules_of;

/// Properties of a model that decide which kernels run.
#[derive(Clone, Copy, Debug)]
pub struct ModelKernels<'a> {
    /// Types of all matrices except routers, without duplicates.
    pub types: &'a [TensorType],
    pub embedding: TensorType,
    /// Shapes of the layers that keep keys and values, all of one element type.
    pub kv: &'a [KvLayerShape],
    /// Type of the routers' matrices and number of experts, if there are routers.
    pub router: Option<(TensorType, usize)>,
    /// True if everything is computed in f32.
    pub exact: bool,
}

/// Returns the modules, without duplicates, for [`crate::Gpu::load_modules`]. Passes of several decode rows and rare
/// shapes need other modules, which are loaded with their first launch.
pub fn modules_needed(model: &ModelKernels<'_>) -> Vec<&'static str> {
    let mut needed = vec!["norm", "elementwise", "top_k", modules_of(model.embedding).embedding];
    for shape in model.kv {
        needed.push(inputs_module(shape.element));
        needed.extend(attention_modules(shape));
    }
    if let Some((ty, experts)) = model.router {
        let (few, many) = router_modules(ty, experts);
        let modules = modules_of(ty);
        needed.extend(many);
        if model.exact {
            needed.push(modules.exact);
        } else {
            needed.extend([few.unwrap_or(modules.matvec), modules.matmul.unwrap_or(modules.exact)]);
        }
    }
    for &ty in model.types {
        let modules = modules_of(ty);
        if model.exact {
            needed.push(modules.exact);
        } else {
            needed.extend([modules.matvec, modules.matmul.unwrap_or(modules.exact)]);
        }
    }
    if !model.exact {
        needed.extend(["quantize", "narrow"]);
    }
    needed.sort_unstable();
    needed.dedup();
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_ops::KvType;

    #[test]
    fn only_what_the_types_need_is_named_and_it_exists() {
        let all = TensorType::all().iter().copied().filter(|&ty| crate::supports_weights(ty));
        let types: Vec<TensorType> = all.collect();
        for element in [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0] {
            for dim in [64, 80, 96, 128, 256, 576, 1088] {
                let kv = KvLayerShape::new(element, 2, (dim, dim), 9);
                for exact in [false, true] {
                    let (embedding, router) = (TensorType::Q4_K, Some((TensorType::F32, 200)));
                    let model = ModelKernels { types: &types, embedding, kv: &[kv], router, exact };
                    for module in modules_needed(&model) {
                        assert!(crate::ptx::has(module), "{module}");
                    }
                    let few = ModelKernels { types: &[TensorType::Q4_K], ..model };
                    assert!(modules_needed(&few).len() <= 15, "{:?}", modules_needed(&few));
                }
            }
        }
    }
}
