//! Compares logits, routing and greedy text of every fixture model with independent references. The limits are those of
//! the tolerance table in the fixtures' README.

#[path = "support/logits.rs"]
mod logits;
mod support;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_engine::{GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use logits::{
    Distance, EXACT, FEW_EXPERTS, GGUF, HUGGING_FACE, INDEXED, RECURRENT, References,
    exact_against_llama_cpp, json, numbers, of_long_prompt, prompt, references_of, short_context,
};
use support::fixture;

/// Context in positions, which all prompts of the fixtures fit.
const CONTEXT: usize = 320;

fn open(path: &Path, exact: bool) -> Session {
    open_for(path, exact, CONTEXT)
}

fn open_for(path: &Path, exact: bool, context: usize) -> Session {
    let options = SessionOptions { exact, context: Some(context), ..SessionOptions::default() };
    Session::open(path, &options, &mut |_, _| {}).unwrap_or_else(|error| {
        panic!("{}: {error}", path.display());
    })
}

fn last8(logits: &[f32], vocabulary: usize) -> &[f32] {
    &logits[logits.len() - 8 * vocabulary..]
}

fn greedy(session: &mut Session, prompt: &[u32], count: usize) -> Vec<u32> {
    session.reset();
    let options = GenerateOptions::exactly(count, Sampling::greedy());
    session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
}

fn expect_exact(
    what: &str,
    reference: &[f32],
    tested: &[f32],
    vocabulary: usize,
    (max_abs, kl): (f64, f64),
) {
    let distance = Distance::between(reference, tested, vocabulary);
    eprintln!("{what}: max abs {:.1e}, mean KL {:.1e}", distance.max_abs, distance.kl_mean());
    assert!(f64::from(distance.max_abs) <= max_abs, "{what}: max abs {}", distance.max_abs);
    assert!(distance.kl_mean() <= kl, "{what}: mean KL {}", distance.kl_mean());
    assert!(distance.top1_misses.is_empty(), "{what}: top-1 differs");
}

/// Returns the chosen experts of layer `layer`, ascending for each token.
fn chosen(routing: &[i32], layers: usize, layer: usize, k: usize) -> Vec<Vec<i32>> {
    let rows = routing.chunks_exact(layers * k);
    rows.map(|row| {
        let mut ids = row[layer * k..(layer + 1) * k].to_vec();
        ids.sort_unstable();
        ids
    })
    .collect()
}

/// Compares logits, routing and greedy text in f32 with transformers, for a short and a long prompt.
fn check_hugging_face(name: &str, folder: &Path, data: &Path) {
    let reference = json(&data.join("reference.json"));
    let references = References::open(&data.join("reference.safetensors"));
    let short_context = short_context(name).unwrap_or(CONTEXT);
    let mut session = open_for(folder, true, short_context);
    let vocabulary = session.vocab_size();
    let layers = session.info().layers;
    let k = session.info().experts_per_token;
    let short = prompt(&reference, "short");
    let mut routing = Vec::new();
    let logits = session.logits(&short, Some(&mut routing)).unwrap();
    let which = references_of(name);
    let expected = references.floats(&format!("{which}.short.logits")).unwrap();
    expect_exact(&format!("{name} short"), &expected, &logits, vocabulary, EXACT);
    let one_by_one = session.logits_one_by_one(&short).unwrap();
    expect_exact(&format!("{name} one by one"), &expected, &one_by_one, vocabulary, EXACT);
    if which == "hf" {
        let greedy_short = numbers(&reference["short"]["greedy"]);
        let tested = greedy(&mut session, &short, greedy_short.len());
        assert_eq!(tested, greedy_short, "{name}: greedy short");
    }
    if short_context < CONTEXT {
        session = open(folder, true);
    }
    let long = prompt(&reference, "long");
    let logits = session.logits(&long, None).unwrap();
    let expected = references.floats(&format!("{which}.long.logits_last8")).unwrap();
    let what = format!("{name} long");
    expect_exact(&what, &expected, last8(&logits, vocabulary), vocabulary, EXACT);
    if which != "hf" {
        // Only logits were recorded.
        return;
    }
    let mut greedy_long = numbers(&reference["long"]["greedy"]);
    if name.starts_with("gemma4_moe") {
        // For the next token, the scores of two experts are equal up to rounding. llama.cpp chooses as forebay does.
        greedy_long.truncate(22);
    }
    let tested = greedy(&mut session, &long, greedy_long.len());
    assert_eq!(tested, greedy_long, "{name}: greedy long");
    let ids_of = |layer: usize| references.ints(&format!("hf.short.layer{layer}.router.ids"));
    if (0..layers).all(|layer| ids_of(layer).is_none()) {
        // Some fixtures have logits only.
        return;
    }
    for layer in 0..layers {
        let Some(ids) = ids_of(layer) else {
            let dense = routing.chunks_exact(layers * k.max(1)).all(|row| row[layer * k] == -1);
            assert!(k == 0 || dense, "{name}: no reference routing in layer {layer}");
            continue;
        };
        // References leave out the experts that every token uses, which are the last ones.
        let chosen_by_router = ids.len() / short.len();
        let experts = session.info().experts as i32;
        let always = experts - (k - chosen_by_router) as i32..experts;
        let rows = ids.chunks_exact(chosen_by_router);
        let expected: Vec<Vec<i32>> =
            rows.map(|row| row.iter().copied().chain(always.clone()).collect()).collect();
        assert_eq!(
            chosen(&routing, layers, layer, k),
            expected,
            "{name}: routing of layer {layer}"
        );
    }
}

#[test]
fn hugging_face_folders_match_transformers() {
    for &name in HUGGING_FACE {
        let Some(folder) = fixture(&format!("models/{name}")) else { continue };
        check_hugging_face(name, &folder, &folder);
    }
}

#[test]
fn configurations_of_transformers_5_give_the_same_model() {
    for &name in HUGGING_FACE {
        let Some(folder) = fixture(&format!("models/{name}")) else { continue };
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap();
            let target = match file {
                "config.json" => continue,
                "config.v5.json" => "config.json",
                other => other,
            };
            std::fs::copy(&path, copy.path().join(target)).unwrap();
        }
        check_hugging_face(&format!("{name} (v5)"), copy.path(), &folder);
    }
}

