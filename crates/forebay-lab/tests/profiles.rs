//! Sessions follow routing profiles.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use forebay_engine::{EngineError, RoutingError, RoutingSource, Session, SessionOptions};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::OutputFile;
use forebay_stream::routing::{Phase, RoutingProfile, read};

/// Bytes of a recording, which the session writes.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens a tiny model whose tokens use so many of 16 experts.
fn session(used: u32) -> (tempfile::TempDir, Session) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let options = SynthOptions {
        quantisation: Some("Q8_0".into()),
        experts_used: Some(used),
        ..SynthOptions::default()
    };
    let out = OutputFile::replace(&path).unwrap();
    synthesize("qwen3moe-tiny", out, &options, &mut |_, _| true).unwrap();
    let options = SessionOptions { context: Some(128), threads: Some(2), ..Default::default() };
    let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
    (folder, session)
}

#[test]
fn a_session_follows_a_profile() {
    let profile = RoutingProfile::find("qwen3.8-flash-next").unwrap();
    let (_folder, mut session) = session(1);
    session.follow_routing(RoutingSource::Profile(profile)).unwrap();
    let expected = session.profiled(profile).unwrap();
    let written = Written::default();
    session.record_routing(Box::new(written.clone()), false).unwrap();
    session.bench(8, 40, 0, 1).unwrap();
    session.end_routing().unwrap();
    let bytes = written.0.lock().unwrap().clone();
    let trace = read(bytes.as_slice()).unwrap();
    let generated = trace.batches().filter(|batch| batch.phase == Phase::Generate);
    let tokens: Vec<usize> = generated.flat_map(|batch| batch.tokens).collect();
    assert!(tokens.len() >= 39, "{}", tokens.len());
    for (number, &token) in tokens.iter().enumerate() {
        for layer in 0..trace.header().layers.len() {
            assert!(trace.experts(token, layer).eq(expected.experts(number, layer)), "{token}");
        }
    }
}

#[test]
fn a_profile_that_a_model_cannot_have_is_refused() {
    let profile = RoutingProfile::find("qwen3.8-flash-next").unwrap();
    let (_folder, mut session) = session(4);
    let error = session.follow_routing(RoutingSource::Profile(profile)).unwrap_err();
    assert!(matches!(&error, EngineError::Routing(RoutingError::Profile(_))), "{error}");
    assert!(error.to_string().contains("of 16 experts, a token cannot use 4"), "{error}");
}
