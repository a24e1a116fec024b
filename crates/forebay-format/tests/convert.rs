//! The two forms of the reference models hold the same weights after conversion.

mod common;

use common::fixtures;
use forebay_format::convert::{RowsTaken, mxfp4_blocks, transpose};
use forebay_format::{Catalog, TensorInfo, TensorType};

/// Model with the bytes of all its files.
struct Model {
    catalog: Catalog,
    files: Vec<Vec<u8>>,
}

impl Model {
    fn open(path: &std::path::Path) -> Model {
        let catalog = Catalog::open(path).unwrap();
        let files = catalog.files.iter().map(|file| std::fs::read(file).unwrap()).collect();
        Model { catalog, files }
    }

    fn tensor(&self, name: &str) -> (&TensorInfo, &[u8]) {
        let tensor = self.catalog.tensor(name).unwrap_or_else(|| panic!("no {name}"));
        let extent = tensor.extent;
        let file = &self.files[extent.file.0 as usize];
        (tensor, &file[extent.offset as usize..extent.end() as usize])
    }
}

/// Opens both forms of a model, if the reference data has them.
fn both(name: &str, gguf: &str) -> Option<(Model, Model)> {
    let (folder, file) = (fixtures("models")?.join(name), fixtures("gguf")?.join(name).join(gguf));
    // The small set of reference data has only some models.
    (folder.exists() && file.exists()).then(|| (Model::open(&folder), Model::open(&file)))
}

#[test]
fn gpt_oss_experts_become_those_of_the_gguf_form() {
    for gguf in ["gpt_oss-BF16.gguf", "gpt_oss-MXFP4_MOE.gguf"] {
        let Some((folder, file)) = both("gpt_oss", gguf) else { return };
        let layers = folder.catalog.hugging_face().unwrap().config["num_hidden_layers"].as_u64();
        let parts = [
            ("gate_up", "gate", RowsTaken { first: 0, step: 2 }),
            ("gate_up", "up", RowsTaken { first: 1, step: 2 }),
            ("down", "down", RowsTaken::ALL),
        ];
        for (layer, (from, to, taken)) in
            (0..layers.unwrap()).flat_map(|layer| parts.map(|part| (layer, part)))
        {
            let name = format!("model.layers.{layer}.mlp.experts.{from}_proj");
            let (blocks, block_bytes) = folder.tensor(&format!("{name}_blocks"));
            let (_, scales) = folder.tensor(&format!("{name}_scales"));
            let (expected, bytes) = file.tensor(&format!("blk.{layer}.ffn_{to}_exps.weight"));
            assert_eq!(expected.ty, TensorType::MXFP4);
            let (experts, row_blocks) = (blocks.shape[0] as usize, blocks.shape[2] as usize);
            let blocks = block_bytes.chunks_exact(block_bytes.len() / experts);
            let scales = scales.chunks_exact(scales.len() / experts);
            let expected = bytes.chunks_exact(bytes.len() / experts);
            for ((blocks, scales), expected) in blocks.zip(scales).zip(expected) {
                let mut out = vec![0; expected.len()];
                mxfp4_blocks(blocks, scales, row_blocks, taken, &mut out);
                assert!(out == expected, "{name} to {to}");
            }
        }
    }
}

#[test]
fn deepseek_keys_become_the_absorbed_form() {
    let Some((folder, file)) = both("deepseek_v3", "deepseek_v3-BF16.gguf") else { return };
    let config = &folder.catalog.hugging_face().unwrap().config;
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let (heads, nope) = (size("num_attention_heads"), size("qk_nope_head_dim"));
    let (value, latent) = (size("v_head_dim"), size("kv_lora_rank"));
    for layer in 0..size("num_hidden_layers") {
        let (_, from) = folder.tensor(&format!("model.layers.{layer}.self_attn.kv_b_proj.weight"));
        let (_, keys) = file.tensor(&format!("blk.{layer}.attn_k_b.weight"));
        let (_, values) = file.tensor(&format!("blk.{layer}.attn_v_b.weight"));
        let row = latent * 2;
        for head in 0..heads {
            let from = &from[head * (nope + value) * row..][..(nope + value) * row];
            let mut absorbed = vec![0; nope * row];
            transpose(&from[..nope * row], nope, latent, 2, &mut absorbed);
            assert!(absorbed == keys[head * nope * row..][..nope * row], "keys of head {head}");
            assert!(from[nope * row..] == values[head * value * row..][..value * row]);
        }
    }
}