#[test]
fn a_configuration_may_say_that_halves_rotate() {
    let Some(folder) = fixture("models/hy_v4") else { return };
    let halves = |config: &mut serde_json::Value| {
        config["rope_interleave"] = false.into();
        config["indexer_rope_interleave"] = false.into();
    };
    let copy = support::changed("hy_v4", halves).unwrap();
    check_hugging_face("hy_v4 (halves)", copy.path(), &folder);
}

/// Returns the quantisation label and the first file of each model in a GGUF fixture.
fn gguf_files(name: &str) -> Vec<(String, PathBuf)> {
    let Some(folder) = fixture(&format!("gguf/{name}")) else { return Vec::new() };
    let described = json(&folder.join("llamacpp.json"));
    let files = described["files"].as_object().unwrap();
    let path_of = |entry: &serde_json::Value| {
        let file = &entry["file"];
        let first = if file.is_array() { &file[0] } else { file };
        folder.join(first.as_str().unwrap())
    };
    files
        .iter()
        .map(|(label, entry)| (label.clone(), path_of(entry)))
        .filter(|(_, path)| path.exists())
        .collect()
}

/// Returns the reference prompts of a GGUF fixture, which its set has.
fn reference_json(name: &str) -> serde_json::Value {
    let own = fixture(&format!("gguf/{name}")).expect("the fixture is there");
    let set = own.ancestors().nth(2).expect("it is in a set");
    let folders = ["gguf", "models"].map(|kind| set.join(kind).join(name));
    let mut paths = folders.map(|folder| folder.join("reference.json")).into_iter();
    let path = paths.find(|path| path.exists());
    json(&path.expect("every GGUF fixture has reference prompts"))
}

