//! Tests of sampling.

use super::*;

fn logits() -> Vec<f32> {
    vec![0.1, 3.0, 2.9, -1.0, 0.0]
}

fn choose(sampler: &mut Sampler, logits: &[f32], recent: &[u32]) -> u32 {
    sampler.choose(RowLogits::All(logits), recent, None).unwrap()
}

#[test]
fn temperature_zero_takes_the_likeliest() {
    let mut sampler = Sampler::new(Sampling::greedy());
    assert_eq!(choose(&mut sampler, &logits(), &[]), 1);
    assert_eq!(argmax(&logits()), 1);
    assert_eq!(argmax(&[1.0, 1.0]), 0);
}

#[test]
fn the_penalty_moves_the_choice() {
    let options = Sampling { repeat_penalty: 1.5, ..Sampling::greedy() };
    let mut sampler = Sampler::new(options);
    assert_eq!(choose(&mut sampler, &logits(), &[1, 1, 1]), 2);
}

#[test]
fn banned_tokens_are_never_chosen() {
    let ban = |ids: &[u32], until| Ban { ids: ids.to_vec(), until };
    let banned = vec![ban(&[1], Some(2)), ban(&[3, 4, 2], None), ban(&[0], None)];
    for temperature in [0.0, 5.0] {
        let options =
            Sampling { banned: banned.clone(), temperature, top_k: 0, ..Sampling::default() };
        let mut sampler = Sampler::new(options);
        assert_eq!(sampler.window(), 2);
        let first = choose(&mut sampler, &logits(), &[3, 4]);
        // The tokens before the answer do not count.
        assert!(first != 1 && first != 0 && (temperature > 0.0 || first == 2), "{first}");
        sampler.note(4);
        for _ in 0..50 {
            let next = choose(&mut sampler, &logits(), &[3, 4]);
            assert!(next != 2 && next != 0 && (temperature > 0.0 || next == 1), "{next}");
        }
    }
    // If nothing else is there, the answer goes on all the same.
    let options = Sampling { banned: vec![ban(&[0], None)], ..Sampling::default() };
    assert_eq!(choose(&mut Sampler::new(options), &[1.0], &[]), 0);
}

#[test]
fn penalties_count_generated_tokens_and_biases_reach_every_token() {
    // The first choice is 1, then 2 is likelier by 0.4 or 0.9, whatever the prompt was.
    for (presence, frequency, expected) in [
        (0.5, 0.0, [1, 2, 1]),
        (0.0, 0.5, [1, 2, 1]),
        (0.0, 0.05, [1, 1, 1]),
        (0.0, 0.0, [1, 1, 1]),
    ] {
        let options = Sampling {
            presence_penalty: presence,
            frequency_penalty: frequency,
            ..Sampling::greedy()
        };
        let mut sampler = Sampler::new(options);
        let chosen = [(); 3].map(|()| choose(&mut sampler, &logits(), &[1, 1, 1]));
        assert_eq!(chosen, expected, "{presence} {frequency}");
    }
    let mut resumed = Sampler::new(Sampling { presence_penalty: 0.5, ..Sampling::greedy() });
    resumed.note(1);
    assert_eq!(choose(&mut resumed, &logits(), &[]), 2);
    let biased = Sampling { logit_bias: vec![(3, 100.0)], ..Sampling::greedy() };
    assert_eq!(choose(&mut Sampler::new(biased), &logits(), &[]), 3);
    let banned = Sampling { logit_bias: vec![(1, -100.0), (9, 100.0)], ..Sampling::greedy() };
    assert_eq!(choose(&mut Sampler::new(banned), &logits(), &[]), 2);
}

