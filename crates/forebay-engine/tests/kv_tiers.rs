//! Tests the tiers of the KV cache: keys and values that were evicted to RAM or to the disk and come back give the same bits as
//! those that never moved. Whatever happens to the disk, positions are computed again and answers stay right.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{
    Engine, EngineError, KvCacheType, KvDisk, KvDiskFaults, KvDiskOperation, KvDiskOptions,
    KvDiskStore, KvDiskType, Session, SessionOptions,
};
use forebay_options::{BadOption, OptionName};
use requests::Answer;
use support::{fixture, models};
use tempfile::TempDir;

const CONTEXT: usize = 400;
const LONG: Duration = Duration::from_secs(30);

/// Returns an engine whose device has room for little more than one sequence.
fn engine(path: &Path, kv_ram_bytes: u64, options: SessionOptions) -> Engine<'static> {
    let options = SessionOptions {
        context: Some(CONTEXT),
        threads: Some(2),
        sequences: 3,
        kv_tokens: Some(CONTEXT),
        kv_ram_bytes: Some(kv_ram_bytes),
        for_engine: true,
        ..options
    };
    let session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    Engine::new(session, &EngineOptions::default())
}

fn with_disk(engine: Engine<'static>, store: &Arc<KvDiskStore>) -> Engine<'static> {
    with_type(engine, store, KvDiskType::AsCached)
}

fn with_type(
    mut engine: Engine<'static>,
    store: &Arc<KvDiskStore>,
    ty: KvDiskType,
) -> Engine<'static> {
    engine.set_kv_disk(KvDisk { store: store.clone(), ty }, "a model").unwrap();
    engine
}

fn store(folder: &TempDir) -> KvDiskOptions {
    KvDiskOptions::new(&folder.path().join("kv"), 256 << 20)
}

fn ask(engine: &mut Engine, prompts: &[Vec<u32>], namespace: &[u8]) -> Vec<Answer> {
    requests::ask(engine, prompts, 8, namespace)
}

fn tokens_of(answers: &[Answer]) -> Vec<&[(u32, u32)]> {
    answers.iter().map(|(tokens, _)| tokens.as_slice()).collect()
}

/// Conversations that share a system prompt. Each turn repeats the turns before it.
struct Conversations {
    random: fastrand::Rng,
    vocabulary: u32,
    prompts: Vec<Vec<u32>>,
}

impl Conversations {
    fn new(seed: u64, count: usize, vocabulary: usize) -> Conversations {
        let mut random = fastrand::Rng::with_seed(seed);
        let vocabulary = vocabulary as u32;
        let system: Vec<u32> = (0..50).map(|_| random.u32(..vocabulary)).collect();
        Conversations { random, vocabulary, prompts: vec![system; count] }
    }

    /// Adds what a user says next to every conversation.
    fn speak(&mut self) {
        for prompt in &mut self.prompts {
            let count = self.random.usize(20..70);
            prompt.extend((0..count).map(|_| self.random.u32(..self.vocabulary)));
        }
    }

    fn add(&mut self, answers: &[Answer]) {
        for (prompt, (tokens, _)) in self.prompts.iter_mut().zip(answers) {
            prompt.extend(tokens.iter().map(|(id, _)| id));
        }
    }
}

/// Returns the prompts and answers of some turns, with a new engine for every prompt.
fn alone(path: &Path, options: &SessionOptions) -> Vec<(Vec<Vec<u32>>, Vec<Answer>)> {
    let mut reference = engine(path, 0, options.clone());
    let mut talk = Conversations::new(5, 5, reference.session().vocab_size());
    let mut turns = Vec::new();
    for turn in 0..4 {
        talk.speak();
        let answer = |(index, prompt): (usize, &Vec<u32>)| {
            // Nobody shares this namespace.
            let namespace = format!("{turn} {index}");
            ask(&mut reference, std::slice::from_ref(prompt), namespace.as_bytes()).remove(0)
        };
        let answers: Vec<Answer> = talk.prompts.iter().enumerate().map(answer).collect();
        assert!(answers.iter().all(|(_, statistics)| statistics.cached_tokens == 0));
        turns.push((talk.prompts.clone(), answers));
        talk.add(&turns[turn].1);
    }
    turns
}

