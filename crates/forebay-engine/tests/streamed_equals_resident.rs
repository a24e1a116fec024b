//! Tests invariant 2: streamed output equals fully resident output bit for bit, for every budget that works, every
//! policy and every read engine.

mod support;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use forebay_engine::{EngineError, KvCacheType, Session, SessionOptions};
use forebay_store::IoKind;
use forebay_stream::PolicyKind;
use support::{fixture, needed_bytes, recurrent_models, third_set};

const POLICIES: [PolicyKind; 3] = [PolicyKind::LAYER_LRU, PolicyKind::LAYER_LFU, PolicyKind::LRU];

/// Returns `count` pseudo-random tokens.
fn tokens(vocabulary: usize, count: usize) -> Vec<u32> {
    (0..count).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect()
}

/// Returns all logits of three prompts as bits. The first is longer than one attention tile, so its tokens route to
/// many experts at once.
fn run(session: &mut Session) -> Vec<u32> {
    let vocabulary = session.vocab_size();
    let mut bits: Vec<u32> = Vec::new();
    for count in [80, 1, 3] {
        let logits = session.logits(&tokens(vocabulary, count), None).unwrap();
        bits.extend(logits.iter().map(|value| value.to_bits()));
    }
    bits
}

fn options(ram_bytes: Option<u64>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(128), threads: Some(2), ..SessionOptions::default() }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

/// Returns the smallest budget that works, from the error that a budget of one byte causes.
fn smallest(path: &Path) -> u64 {
    needed_bytes(open(path, &options(Some(1))))
}

fn models() -> Vec<PathBuf> {
    [
        "gguf/qwen3_moe/qwen3_moe-Q8_0.gguf",
        "gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf",
        "gguf/llama_k/llama_k-Q4_K_M.gguf",
        "gguf/gpt_oss/gpt_oss-Q4_K_M.gguf",
        "gguf/gemma3/gemma3-BF16.gguf",
        "gguf/deepseek_v2_k/deepseek_v2_k-Q4_K_M.gguf",
        "gguf/deepseek_v2_lite/deepseek_v2_lite-BF16.gguf",
        "gguf/deepseek_v3/deepseek_v3-BF16.gguf",
        "models/qwen3_moe",
        "models/mixtral",
        "models/glm4_moe",
        "models/gpt_oss",
        "models/deepseek_v2",
        "models/deepseek_v3",
        "models/minimax_m2",
        "models/olmo3",
        "models/phi3",
        "models/llama4",
        "models/qwen2_moe",
        "models/gemma4_moe",
        "models/gemma4_ple",
        "models/mimo_v2_flash",
        "gguf/gemma4_moe/gemma4_moe-Q8_0.gguf",
        "models/deepseek_v32",
        "models/dots3_note",
        "models/deepseek_v4",
        "gguf/deepseek_v4/deepseek_v4-BF16.gguf",
        "models/hunyuan_v1_moe",
        "models/cohere2",
        "models/starcoder2",
        "models/phi",
        "models/phimoe",
        "models/hunyuan_v1_dense",
        "models/minicpm3",
        "models/vaultgemma",
        "models/gemma3n",
        "models/granitemoe_swa",
        "gguf/granite_swa/granite_swa-Q4_0.gguf",
        "gguf/maple/maple-Q4_0.gguf",
        "gguf/bailingmoe2/bailingmoe2-Q4_0.gguf",
        "gguf/deci/deci-Q4_0.gguf",
        "gguf/qwen/qwen-Q4_0.gguf",
        "gguf/plm/plm-Q4_0.gguf",
        "gguf/dots3note/dots3note-Q4_0.gguf",
        "gguf/plamo3/plamo3-Q4_0.gguf",
        "gguf/spark2_5/spark2_5-Q4_0.gguf",
        "gguf/dbrx/dbrx-Q4_0.gguf",
        "gguf/smallthinker/smallthinker-Q4_0.gguf",
        "gguf/arctic/arctic-Q4_0.gguf",
        "gguf/apertus/apertus-Q4_0.gguf",
        "gguf/gptneox/gptneox-Q4_0.gguf",
        "gguf/falcon/falcon-Q4_0.gguf",
    ]
    .iter()
    .filter_map(|name| fixture(name))
    .chain(recurrent_models())
    .chain(third_set())
    .collect()
}

/// Returns the squared error relative to the squares of `expected`. Both are given as bits.
fn nmse(bits: &[u32], expected: &[u32]) -> f64 {
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    let pairs = || bits.iter().map(value).zip(expected.iter().map(value));
    pairs().map(|(x, y)| (x - y).powi(2)).sum::<f64>() / pairs().map(|(_, y)| y * y).sum::<f64>()
}

const SMALL_CACHES: [KvCacheType; 2] = [KvCacheType::Q8_0, KvCacheType::Q4_0];

