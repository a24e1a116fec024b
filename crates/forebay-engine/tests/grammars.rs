//! Tests of answers that follow a grammar: they are valid, do not depend on other requests, and take the likeliest allowed
//! tokens.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{EngineOptions, Event, Request, RequestEnd, SnapshotError};
use forebay_engine::{Engine, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_grammar::{Compiler, Grammar, Rules};
use forebay_model::sampling::Sampling;
use forebay_text::Tokenizer;
use serde_json::{Value, json};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-moe-sticky-Q4_K_M.gguf")
}

fn open(sequences: usize, kv_ram_bytes: Option<u64>) -> Session {
    let options = SessionOptions {
        context: Some(448),
        threads: Some(2),
        sequences,
        kv_ram_bytes,
        ..SessionOptions::default()
    };
    Session::open(&demo(), &options, &mut |_, _| {}).unwrap()
}

const ONLY: &str =
    "a very long text that is the only one and goes on until there is no more to be said";

/// A schema whose names are long, so that most tokens of an answer are forced.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name_of_the_person_who_lived_in_the_old_house_at_the_end_of_the_road": { "type": "string", "maxLength": 12 },
            "number_of_children_who_played_in_the_garden_behind_the_old_house": { "type": "integer", "minimum": 0, "maximum": 20 },
            "lives_in_the_forest_on_the_other_side_of_the_river_and_the_hill": { "type": "boolean" },
        },
        "required": ["name_of_the_person_who_lived_in_the_old_house_at_the_end_of_the_road", "number_of_children_who_played_in_the_garden_behind_the_old_house", "lives_in_the_forest_on_the_other_side_of_the_river_and_the_hill"],
        "additionalProperties": false,
    })
}

fn requests(tokenizer: &Arc<Tokenizer>) -> Vec<(Request, Option<Grammar>)> {
    let compiler = Compiler::new(tokenizer);
    let compile = |rules: Rules| compiler.compile(&rules, None).unwrap();
    let grammars = [
        Some(compile(Rules::JsonSchema(schema()))),
        Some(compile(Rules::Regex("The (old|young) (king|queen) had [1-9] horses\\.".into()))),
        None,
        Some(compile(Rules::JsonSchema(schema()))),
        Some(compile(Rules::one_of([ONLY]))),
    ];
    let of = |(number, grammar): (usize, Option<Grammar>)| {
        let text = ["Once upon a time", "The king", "A fox"][number % 3];
        let sampling = match number {
            3 => Sampling { seed: 5, temperature: 1.5, ..Sampling::default() },
            _ => Sampling::greedy(),
        };
        let options =
            GenerateOptions { max_tokens: Some(400), sampling, ..GenerateOptions::default() };
        let prompt = tokenizer.encode(text, true, false).unwrap();
        let request = Request { prompt, options, grammar: grammar.clone(), ..Request::default() };
        (request, grammar)
    };
    grammars.into_iter().enumerate().map(of).collect()
}

/// Runs requests, each submitted so many steps after the one before. Returns their tokens and ends, and the passes of each.
fn run(
    engine: &mut Engine,
    requests: impl IntoIterator<Item = Request>,
    steps_between: usize,
) -> Vec<(Vec<u32>, RequestEnd, usize)> {
    let answers = Arc::new(Mutex::new(Vec::new()));
    for (index, request) in requests.into_iter().enumerate() {
        answers.lock().unwrap().push((Vec::new(), RequestEnd::Cancelled, 0));
        let answers = answers.clone();
        let sink = Box::new(move |event: Event| {
            let answer = &mut answers.lock().unwrap()[index];
            match event {
                Event::Token(token) => answer.0.push(token.id),
                Event::Finished { end, statistics, .. } => {
                    assert_eq!(statistics.generated_tokens, answer.0.len());
                    (answer.1, answer.2) = (end, statistics.passes);
                }
            }
            ControlFlow::Continue(())
        });
        engine.submit(request, sink).unwrap();
        (0..steps_between).for_each(|_| assert!(engine.step().unwrap()));
    }
    engine.drain().unwrap();
    std::mem::take(&mut *answers.lock().unwrap())
}

fn is_valid(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    value["name_of_the_person_who_lived_in_the_old_house_at_the_end_of_the_road"]
        .as_str()
        .is_some_and(|name| name.chars().count() <= 12)
        && value["number_of_children_who_played_in_the_garden_behind_the_old_house"]
            .as_u64()
            .is_some_and(|number| number <= 20)
        && value["lives_in_the_forest_on_the_other_side_of_the_river_and_the_hill"].is_boolean()
        && value.as_object().is_some_and(|fields| fields.len() == 3)
}

#[test]
fn answers_follow_their_grammar_alone_and_beside_others() {
    let mut engine = Engine::new(open(1, None), &EngineOptions::default());
    let tokenizer = engine.session().shared_tokenizer().unwrap();
    let all = requests(&tokenizer);
    let alone: Vec<_> =
        all.iter().flat_map(|(request, _)| run(&mut engine, [request.clone()], 0)).collect();
    let texts: Vec<String> = alone.iter().map(|(ids, _, _)| tokenizer.decode(ids, false)).collect();
    for index in [0, 3] {
        assert!(is_valid(&texts[index]), "{}", texts[index]);
        assert_eq!(alone[index].1, RequestEnd::End);
        // Forced tokens are computed together.
        let (tokens, passes) = (alone[index].0.len(), alone[index].2);
        assert!(passes + 12 < tokens, "{passes} passes for {tokens} tokens");
    }
    assert!(texts[1].starts_with("The ") && texts[1].ends_with(" horses."), "{}", texts[1]);
    assert_eq!(texts[4], ONLY);

    // Beside others, and one at a time where each one suspends the one before, in the middle of forced tokens or not.
    for (sequences, steps, kv_ram_bytes) in
        [(5, 0, None), (5, 3, None), (1, 2, None), (1, 3, Some(0)), (1, 5, Some(0))]
    {
        let session = open(sequences, kv_ram_bytes);
        let mut engine = Engine::new(session, &EngineOptions::default());
        let of_rank = |(rank, (request, _)): (usize, &(Request, Option<Grammar>))| {
            let priority = if sequences == 1 { rank as i32 } else { 0 };
            Request { priority, ..request.clone() }
        };
        let together = run(&mut engine, all.iter().enumerate().map(of_rank), steps);
        for (index, (own, other)) in alone.iter().zip(&together).enumerate() {
            assert_eq!((&own.0, &own.1), (&other.0, &other.1), "{index}, {sequences}, {steps}");
        }
        let statistics = engine.statistics();
        assert_eq!(statistics.suspended > 0, sequences == 1);
        assert_eq!(statistics.computed_again > 0, kv_ram_bytes == Some(0));
    }
}