#[test]
fn evicted_blocks_come_back_with_the_same_bits() {
    let (models, mut need_ram) = (models(), 0);
    for path in &models {
        let path = path.as_path();
        let turns = alone(path, &SessionOptions::default());
        let folder = TempDir::new().unwrap();
        for ram in [64 << 20, 400_000, 0] {
            let store = Arc::new(KvDiskStore::open(store(&folder)).unwrap());
            let mut tiered = with_disk(engine(path, ram, SessionOptions::default()), &store);
            let (mut from_ram, mut was_lost) = (0, false);
            let mut known = vec![0; turns[0].0.len()];
            for (prompts, expected) in &turns {
                let answers = ask(&mut tiered, prompts, b"");
                assert_eq!(tokens_of(&answers), tokens_of(expected), "{} {ram}", path.display());
                for ((_, of), known) in answers.iter().zip(&known) {
                    let elsewhere = of.cached_tokens_from_ram + of.cached_tokens_from_disk;
                    was_lost |= of.cached_tokens - elsewhere < *known;
                }
                known = prompts.iter().map(|prompt| (prompt.len() - 1) / 16 * 16).collect();
                from_ram += answers.iter().map(|(_, of)| of.cached_tokens_from_ram).sum::<usize>();
            }
            let statistics = tiered.kv_tiers();
            // If all layers have windows, the device may have room for the windows of all conversations.
            let is_used = ram > 0 && was_lost;
            assert_eq!(from_ram > 0, is_used, "{} {ram}: {statistics:?}", path.display());
            assert!(statistics.ram_bytes <= ram, "{statistics:?}");
            if ram == 64 << 20 {
                need_ram += usize::from(was_lost);
                let (prompts, _) = &turns[turns.len() - 1];
                let again = ask(&mut tiered, prompts, b"");
                for ((_, of), prompt) in again.iter().zip(prompts) {
                    let least = prompt.len() - 1 - (prompt.len() - 1) % 16;
                    assert_eq!(of.cached_tokens, least, "no prompt is read twice: {of:?}");
                }
                let other = ask(&mut tiered, prompts, b"another user");
                // The prompts come together and none has been read before.
                assert!(other.iter().all(|(_, of)| of.cached_tokens <= 50), "{other:?}");
            }
        }
    }
    assert!(need_ram >= models.len() - models.len() / 4, "{need_ram} of {}", models.len());
}

#[test]
fn a_larger_pool_keeps_conversations_that_do_not_run() {
    for path in models() {
        let options = SessionOptions {
            context: Some(CONTEXT),
            threads: Some(2),
            kv_ram_bytes: Some(0),
            kv_tokens: Some(6 * CONTEXT),
            for_engine: true,
            ..SessionOptions::default()
        };
        let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
        let mut engine = Engine::new(session, &EngineOptions::default());
        let mut talk = Conversations::new(5, 5, engine.session().vocab_size());
        talk.speak();
        for turn in 0..2 {
            for prompt in &talk.prompts {
                let (_, of) = &ask(&mut engine, std::slice::from_ref(prompt), b"")[0];
                let known = (prompt.len() - 1) / 16 * 16;
                assert_eq!(of.cached_tokens == known, turn > 0, "{} {of:?}", path.display());
            }
        }
    }
}

#[test]
fn a_restart_finds_the_blocks_on_disk() {
    for path in models() {
        for kv_cache in [KvCacheType::F16, KvCacheType::Q8_0] {
            let options = SessionOptions { kv_cache, ..SessionOptions::default() };
            let turns = alone(&path, &options);
            let folder = TempDir::new().unwrap();
            for (turn, (prompts, expected)) in turns.iter().enumerate() {
                let store = Arc::new(KvDiskStore::open(store(&folder)).unwrap());
                let mut tiered = with_disk(engine(&path, 64 << 20, options.clone()), &store);
                let answers = ask(&mut tiered, prompts, b"");
                assert_eq!(tokens_of(&answers), tokens_of(expected), "{}", path.display());
                for ((_, of), before) in answers.iter().zip(&turns[turn.saturating_sub(1)].0) {
                    let known = if turn == 0 { 0 } else { (before.len() - 1) / 16 * 16 };
                    // Shared beginnings may come from the pool, which another request has filled.
                    assert!(of.cached_tokens >= known, "turn {turn}: {of:?}");
                    assert!(turn == 0 || of.cached_tokens_from_disk > 0, "turn {turn}: {of:?}");
                }
                assert_eq!(tiered.kv_tiers().fetches_cut, 0);
                tiered.write_kv(true, LONG).unwrap();
            }
            // Another type of keys and values finds nothing.
            let store = Arc::new(KvDiskStore::open(store(&folder)).unwrap());
            let other = SessionOptions { kv_cache: KvCacheType::Q4_0, ..options };
            let mut other = with_disk(engine(&path, 64 << 20, other), &store);
            let answers = ask(&mut other, &turns[3].0[..1], b"");
            assert_eq!(answers[0].1.cached_tokens, 0);
        }
    }
}

