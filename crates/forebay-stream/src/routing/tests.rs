use super::*;

use std::io::Read as _;

fn header(weights: bool, scores: bool) -> RoutingHeader {
    let layers = vec![
        RoutingLayer { experts: 0, used: 0, expert_bytes: 0 },
        RoutingLayer { experts: 6, used: 2, expert_bytes: 100 },
        RoutingLayer { experts: 4, used: 1, expert_bytes: 70 },
    ];
    let header = RoutingHeader::new("m".into(), "a".into(), layers, LookupOrder::Ascending);
    RoutingHeader { weights, scores, tokenizer: Some("00ff".into()), ..header }
}

/// Returns a trace of two prompts with an answer each.
fn sample(weights: bool, scores: bool) -> RoutingTrace {
    let mut trace = RoutingTrace::new(header(weights, scores));
    let mut push = |phase, choices: &[u16]| {
        let tokens = choices.len() / 3;
        let weight_rows: Vec<f32> = choices.iter().map(|&id| f32::from(id % 7) / 8.0).collect();
        let score_rows: Vec<f32> = (0..10 * tokens).map(|value| value as f32 - 4.5).collect();
        let rows = Rows {
            tokens,
            choices,
            weights: if weights { &weight_rows } else { &[] },
            scores: if scores { &score_rows } else { &[] },
        };
        if phase == Phase::Prompt {
            trace.begin_turn(Turn { prompt_hash: Some(7), prompt_tokens: tokens as u32 });
        }
        trace.push(phase, rows).unwrap();
    };
    push(Phase::Prompt, &[5, 0, 3, 0, 1, NONE]);
    push(Phase::Generate, &[4, 5, 2]);
    push(Phase::Prompt, &[1, 2, 0]);
    push(Phase::Generate, &[2, 1, 0]);
    push(Phase::Generate, &[2, 3, 1]);
    trace
}

