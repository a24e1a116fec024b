//! Tests models whose keys an indexer chooses: without a choice to make, they are the models without an indexer; and numbers
//! that make no sense are refused.

mod support;

use std::path::Path;

use forebay_engine::{Session, SessionOptions, inspect};
use serde_json::{Value, json};
use support::{changed, with_causes};

/// Returns the bits of the logits of a prompt, and of a shorter one token by token.
fn logits(folder: &Path, exact: bool) -> Vec<u32> {
    let options = SessionOptions { exact, context: Some(128), ..SessionOptions::default() };
    let mut session = Session::open(folder, &options, &mut |_, _| {}).unwrap();
    let ids: Vec<u32> = (0..90).map(|at| at * 37 % 500).collect();
    let mut logits = session.logits(&ids, None).unwrap();
    logits.extend(session.logits_one_by_one(&ids[..40]).unwrap());
    logits.into_iter().map(f32::to_bits).collect()
}

#[test]
fn without_a_choice_to_make_the_model_is_the_one_without_an_indexer() {
    for top_k in [90, 128, 4096] {
        let Some(all) = changed("deepseek_v32", |config| config["index_topk"] = json!(top_k))
        else {
            return;
        };
        let dense =
            changed("deepseek_v32", |config| config["model_type"] = json!("deepseek_v3")).unwrap();
        for exact in [true, false] {
            let same = logits(all.path(), exact) == logits(dense.path(), exact);
            assert!(same, "{top_k} keys, exact {exact}");
        }
    }
}

#[test]
fn a_choice_changes_the_logits() {
    let Some(few) = changed("deepseek_v32", |_| ()) else { return };
    let more = changed("deepseek_v32", |config| config["index_topk"] = json!(7)).unwrap();
    assert_ne!(logits(few.path(), true), logits(more.path(), true));
}

#[test]
fn without_a_choice_to_make_blocks_are_plain_attention() {
    let set = |config: &mut Value, key: &str, value: Value| {
        config["text_config"]["sparse_attention_config"][key] = value;
    };
    for blocks in [12, 500] {
        let all = changed("minimax_m3", |config| set(config, "sparse_topk_blocks", json!(blocks)));
        let Some(all) = all else { return };
        let none = json!([0, 0, 0]);
        let dense = changed("minimax_m3", |config| {
            set(config, "sparse_attention_freq", none.clone());
        });
        let dense = dense.unwrap();
        for exact in [true, false] {
            let same = logits(all.path(), exact) == logits(dense.path(), exact);
            assert!(same, "{blocks} blocks, exact {exact}");
        }
    }
    let few = changed("minimax_m3", |_| ()).unwrap();
    let more = changed("minimax_m3", |config| set(config, "sparse_topk_blocks", json!(4))).unwrap();
    let near = changed("minimax_m3", |config| set(config, "sparse_local_block", json!(2))).unwrap();
    let [few, more, near] = [few, more, near].map(|folder| logits(folder.path(), true));
    assert!(few != more && few != near && more != near);
}

#[test]
fn blocks_that_make_no_sense_are_refused() {
    for (key, value, named) in [
        ("sparse_num_index_heads", json!(0), "indexer heads"),
        // The keys of two key/value heads are chosen.
        ("sparse_num_index_heads", json!(4), "key/value head"),
        ("sparse_num_index_heads", json!(-1), "sparse_num_index_heads"),
        ("sparse_index_dim", json!(8), "indexer's heads"),
        ("sparse_index_dim", json!(64), "index_q_proj"),
        ("sparse_block_size", json!(0), "blocks"),
        ("sparse_block_size", json!(24), "blocks"),
        ("sparse_block_size", json!(256), "blocks"),
        ("sparse_block_size", json!(1_u64 << 63), "blocks"),
        ("sparse_topk_blocks", json!(0), "chooses"),
        ("sparse_topk_blocks", json!(1), "chooses"),
        ("sparse_topk_blocks", json!(u64::MAX), "chooses"),
        ("sparse_topk_blocks", Value::Null, "topk_blocks"),
        ("sparse_local_block", json!(0), "local"),
        ("sparse_local_block", json!(3), "chooses"),
        ("sparse_local_block", json!(u64::MAX), "chooses"),
        ("sparse_attention_freq", json!([0, 1]), "sparse_attention_freq"),
        ("sparse_attention_freq", json!([0, 1, 2]), "sparse_attention_freq"),
    ] {
        let copy = changed("minimax_m3", |config| {
            config["text_config"]["sparse_attention_config"][key] = value.clone();
        });
        let Some(copy) = copy else { return };
        let text = error_of(copy.path());
        assert!(text.contains(named), "{key} {value}: {text}");
    }
}