/// Returns the reference logits of a file. For a quantised file they come from its dequantised weights, otherwise from
/// F32.
fn gguf_reference(name: &str, label: &str, which: &str) -> Vec<f32> {
    let references =
        References::open(&fixture(&format!("gguf/{name}/llamacpp.safetensors")).unwrap());
    references
        .floats(&format!("{label}.exact.{which}"))
        .or_else(|| references.floats(&format!("F32.{which}")))
        .unwrap()
}

#[test]
fn gguf_files_match_llama_cpp_in_f32() {
    for &name in GGUF {
        for (label, path) in gguf_files(name) {
            let what = format!("{name} {label}");
            let reference = reference_json(name);
            let described = json(&fixture(&format!("gguf/{name}/llamacpp.json")).unwrap());
            let entry = &described["files"][&label];
            let mut session = open(&path, true);
            let vocabulary = session.vocab_size();
            let (layers, k) = (session.info().layers, session.info().experts_per_token);
            let mut routing = Vec::new();
            let short = prompt(&reference, "short");
            let logits = session.logits(&short, Some(&mut routing)).unwrap();
            let expected = gguf_reference(name, &label, "short.logits");
            let limits = exact_against_llama_cpp(name);
            expect_exact(&format!("{what} short"), &expected, &logits, vocabulary, limits);
            let long = prompt(&reference, "long");
            let logits = session.logits(&long, None).unwrap();
            let expected = gguf_reference(name, &label, "long.logits_last8");
            let what_long = format!("{what} long");
            if let Some(limits) = of_long_prompt(name, limits) {
                let tested = last8(&logits, vocabulary);
                expect_exact(&what_long, &expected, tested, vocabulary, limits);
            }
            for layer in 0..if k > 0 { layers } else { 0 } {
                // Some fixtures have logits only.
                if entry["routing_exact"].is_null() {
                    break;
                }
                let Some(ids) = entry["routing_exact"][layer.to_string()]["ids"].as_array() else {
                    let mut rows = routing.chunks_exact(layers * k);
                    assert!(rows.all(|row| row[layer * k] == -1), "{what}: layer {layer}");
                    continue;
                };
                let expected: Vec<Vec<i32>> = ids
                    .iter()
                    .map(|row| numbers(row).into_iter().map(|id| id as i32).collect())
                    .collect();
                let found = chosen(&routing, layers, layer, k);
                // llama.cpp's table of GELU moves scores by more than what lies between some experts of gemma4_moe (README).
                let other = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                if name != "gemma4_moe" || other > 1 {
                    assert_eq!(found, expected, "{what}: layer {layer}");
                }
            }
            for (key, ids) in [("greedy_short_exact", &short), ("greedy_long_exact", &long)] {
                // Beyond the prompt, these see other keys in llama.cpp, too.
                let differs = ["qwen4_exp", "minimax_m3"].contains(&name);
                if differs || entry[key].is_null() {
                    continue;
                }
                let expected = numbers(&entry[key]);
                assert_eq!(greedy(&mut session, ids, expected.len()), expected, "{what}: {key}");
            }
        }
    }
}

/// Returns the largest difference and the mean divergence of llama.cpp's own arithmetic with 8-bit activations.
fn llama_cpp_distance(name: &str, label: &str, which: &str) -> (f64, f64) {
    let described = json(&fixture(&format!("gguf/{name}/llamacpp.json")).unwrap());
    let key = if which == "short" { "native_vs_exact" } else { "native_vs_exact_long_last8" };
    let of = &described["files"][label][key];
    // Some fixtures have no such numbers. Then the usual limits hold.
    let number = |name: &str| of[name].as_f64().unwrap_or(0.0);
    (number("max_abs"), number("kl_mean"))
}

