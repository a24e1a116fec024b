//! Tests `assess`: from a model and prompts to figures, a page and a verdict.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::{chat_model, command, demo, fixture, forebay, moe, replayed};

const PROMPTS: &str = r#"{"domain": "tales", "language": "en", "text": "Once upon a time there was"}
{"domain": "code", "kind": "chat", "text": "def binary_search(items, target):"}
{"domain": "tales", "text": "The old sailor looked out at the sea and"}
"#;

/// A folder with a prompt file. Paths in it are text.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        std::fs::write(folder.path("prompts.jsonl"), PROMPTS).unwrap();
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Returns the document of `assess` for a model on the CPU with one of the folder's prompt files.
    fn assess(&self, model: &str, prompts: &str, tokens: &str, more: &[&str]) -> Value {
        let prompts = self.path(prompts);
        let common = ["assess", model, "--prompts", &prompts, "--tokens", tokens];
        let arguments = [&common[..], &["--device", "cpu", "--json"], more].concat();
        forebay(&arguments).json()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// Checks that every share in a document is from 0 to 1.
fn check_shares(value: &Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if let Some(share) = value.as_f64()
                    && (name == "share" || name == "hit_rate" || name == "token_overlap")
                {
                    assert!((0.0..=1.0).contains(&share), "{name}: {share}");
                }
                check_shares(value);
            }
        }
        Value::Array(items) => items.iter().for_each(check_shares),
        _ => {}
    }
}