#[test]
fn each_token_has_one_change_that_holds_all() {
    let options = Sampling {
        repeat_penalty: 2.0,
        repeat_window: 4,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(7, 1.0), (3, -2.0)],
        ..Sampling::greedy()
    };
    let mut sampler = Sampler::new(options);
    for id in [3, 3, 9] {
        sampler.note(id);
    }
    let mut changes = Vec::new();
    sampler.changes(&[1, 7, 3, 3, 9], &mut changes);
    let expected = [
        LogitChange { id: 3, divisor: 2.0, subtracted: 1.0, added: -2.0 },
        LogitChange { id: 7, divisor: 2.0, subtracted: 0.0, added: 1.0 },
        LogitChange { id: 9, divisor: 2.0, subtracted: 0.75, added: 0.0 },
    ];
    assert_eq!(changes, expected);
    assert_eq!(expected[0].apply(4.0), -1.0);
    assert_eq!(expected[0].apply(-4.0), -11.0);
}

/// Options with every rule of the choice, alone and together.
fn many_options() -> Vec<Sampling> {
    let mut many = vec![Sampling::greedy(), Sampling::default()];
    for top_k in [0, 3, 40, 300] {
        for (top_p, min_p) in [(1.0, 0.0), (0.9, 0.0), (1.0, 0.02), (0.97, 0.01)] {
            for temperature in [0.3, 1.0, 2.5] {
                let of = Sampling { top_k, top_p, min_p, temperature, ..Sampling::default() };
                let changed = Sampling {
                    repeat_penalty: 1.3,
                    presence_penalty: 0.2,
                    logit_bias: vec![(5, 2.0), (8, -3.0)],
                    ..of.clone()
                };
                many.extend([of, changed]);
            }
        }
    }
    many
}

#[test]
fn the_largest_decide_like_all() {
    let count: usize = 2000;
    let logits: Vec<f32> = (0..count).map(|i| ((i * 7919 % 997) as f32 - 400.0) / 60.0).collect();
    let every_third: Vec<u32> =
        (0..count.div_ceil(32)).map(|word| 0x4924_9249 << (word % 3)).collect();
    let few = [0x0f00_0a01];
    let (mut by_few, mut by_all) = (0, 0);
    for options in many_options() {
        for allowed in [None, Some(&every_third[..]), Some(&few[..])] {
            let (mut whole, mut other) =
                (Sampler::new(options.clone()), Sampler::new(options.clone()));
            let mut recent = vec![4, 8];
            for _ in 0..40 {
                let mut changes = Vec::new();
                other.changes(&recent, &mut changes);
                let mut changed = logits.clone();
                for change in &changes {
                    changed[change.id as usize] = change.apply(changed[change.id as usize]);
                }
                let of = |id: u32| allowed.is_none_or(|words| is_allowed(words, id));
                let all = changed.iter().copied().zip(0..).filter(|(_, id)| of(*id));
                let mut sorted: Vec<(f32, u32)> = all.collect();
                sorted.sort_by(by_logit);
                let Needs { count, total_at } = other.needs();
                let most = sorted[0].0;
                let total = total_at.map_or(f32::NAN, |at| total(&changed, allowed, most, at));
                let is_all = sorted.len() < count;
                let logits_of_few = &sorted[..count.min(sorted.len())];
                let largest = Largest { logits: logits_of_few, is_all, total };
                let expected = whole.choose(RowLogits::All(&logits), &recent, allowed).unwrap();
                let can = other.can_choose(&largest);
                let row = match can {
                    true => RowLogits::Largest(largest),
                    false => RowLogits::Changed(&changed),
                };
                let before = other.random_state();
                assert_eq!(other.choose(row, &recent, allowed), Some(expected), "{options:?}");
                assert_eq!(other.random_state() == before, options.temperature <= 0.0);
                *if can { &mut by_few } else { &mut by_all } += 1;
                recent.push(expected);
            }
        }
    }
    assert!(by_few > 8000 && by_all > 500, "{by_few} {by_all}");
}