#[test]
fn blocks_may_be_rounded_for_the_disk() {
    for path in models() {
        let turns = alone(&path, &SessionOptions::default());
        let open = || engine(&path, 64 << 20, SessionOptions::default());
        let (exact, rounded) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut bytes = [0, 0];
        let (mut compared, mut worst) = (0, 0.0_f32);
        let types = [KvDiskType::AsCached, KvDiskType::Q8_0];
        for (index, (folder, ty)) in [&exact, &rounded].into_iter().zip(types).enumerate() {
            let rounds = ty == KvDiskType::Q8_0;
            for (turn, (prompts, expected)) in turns[..2].iter().enumerate() {
                let store = Arc::new(KvDiskStore::open(store(folder)).unwrap());
                let mut tiered = with_type(open(), &store, ty);
                let answers = ask(&mut tiered, prompts, b"");
                for ((got, of), (wanted, _)) in answers.iter().zip(expected) {
                    assert_eq!(of.exact, !rounds);
                    assert_eq!(of.cached_tokens_from_disk > 0, turn > 0, "{of:?}");
                    // Only what was found makes a difference.
                    if !rounds || turn == 0 {
                        assert_eq!(got, wanted, "{}", path.display());
                    } else if got[0].0 == wanted[0].0 {
                        let [got, wanted] = [got, wanted].map(|tokens| f32::from_bits(tokens[0].1));
                        worst = worst.max((got - wanted).abs());
                        compared += 1;
                    }
                }
                tiered.write_kv(true, LONG).unwrap();
                let name = store.list()[0].model.clone().unwrap();
                assert_eq!(name.ends_with("(rounded to q8_0)"), rounds, "{name}");
                let statistics = tiered.kv_tiers();
                let error = statistics.disk_rounding_error;
                assert_eq!((0.0005..0.02).contains(&error), rounds, "{error}");
                assert!(rounds || error == 0.0, "{error}");
                bytes[index] += statistics.disk_written_bytes;
            }
        }
        assert!(compared >= 3 && worst < 0.3, "{}: {worst} in {compared}", path.display());
        let ratio = bytes[1] as f64 / bytes[0] as f64;
        assert!((0.53..0.54).contains(&ratio), "{ratio}");
        // An engine that promises equal bits finds nothing of it.
        let store = Arc::new(KvDiskStore::open(store(&rounded)).unwrap());
        let answers = ask(&mut with_disk(open(), &store), &turns[1].0[..1], b"");
        assert_eq!(answers[0].1.cached_tokens, 0);
    }
    let folder = TempDir::new().unwrap();
    let store = Arc::new(KvDiskStore::open(store(&folder)).unwrap());
    let small = SessionOptions { kv_cache: KvCacheType::Q8_0, ..SessionOptions::default() };
    let mut small = engine(&models()[0], 64 << 20, small);
    let refused = small.set_kv_disk(KvDisk { store, ty: KvDiskType::Q8_0 }, "a model");
    assert!(matches!(
        refused,
        Err(EngineError::Option(BadOption { name: OptionName::KvDiskType, .. }))
    ));
}

/// Fails every so many operations, and waits before every so many.
struct Faulty {
    operations: AtomicU32,
    fails: u32,
    stalls: u32,
}

impl KvDiskFaults for Faulty {
    fn before(&self, _: KvDiskOperation) -> io::Result<()> {
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        if number.is_multiple_of(self.stalls) {
            std::thread::sleep(Duration::from_millis(200));
        }
        match number.is_multiple_of(self.fails) {
            true => Err(io::Error::other("the disk fails")),
            false => Ok(()),
        }
    }
}

#[test]
fn damaged_and_failing_disks_change_no_answer() {
    let paths = ["gguf/llama_k/llama_k-Q4_K_M.gguf", "gguf/gpt_oss/gpt_oss-Q4_K_M.gguf"];
    let mut random = fastrand::Rng::with_seed(3);
    for path in paths.iter().filter_map(|name| fixture(name)) {
        let turns = alone(&path, &SessionOptions::default());
        let mut damaged = 0;
        for round in 0..8 {
            let folder = TempDir::new().unwrap();
            for (prompts, expected) in &turns {
                let faulty =
                    |fails, stalls| Faulty { operations: AtomicU32::new(0), fails, stalls };
                let options = KvDiskOptions {
                    faults: Some(Arc::new(match round % 4 {
                        0 => faulty(3, 1000),
                        1 => faulty(1000, 7),
                        _ => faulty(u32::MAX, u32::MAX),
                    })),
                    ..store(&folder)
                };
                let store = Arc::new(KvDiskStore::open(options).unwrap());
                let tiered = engine(&path, 64 << 20, SessionOptions::default());
                let mut tiered = with_disk(tiered, &store);
                let answers = ask(&mut tiered, prompts, b"");
                assert_eq!(tokens_of(&answers), tokens_of(expected), "{} {round}", path.display());
                tiered.write_kv(true, LONG).unwrap();
                damaged += tiered.kv_tiers().disk.unwrap().damaged_blocks;
                drop(tiered);
                drop(store);
                damage(&folder.path().join("kv"), round, &mut random);
            }
        }
        assert!(damaged > 0);
    }
}

/// Flips bytes, cuts segments or removes files.
fn damage(folder: &Path, round: usize, random: &mut fastrand::Rng) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_segment = path.extension().is_some_and(|extension| extension == "kv");
        match round {
            2 | 3 if is_segment => {
                let mut bytes = fs::read(&path).unwrap();
                for _ in 0..3 {
                    let at = random.usize(..bytes.len());
                    bytes[at] ^= 1 << random.u8(..8);
                }
                fs::write(&path, bytes).unwrap();
            }
            4 | 5 if is_segment => {
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(random.u64(..file.metadata().unwrap().len())).unwrap();
            }
            6 if !is_segment && path.extension().is_some_and(|of| of == "index") => {
                fs::remove_file(&path).unwrap();
            }
            7 if is_segment && random.bool() => fs::remove_file(&path).unwrap(),
            _ => {}
        }
    }
}