fn uncompressed(trace: &RoutingTrace) -> Vec<u8> {
    let mut bytes = Vec::new();
    let file = trace.write(Vec::new()).unwrap();
    zstd::Decoder::new(file.as_slice()).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn what_is_written_is_read() {
    for (weights, scores) in [(false, false), (true, false), (true, true)] {
        let trace = sample(weights, scores);
        let file = trace.write(Vec::new()).unwrap();
        assert_eq!(read(file.as_slice()).unwrap(), trace);
        assert_eq!(read_any(file.as_slice()).unwrap(), trace);
        let last = trace.batch(4);
        assert_eq!((last.phase, last.turn, last.tokens), (Phase::Generate, 1, 5..6));
        let chosen: Vec<u32> = trace.experts(0, 1).map(|expert| expert.0).collect();
        assert_eq!(chosen, [5, 0]);
        assert_eq!(trace.experts(1, 2).count(), 0, "that token left the layer out");
        assert_eq!(trace.weights(0, 1).len(), if weights { 2 } else { 0 });
        assert_eq!(trace.scores(1, 2).len(), if scores { 4 } else { 0 });
    }
}

#[test]
fn the_csv_form_and_back() {
    let trace = sample(true, false);
    let mut text = Vec::new();
    trace.write_csv(&mut text).unwrap();
    let back = read_any(text.as_slice()).unwrap();
    assert_eq!(back.tokens(), trace.tokens());
    assert_eq!(back.batches().collect::<Vec<_>>(), trace.batches().collect::<Vec<_>>());
    for token in 0..trace.tokens() {
        for layer in 0..3 {
            assert!(back.experts(token, layer).eq(trace.experts(token, layer)));
            let named = trace.experts(token, layer).count();
            assert_eq!(back.weights(token, layer)[..named], trace.weights(token, layer)[..named]);
        }
    }
}

#[test]
fn a_recorder_cuts_batches_as_the_engine_does() {
    use std::sync::{Arc, Mutex};
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let out = Shared::default();
    let mut recorder = RoutingRecorder::new(Box::new(out.clone()), header(true, true)).unwrap();
    recorder.turn(&[1, 2, 3]).unwrap();
    // [3 tokens, 3 layers, 2]; the first layer is dense, and the third uses one expert.
    let experts = [-1, -1, 5, 4, 3, -1, -1, -1, 0, 1, 2, -1, -1, -1, 3, 2, 1, -1];
    let weights: Vec<f32> = (0..18).map(|value| value as f32).collect();
    // Six and four experts in the two layers that have any.
    let scores: Vec<f32> = (0..30).map(|value| value as f32).collect();
    recorder.record(Phase::Prompt, &experts, &weights, &scores, 2).unwrap();
    let (experts, weights) = (&experts[..6], &weights[..6]);
    recorder.record(Phase::Generate, experts, weights, &scores[10..20], 2).unwrap();
    let without = recorder.record(Phase::Generate, experts, weights, &[], 2).unwrap_err();
    assert!(without.to_string().contains("0 scores for 1 tokens, not 10"), "{without}");
    recorder.finish().unwrap();
    let trace = read(out.0.lock().unwrap().as_slice()).unwrap();
    let batches: Vec<_> = trace.batches().map(|batch| batch.tokens).collect();
    assert_eq!(batches, [0..2, 2..3, 3..4]);
    assert_eq!(trace.turns()[0].prompt_tokens, 3);
    assert!(trace.experts(2, 1).eq([ExpertIndex(3), ExpertIndex(2)]));
    assert_eq!(trace.weights(2, 1), [14.0, 15.0]);
    assert_eq!(trace.weights(1, 2), [10.0]);
    assert_eq!(trace.scores(2, 1), [20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
    assert_eq!(trace.scores(3, 2), [16.0, 17.0, 18.0, 19.0]);
}

#[test]
fn a_trace_that_is_cut_anywhere_is_refused() {
    let bytes = uncompressed(&sample(true, true));
    for end in 0..bytes.len() {
        let error = read_uncompressed(&bytes[..end]).unwrap_err().to_string();
        assert!(error.contains("cut off") || error.contains("no routing trace"), "{end}: {error}");
    }
    let file = sample(true, true).write(Vec::new()).unwrap();
    for end in 0..file.len() {
        assert!(read(&file[..end]).is_err(), "{end}");
    }
    let longer = [bytes.as_slice(), b"x"].concat();
    assert!(read_uncompressed(longer.as_slice()).unwrap_err().to_string().contains("follows"));
}

#[test]
fn damage_is_named() {
    let good = uncompressed(&sample(true, false));
    let body = good.windows(2).rposition(|pair| pair == [b'}', TURN]).unwrap() + 1;
    // The turn takes 14 bytes. Tag, phase, tokens, choices and weights follow.
    let batch = body + 14;
    let change = |at: usize, bytes: &[u8]| {
        let mut damaged = good.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        read_uncompressed(damaged.as_slice()).unwrap_err().to_string()
    };
    assert!(change(batch, &[9]).contains("kind 9"));
    assert!(change(batch + 1, &[2]).contains("phase 2"));
    assert!(change(batch + 2, &u32::MAX.to_le_bytes()).contains("4294967295 tokens"));
    assert!(change(batch + 2, &(1_u32 << 24).to_le_bytes()).contains("cut off"));
    assert!(change(batch + 6, &6_u16.to_le_bytes()).contains("expert 6 of layer 1"));
    assert!(change(batch + 6, &[0, 0, 0, 0]).contains("twice"));
    assert!(change(batch + 18, &f32::NAN.to_le_bytes()).contains("not finite"));
    let end = good.len() - 24;
    assert!(change(end + 16, &(1_u64 << 40).to_le_bytes()).contains("1099511627776"));
    assert!(change(0, b"x").contains("no routing trace"));
    assert!(change(16, &u32::MAX.to_le_bytes()).contains("4294967295 bytes"));
}

use super::writer::TURN;

#[test]
fn headers_that_no_model_has_are_refused() {
    let with = |change: fn(&mut RoutingHeader)| {
        let mut header = header(false, false);
        change(&mut header);
        RoutingWriter::new(Vec::new(), header).err().map(|error| error.to_string())
    };
    assert_eq!(with(|_| {}), None);
    let layer = RoutingLayer { experts: 4, used: 2, expert_bytes: 1 };
    for (change, why) in [
        ((|h| h.layers[1].experts = 70_000) as fn(&mut RoutingHeader), "70000 experts"),
        (|h| h.layers[1].used = 9, "9 of 6"),
        (|h| h.layers[1].expert_bytes = 1 << 50, "bytes"),
        (|h| h.layers.clear(), "0 of 0"),
    ] {
        assert!(with(change).unwrap().contains(why), "{why}");
    }
    let mut many = header(false, false);
    many.layers = vec![layer; 5000];
    assert!(RoutingWriter::new(Vec::new(), many).is_err());
    let text = |version: &str| {
        let json = format!("{{\"format\":\"forebay-routing\",\"version\":{version}}}");
        let mut bytes = b"forebay-routing\n".to_vec();
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend(json.bytes());
        read_uncompressed(bytes.as_slice()).unwrap_err().to_string()
    };
    assert!(text("2").contains("version 2"));
    assert!(text("1").contains("missing field"));
}

const CSV: &str = "# route_trace v1\n# model=x arch=y n_layer=2 n_expert=4 n_expert_used=2\n\
    # layer=1 expert_bytes=10\nturn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

#[test]
fn broken_csv_is_refused_with_its_line() {
    let trace = RoutingTrace::from_csv(format!("{CSV}0,0,0,1,0,3,0.5,0,10\n").as_bytes()).unwrap();
    assert_eq!(trace.header().layer_sizes(), [(0, 0), (4, 10)]);
    assert_eq!((trace.tokens(), trace.batches().count()), (1, 1));
    for (row, why) in [
        ("0,0,0,1,0", "expert is missing"),
        ("0,2,0,1,0,1", "phase 2"),
        ("0,0,0,1,0,4", "4 experts"),
        ("0,0,0,1,2,1", "uses 2"),
        ("0,0,0,7,0,1", "0 experts"),
        ("0,0,0,18446744073709551615,0,1", "0 experts"),
        ("0,0,x,1,0,1", "not a number"),
        ("0,0,0,1,0,1,NaN", "NaN"),
        ("0,0,0,1,0,1,inf", "inf"),
        ("0,0,0,1,0,1,half", "half"),
        ("# layer=99999999 expert_bytes=1", "as number of a layer"),
        ("# n_expert=4000000000", "experts in a layer"),
        ("# layer=0 expert_bytes=99999999999999", "bytes of an expert"),
        ("{\"json\": 1}", "not a number"),
    ] {
        let error = RoutingTrace::from_csv(format!("{CSV}{row}\n").as_bytes()).unwrap_err();
        assert!(matches!(error, RoutingError::Line { line: 5, .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
    let twice = format!("{CSV}0,0,0,1,0,3,0.5\n0,0,0,1,0,2,0.5\n");
    assert!(RoutingTrace::from_csv(twice.as_bytes()).unwrap_err().to_string().contains("twice"));
    assert!(read_any(&b""[..]).is_err());
    assert!(read_any(&b"\xff\xfe\x00\x01\n"[..]).unwrap_err().to_string().contains("no text"));
}

#[test]
fn far_fetched_steps_take_no_memory() {
    let mut text = "# n_expert=60000 n_expert_used=8000\n# layer=0 expert_bytes=1\n".to_owned();
    for step in 0..100_000_u64 {
        text.push_str(&format!("0,0,{},0,0,1\n", step << 20));
    }
    let error = RoutingTrace::from_csv(text.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("are missing"), "{error}");
}