#[test]
fn pools_change_the_logits_as_long_as_there_is_a_choice() {
    let with = |top_k: usize, length: usize| {
        changed("glm5_next", |config| {
            config["text_config"]["index_topk"] = json!(top_k);
            config["text_config"]["index_kpool"] = json!(length);
        })
    };
    let Some(few) = with(16, 4) else { return };
    let [all, more, some] = [with(88, 4), with(4096, 4), with(24, 4)].map(|of| {
        let folder = of.unwrap();
        logits(folder.path(), true)
    });
    let few = logits(few.path(), true);
    // 90 positions are 22 pools, and two positions that are always seen.
    assert!(all == more, "88 and 4096 positions");
    assert!(few != all && few != some && some != all);
}

#[test]
fn pools_that_make_no_sense_are_refused() {
    for (key, value, named) in [
        ("index_n_heads", json!(0), "indexer heads"),
        ("index_head_dim", json!(0), "indexer's heads"),
        ("index_head_dim", json!(20), "indexer's heads"),
        ("index_head_dim", json!(32), "indexer"),
        ("index_topk", json!(0), "chooses"),
        ("index_topk", json!(3), "chooses"),
        ("index_topk", json!(u64::MAX), "chooses"),
        ("index_kpool", json!(0), "chooses"),
        ("index_kpool", json!(8), "index_kpool_compress_ape"),
        ("index_kpool", json!(65), "chooses"),
        ("index_kpool", Value::Null, "index_kpool"),
        ("index_kpool_always_select_tail", json!(false), "index_kpool_always_select_tail"),
        ("indexer_types", json!(["full", "full", "full", "shared"]), "indexer_types"),
        ("q_lora_rank", Value::Null, "low-rank"),
        ("mla_use_nope", json!(false), "mla_use_nope"),
        ("hc_mult", json!(0), "streams"),
    ] {
        let copy = changed("glm5_next", |config| config["text_config"][key] = value.clone());
        let Some(copy) = copy else { return };
        let text = error_of(copy.path());
        assert!(text.contains(named), "{key} {value}: {text}");
    }
    for (value, named) in [
        (json!(1.0), "gate_lower_bound"),
        (json!(-1e9), "gate_lower_bound"),
        (json!("fast"), "gate_lower_bound"),
    ] {
        let copy = changed("glm5_next", |config| {
            config["text_config"]["linear_attn_config"]["gate_lower_bound"] = value.clone();
        });
        let Some(copy) = copy else { return };
        let text = error_of(copy.path());
        assert!(text.contains(named), "{value}: {text}");
    }
}

/// Returns the error with which a folder is refused, with its causes; nothing if it opens.
fn error_of(folder: &Path) -> String {
    let opened = Session::open(folder, &SessionOptions::default(), &mut |_, _| {});
    let Some(error) = opened.err() else { return String::new() };
    with_causes(&error)
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let refused = |name: &str, key: &str, value: Value| {
        let copy = changed(name, |config| match value.clone() {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value,
        });
        let Some(copy) = copy else { return };
        let error = match inspect(copy.path()) {
            Ok(_) => Session::open(copy.path(), &SessionOptions::default(), &mut |_, _| {}).err(),
            Err(error) => Some(error),
        };
        assert!(error.is_some(), "{key} {value} was taken");
    };
    for key in ["index_topk", "index_n_heads", "index_head_dim"] {
        for value in [json!(0), json!(1_u64 << 40), json!(-1), json!("many"), Value::Null] {
            refused("deepseek_v32", key, value);
        }
    }
    // Less than what rotates, and not what the tensors have.
    refused("deepseek_v32", "index_head_dim", json!(16));
    refused("deepseek_v32", "index_head_dim", json!(128));
    refused("deepseek_v32", "q_lora_rank", Value::Null);
    refused("glm_moe_dsa", "indexer_types", json!(["full", "shared"]));
    refused("glm_moe_dsa", "index_topk_pattern", json!("FS"));
    refused("glm_moe_dsa", "index_topk_freq", json!(4));
}