#[test]
fn a_model_is_recorded_measured_and_drawn() {
    let folder = Folder::new();
    // This name would become markup if any output failed to escape it.
    let hostile = folder.path("<img src=x onerror=alert(1)>&\"'@BODY@.gguf");
    std::os::unix::fs::symlink(demo(), &hostile).unwrap();
    let (page, figures) = (folder.path("report.html"), folder.path("figures"));
    let document = folder.assess(&hostile, "prompts.jsonl", "6", &["-o", &page, "--svg", &figures]);
    check_shares(&document);
    let model = &document["models"][0];
    assert_eq!((model["expert_layers"].as_u64(), model["experts"].as_u64()), (Some(8), Some(32)));
    let domains: Vec<&str> =
        model["domains"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(domains, ["tales", "code"]);
    let generated = |section: &Value| section["locality"]["generated_tokens"].as_u64().unwrap();
    let by_domain: u64 = model["domains"].as_array().unwrap().iter().map(generated).sum();
    assert_eq!(generated(&model["mixed"]), by_domain);
    assert!((3..=18).contains(&by_domain), "{by_domain}");
    let forms = |model: &Value| -> Vec<String> {
        let prompts = model["prompts"].as_array().unwrap().iter();
        prompts.map(|prompt| prompt["form"].as_str().unwrap().to_owned()).collect()
    };
    // The demo model was not trained with the template in its file.
    assert_eq!(forms(model), ["text"; 3]);
    let with_template = chat_model(folder.0.path().join("chat").as_ref());
    let of = |more: &[&str]| {
        forms(&folder.assess(&with_template, "prompts.jsonl", "2", more)["models"][0])
    };
    assert_eq!(of(&[]), ["text", "chat_template", "text"]);
    assert_eq!(of(&["--raw"]), ["text"; 3]);
    assert!(model["measured"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    let curves = model["mixed"]["curves"].as_array().unwrap();
    let of = |name: &str| curves.iter().find(|curve| curve["policy"] == name).unwrap();
    for (best, other) in of("belady")["points"]
        .as_array()
        .unwrap()
        .iter()
        .zip(of("lru")["points"].as_array().unwrap())
    {
        assert!(best["hit_rate"].as_f64() >= other["hit_rate"].as_f64(), "{best} {other}");
    }
    // This capacity is smaller than one token's cycle, so a global LRU list never hits.
    let small = &of("lru")["points"][2];
    assert!(small["capacity_bytes"].as_u64() < model["cycle_bytes"].as_u64());
    assert_eq!(small["hit_rate"], 0.0);
    let verdict = model["verdict"].as_array().unwrap();
    assert!(verdict[0].as_str().unwrap().contains("after 3 prompts are too few"), "{verdict:?}");

    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    assert!(html.contains("&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#39;@BODY@"));
    for outside in ["<img", "<script", "http://", "https://", "url(", "NaN", "inf"] {
        let html = html.replace("http://www.w3.org/2000/svg", "").replace("information", "");
        assert!(!html.contains(outside), "{outside}");
    }
    let drawn: Vec<PathBuf> =
        std::fs::read_dir(&figures).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(drawn.len() >= 7, "{drawn:?}");
    for figure in drawn {
        let svg = std::fs::read_to_string(&figure).unwrap();
        assert!(svg.starts_with("<?xml") && svg.trim_end().ends_with("</svg>"), "{figure:?}");
        assert!(svg.contains("prefers-color-scheme: dark") && !svg.contains("NaN"), "{figure:?}");
        // The figure describes itself: its title and caption stand above the drawing.
        let [title, caption] = ["title", "desc"].map(|element| {
            let (_, text) = svg.split_once(&format!("<{element}>")).unwrap();
            text.split('<').next().unwrap()
        });
        assert!(!title.is_empty() && !caption.is_empty(), "{figure:?}");
        assert!(svg.contains(&format!(">{title}</text>")), "{figure:?}");
        assert!(svg.contains("viewBox=\"0 -30 440 "), "{figure:?}");
    }
    assert_eq!(folder.names().len(), 5, "{:?}", folder.names());
}

/// Twelve prompts, after which 20 tokens each are enough for a verdict.
fn enough_prompts() -> String {
    let starts =
        ["Once upon a time", "The old king", "A small dog", "In the forest", "The sea", "One day"];
    let line = |index: usize| {
        let domain = ["tales", "numbers"][index % 2];
        let text = format!("{} there was number {index} and", starts[index % starts.len()]);
        format!("{}\n", json!({ "domain": domain, "text": text }))
    };
    (0..12).map(line).collect()
}

#[test]
fn a_verdict_has_its_uncertainty_and_a_command_that_works() {
    let folder = Folder::new();
    std::fs::write(folder.path("prompts.jsonl"), enough_prompts()).unwrap();
    let prompts = folder.path("prompts.jsonl");
    let csv = folder.path("curves.csv");
    let demo = demo();
    let arguments = ["assess", &demo, "--prompts", &prompts, "--tokens", "20", "--device", "cpu"];
    let text = forebay(&[&arguments[..], &["--csv", &csv]].concat()).ok().stdout;
    assert!(text.contains(" ± ") && text.contains("points over prompts"), "{text}");
    let command = text.lines().find(|line| line.starts_with("forebay run ")).unwrap();
    let (command, why) = command.split_once("      ").unwrap();
    assert!(command.contains(" --ram ") && why.starts_with("the least RAM"), "{command}");
    let mut run: Vec<&str> = command.split(' ').skip(1).collect();
    run.extend(["--raw", "--device", "cpu", "--prompt", "Once", "--max-tokens", "3"]);
    forebay(&run).ok();
    // Every point of the document is a line of the file, and has its interval.
    let document = folder.assess(&demo, "prompts.jsonl", "20", &[]);
    let model = &document["models"][0];
    let lines = std::fs::read_to_string(&csv).unwrap();
    let mut lines = lines.lines();
    assert!(lines.next().unwrap().starts_with("model,domain,policy,share,"));
    let sections = std::iter::once(&model["mixed"]).chain(model["domains"].as_array().unwrap());
    for section in sections {
        for curve in section["curves"].as_array().unwrap() {
            for point in curve["points"].as_array().unwrap() {
                let [low, rate, high] = [
                    &point["hit_rate_interval"][0],
                    &point["hit_rate"],
                    &point["hit_rate_interval"][1],
                ]
                .map(|number| number.as_f64().unwrap());
                assert!(low <= rate + 1e-9 && rate <= high + 1e-9 && high <= 1.0, "{point}");
                let line: Vec<&str> = lines.next().unwrap().split(',').collect();
                assert_eq!(
                    line[1..3],
                    [&section["name"], &curve["policy"]].map(|name| name.as_str().unwrap())
                );
                assert_eq!(line[5..8], [rate, low, high].map(|number| format!("{number:.6}")));
            }
        }
    }
    assert_eq!(lines.next(), None);
}

#[test]
fn random_weights_get_no_verdict() {
    let folder = Folder::new();
    std::fs::write(folder.path("prompts.jsonl"), enough_prompts()).unwrap();
    let document = folder.assess(&moe(), "prompts.jsonl", "20", &["--raw"]);
    let model = &document["models"][0];
    let verdict = model["verdict"][0].as_str().unwrap();
    let locality = &model["mixed"]["locality"];
    let told =
        format!("{verdict}, {} and {}", locality["token_overlap"], locality["chance_overlap"]);
    assert!(verdict.contains("weights of this model look random"), "{told}");
}

#[test]
fn the_same_seed_gives_the_same_figures_whatever_the_budget() {
    let folder = Folder::new();
    let figures = |more: &[&str]| {
        let mut document = folder.assess(&demo(), "prompts.jsonl", "4", more);
        document["models"][0]["mixed"].take()
    };
    let all = figures(&[]);
    assert_eq!(all, figures(&["--ram", "8MiB"]));
    assert_ne!(all, figures(&["--seed", "1"]));
}

#[test]
fn replay_of_the_recorded_trace_counts_the_same() {
    let folder = Folder::new();
    let trace = folder.path("assess.routing");
    // There is only one domain, so the report takes its prompts in the order of the recording.
    let prompts = "The old sailor looked out\n---\nOnce upon a time there was\n";
    std::fs::write(folder.path("plain.txt"), prompts).unwrap();
    let document = folder.assess(&demo(), "plain.txt", "8", &["--trace-routing", &trace]);
    let curves = document["models"][0]["mixed"]["curves"].as_array().unwrap();
    for policy in ["layer-lfu", "lru", "belady"] {
        let curve = curves.iter().find(|curve| curve["policy"] == policy).unwrap();
        let point = &curve["points"][7];
        assert_eq!(point["share"], 0.25);
        // Policies for all layers together get the bytes of the same number of experts, because experts differ in size.
        let capacity = match policy {
            "layer-lfu" => "8/layer".to_owned(),
            _ => format!("{}B", point["capacity_bytes"]),
        };
        let replayed = replayed(&trace, policy, &capacity, " --phase generate");
        let rates = hit_rates(&replayed);
        assert_eq!(rates, [point["hit_rate"].as_f64().unwrap()], "{policy}: {replayed}");
    }
    let two = ["assess", &demo(), &demo(), "--trace-routing", &trace];
    assert!(forebay(&two).failed(2).contains("one model"));
}

/// Returns the path of a machine profile of the planner's tests.
fn profile(name: &str) -> String {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../forebay-engine/tests/profiles");
    tests.join(name).to_str().unwrap().to_owned()
}

/// Makes a model with experts that is large enough for predictions: two layers of a real shape with random weights.
fn large(folder: &Folder) -> String {
    let model = folder.path("large.gguf");
    forebay(&["synth", "olmoe-7b", &model, "--layers", "2"]).ok();
    model
}

/// The speeds of a report are those of `plan` with the hits of the same recording, on either device and with every
/// budget.
#[test]
fn speeds_are_what_the_planner_says_of_the_recorded_trace() {
    let folder = Folder::new();
    let (trace, page) = (folder.path("assess.routing"), folder.path("report.html"));
    let large = large(&folder);
    let (figures, desktop) = (folder.path("figures"), profile("desktop.json"));
    // There is only one domain, so the report takes its prompts in the order of the recording.
    let prompts = "The old sailor looked out\n---\nOnce upon a time there was\n";
    std::fs::write(folder.path("plain.txt"), prompts).unwrap();
    let more = ["--trace-routing", &trace, "--profile", &desktop, "-o", &page, "--svg", &figures];
    let document = folder.assess(&large, "plain.txt", "8", &more);
    let predicted = &document["models"][0]["predictions"];
    assert_eq!(predicted["gpu"], "a card of 16 GiB");
    let rows = |points: &Value| points.as_array().unwrap().clone();
    let (by_ram, by_vram) = (rows(&predicted["by_ram"]), rows(&predicted["by_vram"]));
    assert!(by_ram.len() > 4 && by_vram.len() == 3, "{predicted}");
    let of_gpu = by_vram.iter().flat_map(|curve| rows(&curve["points"]));
    for point in by_ram.iter().cloned().chain(of_gpu) {
        let size = |name: &str| point[name].as_u64().map(|bytes| format!("{bytes}B"));
        let ram = size("ram_bytes").unwrap();
        let vram = size("vram_bytes");
        let mut arguments = vec!["plan", &large, "--profile", &desktop, "--routing", &trace];
        arguments.extend(["--json", "--ram", &ram]);
        match &vram {
            Some(vram) => arguments.extend(["--device", "cuda", "--vram", vram]),
            None => arguments.extend(["--device", "cpu"]),
        }
        let planned = forebay(&arguments).json();
        let prediction = &planned["plan"]["prediction"];
        let rate = &prediction["generate"]["tokens_per_second"];
        assert_eq!(
            (&point["tokens_per_second"], &point["hit_rate"]),
            (rate, &prediction["hit_rate"])
        );
        assert_eq!(point["read_bytes_per_token"], prediction["generate"]["disk_bytes"]);
    }
    // Each curve ends where all experts are in the memory of the device that computes. Less RAM is never faster.
    for curve in [&by_ram, &rows(&by_vram[0]["points"])] {
        assert_eq!(curve.last().unwrap()["kept_share"], 1.0);
        assert!(curve[0]["kept_share"].as_f64().unwrap() < 0.1, "{}", curve[0]);
    }
    let rates = |curve: &Value| -> Vec<f64> {
        let rate = |point: &Value| point["tokens_per_second"].as_f64().unwrap();
        rows(&curve["points"]).iter().map(rate).collect()
    };
    let (ample, least) = (rates(&by_vram[0]), rates(&by_vram[2]));
    assert_eq!(ample.len(), least.len());
    assert!(ample.iter().zip(&least).all(|(ample, least)| ample >= least), "{ample:?} {least:?}");
    assert!(ample[1] > 1.2 * least[1], "the disk counts: {ample:?} {least:?}");
    let verdict = document["models"][0]["verdict"].as_array().unwrap().last().unwrap();
    let verdict = verdict.as_str().unwrap();
    assert!(verdict.starts_with("On the GPU of the machine of desktop.json (a card of 16 GiB): "));
    assert!(verdict.contains("of VRAM, where all of it fits"), "{verdict}");
    let html = std::fs::read_to_string(&page).unwrap();
    for shown in ["GPU, by VRAM", "GPU, by VRAM and RAM", "CPU, by RAM"] {
        assert!(html.contains(&format!("<h2>Tokens/s to expect on the {shown}</h2>")), "{shown}");
    }
    assert!(Path::new(&figures).join("large-speed-gpu.svg").exists());

    // The next cases are a profile without a GPU, and a profile that does not say whether the machine was idle.
    let no_gpu = profile("epyc-2core.json");
    let document = folder.assess(&large, "plain.txt", "2", &["--profile", &no_gpu]);
    let predicted = &document["models"][0]["predictions"];
    assert!(predicted["by_ram"].as_array().unwrap().len() > 4, "{predicted}");
    assert_eq!(predicted["by_vram"].as_array().unwrap().len(), 0);
    let why = predicted["not_on_gpu"].as_str().unwrap();
    assert!(why.contains("no GPU"), "{why}");
    let mut older: Value =
        serde_json::from_str(&std::fs::read_to_string(&no_gpu).unwrap()).unwrap();
    older.as_object_mut().unwrap().remove("quality").unwrap();
    let older_profile = folder.path("older.json");
    std::fs::write(&older_profile, older.to_string()).unwrap();
    let document = folder.assess(&large, "plain.txt", "2", &["--profile", &older_profile]);
    assert!(document["models"][0]["predictions"].is_null());
    let why = document["models"][0]["not_predicted"].as_str().unwrap();
    assert!(why.contains("of an older forebay"), "{why}");
}

#[test]
fn what_cannot_be_predicted_is_said() {
    let folder = Folder::new();
    let no_gpu = profile("epyc-2core.json");
    let document = folder.assess(&demo(), "prompts.jsonl", "2", &["--profile", &no_gpu]);
    assert!(document["models"][0]["predictions"].is_null());
    let why = document["models"][0]["not_predicted"].as_str().unwrap();
    assert!(why.contains("the model is too small to predict"), "{why}");
    let verdict = document["models"][0]["verdict"].to_string();
    assert!(!verdict.contains("tokens/s"), "{verdict}");
    // A requested profile must be valid. This is checked before anything is recorded.
    std::fs::write(folder.path("bad.json"), "{}").unwrap();
    let (model, bad) = (demo(), folder.path("bad.json"));
    let line = forebay(&["assess", &model, "--device", "cpu", "--profile", &bad]).failed(1);
    assert!(line.contains("bad.json") && line.contains("damaged"), "{line}");
}

/// Returns every `hit_rate` in a document.
fn hit_rates(value: &Value) -> Vec<f64> {
    match value {
        Value::Object(fields) => {
            let own = fields.get("hit_rate").and_then(Value::as_f64);
            own.into_iter().chain(fields.values().flat_map(hit_rates)).collect()
        }
        Value::Array(items) => items.iter().flat_map(hit_rates).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn two_models_are_compared_in_words() {
    let folder = Folder::new();
    let (model, prompts) = (demo(), folder.path("prompts.jsonl"));
    let other = moe();
    let arguments =
        ["assess", &model, &other, "--prompts", &prompts, "--tokens", "4", "--device", "cpu"];
    let text = forebay(&arguments).ok().stdout;
    for needed in ["misses at 25 %", "mixed", "tales", "layer-lru", "belady", "No verdict", " ± "]
    {
        assert!(text.contains(needed), "{needed} is missing in: {text}");
    }
    assert!(text.contains("8 layers of 32 experts, 4 per token"), "{text}");
    assert!(text.contains("layers of 16 experts, 4 per token"), "{text}");
}

#[test]
fn what_cannot_be_assessed_is_said() {
    let folder = Folder::new();
    let (model, page) = (demo(), folder.path("report.html"));
    let dense = fixture("gguf/llama_k").expect("the project holds this fixture");
    let dense = gguf_in(&dense);
    // The dense model is refused before the other model is recorded.
    let line = forebay(&["assess", &model, &dense, "-o", &page]).failed(1);
    assert!(line.contains("dense model") && line.contains("no experts"), "{line}");
    for (prompts, why) in [
        ("", "no prompts"),
        ("{\"text\": ", "prompt 1"),
        ("{\"text\": \"x\", \"extra\": 1}", "extra"),
    ] {
        std::fs::write(folder.path("bad"), prompts).unwrap();
        let bad = folder.path("bad");
        let line = forebay(&["assess", &model, "--prompts", &bad, "-o", &page]).failed(1);
        assert!(line.contains(why) && line.contains("bad"), "{line}");
    }
    let missing = folder.path("missing/report.html");
    let line = forebay(&["assess", &model, "-o", &missing]).failed(1);
    assert!(line.contains("does not exist"), "{line}");
    let line = forebay(&["assess", "no/such/model"]).failed(1);
    assert!(line.contains("no/such/model"), "{line}");
    assert_eq!(folder.names(), ["bad", "prompts.jsonl"]);
    // A full disk, simulated without root, leaves nothing of the page.
    let prompts = folder.path("prompts.jsonl");
    let shell = "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\"";
    let binary = env!("CARGO_BIN_EXE_forebay");
    let arguments = [
        "-c",
        shell,
        binary,
        "assess",
        &model,
        "--prompts",
        &prompts,
        "--tokens",
        "2",
        "--device",
        "cpu",
        "--raw",
        "-o",
        &page,
    ];
    let line = command("sh", &arguments, "").failed(1);
    assert!(line.contains("report.html") && line.contains("cannot be written"), "{line}");
    assert_eq!(folder.names(), ["bad", "prompts.jsonl"]);
}

/// Returns the GGUF file in a folder.
fn gguf_in(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files = entries.filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    files.next().expect("a GGUF file").to_str().unwrap().to_owned()
}

#[test]
fn a_log_of_requests_says_how_small_a_prefix_cache_may_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let start = "The king walked through the forest and came to a small house. ".repeat(8);
    let line = |number: usize| {
        let prompt = format!("{start} {}", "And then? ".repeat(number));
        let body = serde_json::json!({ "prompt": prompt, "max_tokens": 4 });
        let line = serde_json::json!({
            "custom_id": format!("{number}"), "method": "POST", "url": "/v1/completions", "body": body
        });
        format!("{line}\n")
    };
    let log = path("log.jsonl");
    std::fs::write(&log, (0..12).map(line).collect::<String>()).unwrap();
    let model = demo();
    let ran = forebay(&["assess", &model, "--kv", &log]).ok();
    assert!(ran.stdout.contains("12 requests"), "{}", ran.stdout);
    assert!(ran.stdout.contains("find nine tenths of that: --kv-ram"), "{}", ran.stdout);
    let of_type = |kv_type: &str| -> serde_json::Value {
        let ran = forebay(&["assess", &model, "--kv", &log, "--json", "--kv-type", kv_type]).ok();
        serde_json::from_str(&ran.stdout).unwrap()
    };
    let (all, small) = (of_type("f16"), of_type("q8_0"));
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    assert_eq!(number(&small["bytes_per_position"]) * 64, number(&all["bytes_per_position"]) * 34);
    // Every prompt begins with the one before it.
    let (found, tokens) = (number(&all["most_found_tokens"]), number(&all["prompt_tokens"]));
    assert!(found > tokens * 3 / 4 && found < tokens, "{found} of {tokens}");
    let last = &all["curves"][0]["points"].as_array().unwrap().last().unwrap()["found_tokens"];
    assert_eq!(number(last), found);

    let (page, figures) = (path("page.html"), path("figures"));
    forebay(&["assess", &model, "--kv", &log, "-o", &page, "--svg", &figures]).ok();
    assert!(std::fs::read_to_string(&page).unwrap().contains("prefix cache"));
    assert_eq!(std::fs::read_dir(&figures).unwrap().count(), 1);

    let mixed = path("mixed.jsonl");
    let chat =
        r#"{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": 7}}"#;
    std::fs::write(&mixed, format!("{chat}\n{}", line(3))).unwrap();
    let ran = forebay(&["assess", &model, "--kv", &mixed]).ok();
    assert!(ran.stderr.contains("note: 1 request left out; the first: "), "{}", ran.stderr);
    std::fs::write(&mixed, format!("{chat}\n")).unwrap();
    for (arguments, status, why) in [
        (vec!["--kv", &mixed], 1, "no request can be used"),
        (vec!["--kv", &log, "--tokens", "7"], 2, "--tokens"),
        (vec!["--kv", &log, &model], 2, "name one"),
    ] {
        let ran = forebay(&[&["assess", &model], arguments.as_slice()].concat());
        assert_eq!(ran.status, Some(status), "{}", ran.stderr);
        assert!(ran.stderr.contains(why), "{}", ran.stderr);
    }
}