#[test]
fn caches_of_fewer_bits_stream_the_same() {
    for path in models() {
        let of = |kv_cache, ram| SessionOptions { kv_cache, ..options(ram) };
        let mut seen = vec![run(&mut open(&path, &of(KvCacheType::F16, None)).unwrap())];
        for kv_cache in SMALL_CACHES {
            let resident = run(&mut open(&path, &of(kv_cache, None)).unwrap());
            let few = Some(smallest(&path));
            let streamed = run(&mut open(&path, &of(kv_cache, few)).unwrap());
            assert!(streamed == resident, "{}, {kv_cache:?}: logits differ", path.display());
            seen.push(resident);
        }
        assert!(seen[0] != seen[1] && seen[1] != seen[2], "{}: one type for all", path.display());
        let exact = SessionOptions { exact: true, ..of(KvCacheType::Q4_0, None) };
        assert!(matches!(open(&path, &exact), Err(EngineError::Option(_))));
    }
}

/// Uses only models in which nothing else is rounded: activations of quantised weights and choices of experts amplify a
/// little noise to errors of the same size. A step of 4 bits is 127 / 8 times a step of 8 bits, and its square 252
/// times.
#[test]
fn caches_of_fewer_bits_err_by_their_steps() {
    for name in ["gguf/gemma3/gemma3-BF16.gguf", "models/llama"] {
        let Some(path) = fixture(name) else { continue };
        let expected = run(&mut open(&path, &options(None)).unwrap());
        let [bytes, nibbles] = SMALL_CACHES.map(|kv_cache| {
            let options = SessionOptions { kv_cache, ..options(None) };
            nmse(&run(&mut open(&path, &options).unwrap()), &expected)
        });
        assert!(bytes < 5e-4, "{name}: {bytes:e}");
        let ratio = nibbles / bytes;
        assert!((125.0..500.0).contains(&ratio), "{name}: {nibbles:e} is {ratio} times {bytes:e}");
    }
}

#[test]
fn every_budget_and_policy_gives_the_same_bits() {
    for path in models() {
        let mut resident = open(&path, &options(None)).unwrap();
        let whole = resident.plan().unwrap().arena_bytes + (8 << 20);
        let expected = run(&mut resident);
        assert_eq!(resident.statistics().stream.unwrap().misses, 0, "everything was resident");
        let smallest = smallest(&path);
        for policy in POLICIES {
            for ram in [smallest, (smallest + whole) / 2, whole] {
                for prefetch in [false, true] {
                    let options = SessionOptions { policy, prefetch, ..options(Some(ram)) };
                    let mut session = open(&path, &options).unwrap();
                    let what = format!("{} with {ram} bytes and {policy}", path.display());
                    assert!(run(&mut session) == expected, "{what}: logits differ");
                }
            }
        }
        let below = open(&path, &options(Some(smallest - 1)));
        assert!(
            below.is_err(),
            "{}: a byte less than the smallest must be refused",
            path.display()
        );
    }
}

#[test]
fn every_read_engine_gives_the_same_bits() {
    for path in models() {
        let expected = run(&mut open(&path, &options(None)).unwrap());
        for (io, direct) in [
            (IoKind::Uring, true),
            (IoKind::Uring, false),
            (IoKind::Pread, true),
            (IoKind::Pread, false),
        ] {
            let options = SessionOptions { io, direct, ..options(Some(smallest(&path))) };
            let mut session = match open(&path, &options) {
                Ok(session) => session,
                Err(EngineError::Store(error)) if io == IoKind::Uring => {
                    // Written directly to stderr, because the test harness captures what passing tests print.
                    let _ = writeln!(
                        std::io::stderr(),
                        "SKIPPED: io_uring cannot be used here: {error}"
                    );
                    continue;
                }
                Err(error) => panic!("{}: {error}", path.display()),
            };
            assert!(run(&mut session) == expected, "{}: {io:?}", path.display());
        }
    }
}

#[test]
fn thread_counts_give_the_same_bits() {
    for path in models() {
        let with = |threads| SessionOptions { threads: Some(threads), ..options(None) };
        let expected = run(&mut open(&path, &with(1)).unwrap());
        for threads in [2, 3, 5] {
            assert!(
                run(&mut open(&path, &with(threads)).unwrap()) == expected,
                "{threads} threads"
            );
        }
    }
}

#[test]
fn a_small_budget_really_streams() {
    let Some(path) = fixture("gguf/qwen3_moe/qwen3_moe-Q8_0.gguf") else { return };
    let mut session = open(&path, &options(Some(smallest(&path)))).unwrap();
    run(&mut session);
    let statistics = session.statistics();
    assert!(statistics.arena_bytes < statistics.weights_bytes, "the budget is below the model");
    let stream = statistics.stream.unwrap();
    assert!(stream.misses > 0);
    assert!(stream.bytes_read > statistics.weights_bytes, "experts come again and again");
}
