//! Tests files with the keys and values of a session: a session that takes them goes on as the one that wrote them.

mod support;

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;

use forebay_engine::{
    EngineError, GenerateOptions, KvCacheType, KvFileError, Session, SessionOptions,
};
use forebay_model::sampling::Sampling;
use support::{fixture, models, recurrent_models};

fn open(path: &Path, options: &SessionOptions) -> Session {
    let options = SessionOptions { context: Some(300), threads: Some(2), ..options.clone() };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

/// Generates from a random prompt of `count` tokens.
fn go_on(session: &mut Session, seed: u64, count: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    let vocabulary = session.vocab_size() as u32;
    let prompt: Vec<u32> = (0..count).map(|_| random.u32(..vocabulary)).collect();
    let sampling = Sampling { temperature: 1.5, seed, ..Sampling::greedy() };
    let options = GenerateOptions::exactly(20, sampling);
    let made = session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(made.tokens.len(), 20);
    made.tokens
}

fn written(session: &mut Session) -> Vec<u8> {
    let mut bytes = Vec::new();
    let count = session.write_kv(&mut bytes).unwrap();
    assert_eq!(count, bytes.len() as u64);
    bytes
}

#[test]
fn another_session_goes_on_with_the_same_bits() {
    let types = [KvCacheType::F16, KvCacheType::Q8_0];
    let models: Vec<_> = models().into_iter().chain(recurrent_models()).collect();
    for (path, kv_cache) in models.iter().flat_map(|path| types.map(|of| (path, of))) {
        let options = SessionOptions { kv_cache, ..SessionOptions::default() };
        let mut first = open(path, &options);
        go_on(&mut first, 1, 77);
        let kept = written(&mut first);
        let (tokens, cached) = (go_on(&mut first, 2, 30), first.cached_tokens().to_vec());
        let end = written(&mut first);

        let mut second = open(path, &options);
        go_on(&mut second, 9, 40);
        let count = second.read_kv(&mut kept.as_slice()).unwrap();
        assert_eq!(count, second.cached_tokens().len());
        assert_eq!(second.cached_tokens(), &cached[..count], "{}", path.display());
        assert_eq!(go_on(&mut second, 2, 30), tokens, "{}", path.display());
        assert!(written(&mut second) == end, "{}: other bytes", path.display());
        // A part of what was read can be dropped. Layers with a window may have to drop all.
        let left = second.truncate(count / 2);
        assert!(left == count / 2 || left == 0 && second.has_windows(), "{left} of {count}");
    }
}

#[test]
fn a_model_with_a_state_takes_back_little() {
    for path in recurrent_models() {
        let mut session = open(&path, &SessionOptions::default());
        go_on(&mut session, 1, 20);
        // Only the last pass can be taken back: otherwise everything is read again.
        let count = session.cached_tokens().len();
        assert_eq!(session.truncate(count), count);
        assert_eq!(session.truncate(count - 1), count - 1);
        assert_eq!(session.truncate(count - 5), 0);
    }
}

#[test]
fn other_bytes_are_refused_and_the_cache_is_empty_then() {
    let Some(path) = fixture("models/qwen3_moe") else { return };
    let mut session = open(&path, &SessionOptions::default());
    go_on(&mut session, 1, 50);
    let kept = written(&mut session);
    let mut refused = |bytes: &[u8], reason: &str| {
        go_on(&mut session, 3, 20);
        let error = session.read_kv(&mut &bytes[..]).unwrap_err();
        assert!(matches!(error, EngineError::KvFile(KvFileError::Bad { .. })), "{error:?}");
        assert!(error.to_string().contains(reason), "{error} does not say: {reason}");
        assert!(session.cached_tokens().is_empty());
    };
    for len in [0, 7, 12, 40, kept.len() / 2, kept.len() - 1] {
        refused(&kept[..len], "cut off");
    }
    refused(b"{\"messages\": []}", "first bytes");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..20 {
        let mut wrong = kept.clone();
        // The header's own bytes may give other reasons.
        let at = random.usize(kept.len() - 3000..kept.len());
        wrong[at] ^= 1 << random.u32(..8);
        refused(&wrong, "checksum");
    }
    refused(&[kept.as_slice(), b"x"].concat(), "checksum");
    let mut long = kept.clone();
    long[8..16].fill(0xff);
    refused(&long, "header is too long");
    assert_eq!(session.read_kv(&mut kept.as_slice()).unwrap(), 69);

    if let Some(path) = fixture("models/mixtral") {
        let mut other = open(&path, &SessionOptions::default());
        let error = other.read_kv(&mut kept.as_slice()).unwrap_err();
        assert!(error.to_string().contains("another model"), "{error}");
    }
    let options = SessionOptions { kv_cache: KvCacheType::Q8_0, ..SessionOptions::default() };
    let error = open(&path, &options).read_kv(&mut kept.as_slice()).unwrap_err();
    assert!(error.to_string().contains("type of keys and values"), "{error}");
    // The number of threads makes no difference.
    let options =
        SessionOptions { context: Some(60), threads: Some(3), ..SessionOptions::default() };
    let mut small = Session::open(&path, &options, &mut |_, _| {}).unwrap();
    let error = small.read_kv(&mut kept.as_slice()).unwrap_err();
    assert!(error.to_string().contains("the context holds 60"), "{error}");
}

/// Fails after some bytes, as a disk may.
struct Failing<'a>(&'a [u8]);

impl Read for Failing<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.0.read(bytes)? {
            0 => Err(io::Error::other("the disk is gone")),
            read => Ok(read),
        }
    }
}

#[test]
fn a_disk_that_fails_is_named_and_the_session_stays_usable() {
    let Some(path) = fixture("models/qwen3_moe") else { return };
    let mut session = open(&path, &SessionOptions::default());
    let tokens = go_on(&mut session, 1, 50);
    let kept = written(&mut session);
    for len in [4, 100, kept.len() / 2, kept.len() - 4] {
        let error = session.read_kv(&mut Failing(&kept[..len])).unwrap_err();
        assert!(error.to_string().contains("the disk is gone"), "{error}");
        assert!(session.cached_tokens().is_empty());
        assert_eq!(go_on(&mut session, 1, 50), tokens);
    }
}