#[test]
fn the_largest_are_those_of_a_sort() {
    let count = 5000;
    // Many equal values, zeros of both signs, and an end that fills no word.
    let logits: Vec<f32> = (0..count + 7)
        .map(|i| match i * 7919 % 211 {
            0 => -0.0,
            1 => 0.0,
            value => value as f32 / 7.0 - 15.0,
        })
        .collect();
    let masks = [
        None,
        Some(vec![0x5a5a_1234; 200]),
        Some(vec![u32::MAX; 50]),
        Some((0..157).map(|word| if word % 3 == 0 { u32::MAX } else { 0 }).collect::<Vec<_>>()),
    ];
    for mask in masks {
        let allows = |id: u32| match &mask {
            None => true,
            Some(words) => is_allowed(words, id),
        };
        let all = logits.iter().copied().zip(0..).filter(|(_, id)| allows(*id));
        let mut sorted: Vec<(f32, u32)> = all.collect();
        sorted.sort_by(by_logit);
        for count in [1, 2, 40, 300, 4000, 9000] {
            let mut kept = Vec::new();
            keep_largest(&logits, mask.as_deref(), count, &mut kept);
            kept.sort_by(by_logit);
            assert_eq!(kept, sorted[..count.min(sorted.len())], "{count}");
        }
    }
}

#[test]
fn only_allowed_tokens_are_chosen() {
    // Tokens 1 and 2 are the likeliest ones. Only 0 and 3 are allowed, then only 2.
    for (words, expected) in [([0b01001], 0), ([0b00100], 2)] {
        let mut sampler = Sampler::new(Sampling::greedy());
        assert_eq!(sampler.choose(RowLogits::All(&logits()), &[], Some(&words)), Some(expected));
    }
    let options = Sampling { temperature: 5.0, ..Sampling::default() };
    let mut sampler = Sampler::new(options);
    let draw = |()| sampler.choose(RowLogits::All(&logits()), &[], Some(&[0b11000])).unwrap();
    let drawn = [(); 200].map(draw);
    assert!(drawn.iter().all(|id| [3, 4].contains(id)) && drawn.contains(&4));
    // Ids behind the last word are not allowed.
    let mut sampler = Sampler::new(Sampling::greedy());
    let mut many = vec![0.0; 40];
    many[35] = 9.0;
    assert_eq!(sampler.choose(RowLogits::All(&many), &[], Some(&[u32::MAX])), Some(0));
    assert_eq!(sampler.choose(RowLogits::All(&many), &[], Some(&[0])), None);
}

#[test]
fn filters_limit_what_can_be_drawn() {
    let cases = [
        Sampling { top_k: 2, top_p: 1.0, min_p: 0.0, temperature: 5.0, ..Sampling::default() },
        Sampling { top_k: 0, top_p: 0.7, min_p: 0.0, temperature: 5.0, ..Sampling::default() },
        Sampling { top_k: 0, top_p: 1.0, min_p: 0.5, temperature: 5.0, ..Sampling::default() },
    ];
    for options in cases {
        let mut sampler = Sampler::new(options);
        let drawn: Vec<u32> = (0..400).map(|_| choose(&mut sampler, &logits(), &[])).collect();
        assert!(drawn.iter().all(|id| [1, 2].contains(id)));
        assert!(drawn.contains(&1) && drawn.contains(&2));
    }
}

#[test]
fn draws_follow_the_distribution_and_the_seed() {
    let options = Sampling {
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        temperature: 1.0,
        seed: 7,
        ..Sampling::default()
    };
    let logits = [0.0, (3.0f32).ln()];
    let mut first = Sampler::new(options.clone());
    let mut second = Sampler::new(options);
    let draws: Vec<u32> = (0..4000).map(|_| choose(&mut first, &logits, &[])).collect();
    let again: Vec<u32> = (0..4000).map(|_| choose(&mut second, &logits, &[])).collect();
    assert_eq!(draws, again);
    let ones = draws.iter().filter(|id| **id == 1).count() as f32 / 4000.0;
    assert!((ones - 0.75).abs() < 0.03, "{ones}");
}
