//! Tests what keys of GGUF metadata mean for rotations and windows: equal meanings give equal descriptions, whatever the keys are
//! called, and other meanings give others.

#[path = "support/gguf_file.rs"]
mod gguf_file;
mod support;

use forebay_compute::RopeScaling;
use forebay_format::{Array, Value};
use forebay_model::Architecture;
use gguf_file::{GgufFile, words};

/// Returns a model of random numbers. That of a family with experts has some in name only.
fn model(architecture: &str, layers: u32) -> GgufFile {
    let mut file = GgufFile::random(architecture, layers);
    if architecture == "gpt-oss" {
        file.set("expert_count", 4u32);
        file.set("expert_used_count", 2u32);
    }
    file
}

fn described(file: &GgufFile) -> Architecture {
    file.described().unwrap()
}

fn scaling(file: &GgufFile) -> RopeScaling {
    described(file).ropes[0].scaling
}

/// How a file may give the factor: its key, and the type of scaling.
const KEYS: [&str; 2] = ["rope.scaling.factor", "rope.scale_linear"];
const TYPES: [Option<&str>; 4] = [None, Some("linear"), Some("none"), Some("yarn")];

#[test]
fn a_factor_means_the_same_under_every_key_and_without_a_type() {
    for architecture in ["llama", "qwen3", "gemma3", "gpt-oss", "qwen2"] {
        let plain = model(architecture, 2);
        let of = |key: &str, kind: Option<&str>, factor: Value| {
            let mut file = plain.with(key, factor);
            if let Some(kind) = kind {
                file.set("rope.scaling.type", kind);
            }
            file
        };
        let without = described(&plain);
        for key in KEYS {
            for kind in TYPES {
                for factor in [Value::F32(0.0), Value::F32(1.0), Value::U32(1), Value::F64(0.0)] {
                    let file = of(key, kind, factor.clone());
                    assert_eq!(
                        words(&described(&file)),
                        words(&without),
                        "{architecture}: {key} {kind:?} {factor:?}"
                    );
                }
                for factor in [Value::F32(4.0), Value::F64(4.0), Value::U32(4), Value::I32(4)] {
                    let found = scaling(&of(key, kind, factor.clone()));
                    let expected = match kind {
                        None | Some("linear") => RopeScaling::Linear { factor: 4.0 },
                        Some("none") => RopeScaling::None,
                        _ => RopeScaling::Yarn {
                            factor: 4.0,
                            original_context: 512.0,
                            beta_fast: 32.0,
                            beta_slow: 1.0,
                            truncate: true,
                            magnitude: None,
                        },
                    };
                    assert_eq!(found, expected, "{architecture}: {key} {kind:?} {factor:?}");
                }
            }
        }
        // The new key decides.
        let both =
            of("rope.scaling.factor", None, Value::F32(2.0)).with("rope.scale_linear", 8.0f32);
        assert_eq!(scaling(&both), RopeScaling::Linear { factor: 2.0 });
    }
}

#[test]
fn linear_factors_change_the_logits_alike() {
    let plain = GgufFile::random("llama", 2);
    let logits = |file: &GgufFile| file.logits().unwrap();
    let linear =
        logits(&plain.with("rope.scaling.factor", 4.0f32).with("rope.scaling.type", "linear"));
    assert_eq!(logits(&plain.with("rope.scaling.factor", 4.0f32)), linear);
    assert_eq!(logits(&plain.with("rope.scale_linear", 4.0f32)), linear);
    assert_ne!(logits(&plain), linear);
    let none = plain.with("rope.scaling.factor", 0.0f32).with("rope.scaling.type", "linear");
    assert_eq!(logits(&none), logits(&plain));
}