/// Returns the number of positions of a prompt in which llama.cpp's own arithmetic makes another token the likeliest.
fn llama_cpp_misses(name: &str, label: &str, which: &str) -> f64 {
    let described = json(&fixture(&format!("gguf/{name}/llamacpp.json")).unwrap());
    let (key, positions) = match which {
        "short" => ("native_vs_exact", 24.0),
        _ => ("native_vs_exact_long_last8", 8.0),
    };
    let share = described["files"][label][key]["top1"].as_f64();
    ((1.0 - share.unwrap_or(1.0)) * positions).round()
}

/// Returns the largest difference that rounding of weights alone makes, and in how many positions of a prompt of `positions` it makes
/// another token the likeliest, for a fixture without numbers of llama.cpp's own arithmetic.
fn rounded_weights(name: &str, label: &str, positions: f64) -> (f64, f64) {
    let described = json(&fixture(&format!("gguf/{name}/llamacpp.json")).unwrap());
    let of = &described["files"][label]["exact_vs_f32"];
    let misses = (1.0 - of["top1"].as_f64().unwrap_or(1.0)) * positions;
    (of["max_abs"].as_f64().unwrap_or(0.0), misses.round())
}

/// Returns the mean divergence of llama.cpp's logits with an f16 cache from those with an f32 cache.
fn llama_cpp_half_cache(name: &str, which: &str) -> f64 {
    let described = json(&fixture(&format!("gguf/{name}/llamacpp.json")).unwrap());
    let which = if which == "short" { "short" } else { "long_last8" };
    described["all_f32"]["kv_f16_vs_kv_f32"][which]["kl_mean"].as_f64().unwrap_or(0.0)
}

#[test]
fn default_arithmetic_stays_within_the_table() {
    for &name in GGUF {
        for (label, path) in gguf_files(name) {
            let what = format!("{name} {label}");
            let reference = reference_json(name);
            let mut session = open(&path, false);
            let vocabulary = session.vocab_size();
            // Their experts have 4 bits whatever type the other tensors have.
            let few_bits = ["gpt_oss", "deepseek_v4", "deepseek_v4_mtp"].contains(&name);
            let float = ["BF16", "F16", "F32"].contains(&label.as_str()) && !few_bits;
            // With float weights, only the key/value cache is rounded. With quantised weights, activations are rounded,
            // too.
            let limits = if float { (5e-2, 1e-5, 0.05) } else { (1.5, 5e-3, 0.5) };
            let experts = session.info().experts > 0;
            for (which, suffix) in [("short", "short.logits"), ("long", "long.logits_last8")] {
                if which == "long" && of_long_prompt(name, ()).is_none() {
                    continue;
                }
                let logits = session.logits(&prompt(&reference, which), None).unwrap();
                let expected = gguf_reference(name, &label, suffix);
                let tested = &logits[logits.len() - expected.len()..];
                let distance = Distance::between(&expected, tested, vocabulary);
                let (mut max_abs, mut kl, gap) = limits;
                let is_sensitive =
                    [RECURRENT, INDEXED, FEW_EXPERTS].iter().any(|of| of.contains(&name));
                let carries_on = is_sensitive && !float;
                if carries_on {
                    // A rounded state carries on, and so does a choice of other keys, so llama.cpp's own distance is the measure (see README).
                    let (largest, mean) = llama_cpp_distance(name, &label, which);
                    (max_abs, kl) = (f32::max(max_abs, 1.5 * largest as f32), f64::max(kl, mean));
                }
                if name == "kimi_k3" {
                    let (largest, _) = rounded_weights(name, &label, 24.0);
                    max_abs = f32::max(max_abs, 3.0 * largest as f32);
                }
                if float {
                    // With many layers of random weights, the limit is llama.cpp's own distance between f16 and f32
                    // caches.
                    kl = f64::max(kl, llama_cpp_half_cache(name, which));
                }
                // A flipped expert choice moves single positions, so the median is compared (see README).
                let routed = experts && !float;
                let by_median = routed || carries_on;
                let divergence = if by_median { distance.kl_median() } else { distance.kl_mean() };
                eprintln!("{what} {which}: max abs {:.1e}, KL {divergence:.1e}", distance.max_abs);
                assert!(distance.max_abs <= max_abs, "{what} {which}: {}", distance.max_abs);
                assert!(divergence <= kl, "{what} {which}: KL {divergence}");
                // A flipped expert may also change the likeliest token. This may happen in at most as many positions as
                // in llama.cpp.
                let far = distance.top1_misses.iter().filter(|miss| **miss > gap).count();
                let mut allowed =
                    if by_median { llama_cpp_misses(name, &label, which) } else { 0.0 };
                if name == "kimi_k3" {
                    // Its random weights amplify every rounding. Activations are rounded as often as weights, and states besides.
                    allowed = 2.0 * rounded_weights(name, &label, 24.0).1;
                }
                assert!(far as f64 <= allowed, "{what} {which}: {}", distance.worst_miss());
            }
        }
    }
}