#[test]
fn the_likeliest_allowed_token_is_chosen() {
    let mut engine = Engine::new(open(1, None), &EngineOptions::default());
    let tokenizer = engine.session().shared_tokenizer().unwrap();
    let (request, grammar) = requests(&tokenizer).swap_remove(0);
    let answer = run(&mut engine, [request.clone()], 0).remove(0).0;
    let mut session = engine.into_session();
    let (mut matcher, mut mask, mut chosen) = (grammar.unwrap().begin(), Vec::new(), 0);
    let mut tokens = request.prompt;
    let vocabulary = session.vocab_size();
    for id in answer {
        matcher.mask(&mut mask).unwrap();
        let allows = |id: usize| mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        assert!(allows(id as usize));
        let logits = session.logits(&tokens, None).unwrap();
        let last = &logits[logits.len() - vocabulary..];
        let best =
            (0..vocabulary).filter(|id| allows(*id)).map(|id| last[id]).fold(f32::MIN, f32::max);
        // Rows of a prompt and generated rows round differently.
        let is_best = last[id as usize] >= best - 0.02 * best.abs().max(1.0);
        // Of a text that is forced, the tokenizer's own tokens are taken, even if others are likelier.
        let forced = (0..vocabulary).filter(|id| allows(*id)).count() == 1;
        assert!(is_best || forced || matcher.forced().contains(&id), "{id} after {tokens:?}");
        chosen += usize::from(is_best && !forced);
        matcher.accept(id).unwrap();
        tokens.push(id);
    }
    assert!(chosen > 3, "the model chose {chosen} tokens");
}

#[test]
fn limits_of_requests_with_a_grammar() {
    let mut engine = Engine::new(open(2, None), &EngineOptions::default());
    let tokenizer = engine.session().shared_tokenizer().unwrap();
    let all = requests(&tokenizer);
    // A limit within forced tokens cuts them. With as many tokens as it has, the answer is complete.
    let (text, _) = &all[4];
    let whole = run(&mut engine, [text.clone()], 0).remove(0);
    for (limit, end) in [
        (3, RequestEnd::MaxTokens),
        (whole.0.len() - 1, RequestEnd::MaxTokens),
        (whole.0.len(), RequestEnd::End),
    ] {
        let mut request = text.clone();
        request.options.max_tokens = Some(limit);
        let cut = run(&mut engine, [request], 0).remove(0);
        assert_eq!((cut.0.as_slice(), cut.1), (&whole.0[..limit], end));
    }
    // With probabilities, every token is chosen and has one.
    let mut request = all[0].0.clone();
    request.logprobs = Some(1);
    let tokens = Arc::new(Mutex::new(0));
    let counted = tokens.clone();
    let sink = Box::new(move |event: Event| {
        if let Event::Token(token) = event {
            assert!(token.logprob.is_some());
            *counted.lock().unwrap() += 1;
        }
        ControlFlow::Continue(())
    });
    let id = engine.submit(request, sink).unwrap();
    assert!(matches!(engine.snapshot(id), Err(EngineError::Snapshot(SnapshotError::None))));
    assert!(engine.step().unwrap());
    assert!(matches!(engine.snapshot(id), Err(EngineError::Snapshot(SnapshotError::None))));
    engine.drain().unwrap();
    assert!(*tokens.lock().unwrap() > 10);
}

/// Returns a grammar whose parser reaches its limit behind eight digits.
fn stuck() -> Rules {
    let choices: Vec<String> = (0..2500).map(|number| format!("\"x{number}\" tail")).collect();
    let choices = choices.join(" | ");
    Rules::Lark(format!(
        "start: NUMBER choice\nNUMBER: /[0-9]{{8}}\\./\nchoice: {choices}\ntail: \"y\" | \"y\" tail"
    ))
}

#[test]
fn a_grammar_that_cannot_go_on_ends_its_own_answer_alone() {
    let mut engine = Engine::new(open(2, None), &EngineOptions::default());
    let tokenizer = engine.session().shared_tokenizer().unwrap();
    let mut all = requests(&tokenizer);
    let (fine, _) = all.swap_remove(4);
    let mut wrong = fine.clone();
    wrong.grammar = Some(Compiler::new(&tokenizer).compile(&stuck(), None).unwrap());
    let answers = run(&mut engine, [wrong, fine], 0);
    let (tokens, end, _) = &answers[0];
    assert!(matches!(end, RequestEnd::GrammarStuck(why) if !why.is_empty()), "{end:?}");
    let text = tokenizer.decode(tokens, false);
    assert!(text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_digit()), "{text:?}");
    assert_eq!(answers[1].1, RequestEnd::End);
    assert_eq!(tokenizer.decode(&answers[1].0, false), ONLY);
}