#[test]
fn yarn_has_the_magnitude_that_the_file_says() {
    let plain = GgufFile::random("llama", 2);
    let yarn = plain.with("rope.scaling.factor", 4.0f32).with("rope.scaling.type", "yarn");
    let magnitude = |file: &GgufFile| match scaling(file) {
        RopeScaling::Yarn { magnitude, .. } => magnitude,
        other => panic!("{other:?}"),
    };
    let usual = 1.0 + 0.1 * 4f64.ln();
    let with = |factor: f32| yarn.with("rope.scaling.attn_factor", factor);
    for same in [0.0, 1.0, usual as f32] {
        assert_eq!(magnitude(&with(same)), None, "{same}");
    }
    for factor in [0.5, 0.87, 2.0] {
        let found = magnitude(&with(factor)).unwrap();
        assert!((found - usual * f64::from(factor)).abs() < 1e-9, "{factor}: {found}");
    }
    assert_ne!(with(0.5).logits().unwrap(), yarn.logits().unwrap());
    for (key, value) in [
        ("rope.scaling.yarn_attn_factor", 0.5f32),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.alpha", 1000.0),
    ] {
        let error = yarn.with(key, value).described().unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
    // A magnitude without YaRN is another model.
    let error = plain.with("rope.scaling.attn_factor", 0.5f32).described().unwrap_err().to_string();
    assert!(error.contains("rope.scaling.attn_factor"), "{error}");
    let original = yarn.with("rope.scaling.original_context_length", 128u32);
    assert!(matches!(scaling(&original), RopeScaling::Yarn { original_context: 128.0, .. }));
}

#[test]
fn ollamas_names_of_both_bases_are_read() {
    let plain = GgufFile::random("gemma3", 6).with("attention.sliding_window", 8u32);
    let thetas = |file: &GgufFile| -> Vec<f64> {
        described(file).ropes.iter().map(|rope| rope.theta).collect()
    };
    let usual = plain.with("rope.freq_base", 1e6f32).with("rope.freq_base_swa", 2e4f32);
    let other = plain.with("rope.global.freq_base", 1e6f32).with("rope.local.freq_base", 2e4f32);
    assert_eq!(thetas(&usual), [1e6, 2e4]);
    assert_eq!(thetas(&other), thetas(&usual));
}

/// Returns the layers without a window.
fn full(file: &GgufFile) -> Vec<usize> {
    let layers = described(file).layers;
    (0..layers.len()).filter(|layer| layers[*layer].window.is_none()).collect()
}

#[test]
fn window_patterns_are_numbers_or_lists() {
    const KEY: &str = "attention.sliding_window_pattern";
    for (architecture, usual) in [("gemma3", 6), ("gpt-oss", 2), ("olmo2", 4), ("gemma2", 2)] {
        let plain = model(architecture, 8).with("attention.sliding_window", 8u32);
        let every = |period: usize| -> Vec<usize> {
            (0..8).filter(|layer| period > 0 && (layer + 1) % period == 0).collect()
        };
        assert_eq!(full(&plain), every(usual), "{architecture}");
        for period in 0..=9usize {
            let number = period as u32;
            for value in [Value::U32(number), Value::I32(number as i32), Value::U64(number.into())]
            {
                assert_eq!(
                    full(&plain.with(KEY, value)),
                    every(period),
                    "{architecture}: {period}"
                );
            }
            let flags: Vec<bool> = (0..8).map(|layer| !every(period).contains(&layer)).collect();
            let numbers: Vec<u32> = flags.iter().map(|flag| u32::from(*flag)).collect();
            let signed: Vec<i32> = numbers.iter().map(|number| *number as i32).collect();
            for list in [Array::Bool(flags), Array::U32(numbers), Array::I32(signed)] {
                let file = plain.with(KEY, list);
                assert_eq!(full(&file), every(period), "{architecture}: {period}");
            }
        }
        for wrong in [
            Value::from(Array::Bool(vec![true; 7])),
            Value::from(Vec::<u32>::new()),
            Value::F32(2.0),
            Value::from("2"),
        ] {
            let error = plain.with(KEY, wrong).described().unwrap_err().to_string();
            assert!(error.contains(KEY), "{architecture}: {error}");
        }
    }
    // Mistral's files do not carry windows. One that would have an effect is refused.
    let mistral = GgufFile::random("mistral", 2);
    let error = mistral.with("attention.sliding_window", 8u32).described().unwrap_err().to_string();
    assert!(error.contains("attention.sliding_window"), "{error}");
    assert_eq!(full(&mistral.with("attention.sliding_window", 4096u32)), [0, 1]);
    // Gemma 2's first files do not say the window.
    let gemma = GgufFile::random("gemma2", 4);
    assert_eq!(described(&gemma).layers[0].window, Some(4096));
    assert_eq!(full(&gemma.with("attention.sliding_window", 0u32)), [0, 1, 2, 3]);
}

#[test]
fn a_second_rotation_is_refused_where_layers_share_one() {
    let plain = model("gpt-oss", 4).with("attention.sliding_window", 8u32);
    let same = plain.with("rope.freq_base", 1e6f32).with("rope.freq_base_swa", 1e6f32);
    assert_eq!(described(&same).ropes.len(), 1);
    let error = same.with("rope.freq_base_swa", 1e4f32).described().unwrap_err().to_string();
    assert!(error.contains("rope.freq_base_swa"), "{error}");
}