/// Returns the files that the set's manifest lists and that are missing or have another length, and the listed models
/// as `KIND/NAME`.
fn compare_with_manifest(set: &Path) -> (Vec<String>, BTreeSet<String>) {
    let manifest = json(&set.join("MANIFEST.json"));
    let (mut wrong, mut models) = (Vec::new(), BTreeSet::new());
    for (path, entry) in manifest.as_object().expect("a manifest lists files") {
        let bytes = std::fs::metadata(set.join(path)).ok().map(|file| file.len());
        if bytes.is_none() || bytes != entry["bytes"].as_u64() {
            wrong.push(path.clone());
        }
        let mut parts = path.split('/');
        if let (Some(kind @ ("models" | "gguf")), Some(name)) = (parts.next(), parts.next()) {
            models.insert(format!("{kind}/{name}"));
        }
    }
    (wrong, models)
}

/// The tests above skip missing models, so without this test an incomplete set would pass. The project's own set is checked also where
/// tests use the full one.
#[test]
fn the_set_is_whole_and_every_model_of_it_is_tested() {
    let own = support::formulas().parent().expect("it is in the project's own set").to_owned();
    for set in support::sets().into_iter().chain([own]) {
        let (wrong, models) = compare_with_manifest(&set);
        assert!(wrong.is_empty(), "{}: missing or changed are {wrong:?}", set.display());
        assert!(!models.is_empty(), "{} lists no models", set.display());
        let folders = HUGGING_FACE.iter().map(|name| format!("models/{name}"));
        let tested = folders.chain(GGUF.iter().map(|name| format!("gguf/{name}")));
        let known: BTreeSet<String> = tested.collect();
        let untested: Vec<&String> = models.difference(&known).collect();
        assert!(untested.is_empty(), "no test runs {untested:?}");
    }
}

#[test]
fn a_set_that_lost_a_model_is_noticed() {
    let set = tempfile::tempdir().unwrap();
    let model = set.path().join("gguf/llama");
    std::fs::create_dir_all(&model).unwrap();
    std::fs::write(model.join("whole.gguf"), [0; 10]).unwrap();
    std::fs::write(model.join("cut.gguf"), [0; 9]).unwrap();
    let manifest = r#"{"gguf/llama/whole.gguf": {"bytes": 10}, "gguf/llama/cut.gguf": {"bytes": 10},
        "models/qwen2/gone.safetensors": {"bytes": 10}, "README.md": {"bytes": 1}}"#;
    std::fs::write(set.path().join("MANIFEST.json"), manifest).unwrap();
    let (wrong, models) = compare_with_manifest(set.path());
    assert_eq!(wrong, ["gguf/llama/cut.gguf", "models/qwen2/gone.safetensors", "README.md"]);
    assert_eq!(models.into_iter().collect::<Vec<_>>(), ["gguf/llama", "models/qwen2"]);
}
