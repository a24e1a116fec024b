//! Random calls with small pools, checked against the naive model after each call.

use proptest::prelude::*;

use super::super::GroupConfig;
use super::model::{MORE_MAX, World};

#[derive(Debug, Clone)]
enum Call {
    /// A prompt: the first tokens of one of three texts, then some others.
    Admit {
        text: u32,
        cut: usize,
        rest: Vec<u32>,
    },
    /// A pass of some sequences with these numbers of rows, for which some more are reserved.
    Pass {
        choices: Vec<(usize, usize)>,
        more: usize,
        tokens: Vec<u32>,
    },
    Truncate {
        choice: usize,
        share: f64,
    },
    Fork(usize),
    Release(usize),
    Save(usize),
    Preempt(usize),
    Restore(usize),
    AdmitAgain(usize),
    Forget(usize),
}

fn call() -> impl Strategy<Value = Call> {
    let choice = || 0..1000_usize;
    let tokens = |count| prop::collection::vec(0..2_u32, count);
    let passes = prop::collection::vec((choice(), 1..50_usize), 1..4);
    prop_oneof![
        4 => (0..3_u32, 0..130_usize, tokens(0..20))
            .prop_map(|(text, cut, rest)| Call::Admit { text, cut, rest }),
        14 => (passes, prop_oneof![3 => Just(0), 1 => 1..MORE_MAX], tokens(1..20))
            .prop_map(|(choices, more, tokens)| Call::Pass { choices, more, tokens }),
        2 => (choice(), 0.0..1.0).prop_map(|(choice, share)| Call::Truncate { choice, share }),
        2 => choice().prop_map(Call::Fork),
        2 => choice().prop_map(Call::Release),
        1 => choice().prop_map(Call::Save),
        1 => choice().prop_map(Call::Preempt),
        2 => choice().prop_map(Call::Restore),
        1 => choice().prop_map(Call::AdmitAgain),
        1 => choice().prop_map(Call::Forget),
    ]
}

fn groups() -> impl Strategy<Value = Vec<GroupConfig>> {
    let windows = prop::sample::select(vec![
        vec![None],
        vec![None, Some(20)],
        vec![Some(1), None],
        vec![Some(40)],
        vec![Some(16), Some(33)],
        vec![None, Some(17), Some(30)],
    ]);
    (windows, prop::collection::vec(2..40_usize, 3)).prop_map(|(windows, blocks)| {
        let group = |(window, blocks)| GroupConfig {
            window,
            blocks,
            on_device: 1 + blocks / 2,
            block_bytes: 1,
        };
        windows.into_iter().zip(blocks).map(group).collect()
    })
}

/// Returns an index of one of `all`, if there are any.
fn choose<T>(all: &[T], choice: usize) -> Option<usize> {
    (!all.is_empty()).then(|| choice % all.len())
}

fn make(world: &mut World, call: &Call) {
    match call {
        Call::Admit { text, cut, rest } => {
            let text = (0..*cut as u32).map(|position| (position / 5 + text * (position / 40)) % 7);
            world.admit(&text.chain(rest.iter().copied()).collect::<Vec<_>>());
        }
        Call::Pass { choices, more, tokens } => {
            let (mut chosen, mut rows) = (Vec::new(), Vec::new());
            for &(choice, count) in choices {
                if let Some(index) = choose(&world.sequences, choice)
                    && !chosen.contains(&index)
                {
                    chosen.push(index);
                    rows.push(1 + count % world.batch);
                }
            }
            world.pass(&chosen, &rows, *more, tokens);
        }
        Call::Truncate { choice, share } => {
            if let Some(index) = choose(&world.sequences, *choice) {
                let len = world.sequences[index].histories.len();
                world.truncate(index, (len as f64 * share.sqrt() * 1.05) as usize);
            }
        }
        Call::Fork(choice) => {
            choose(&world.sequences, *choice).into_iter().for_each(|index| world.fork(index));
        }
        Call::Release(choice) => {
            choose(&world.sequences, *choice).into_iter().for_each(|index| world.release(index));
        }
        Call::Save(choice) => {
            choose(&world.sequences, *choice).into_iter().for_each(|index| world.save(index));
        }
        Call::Preempt(choice) => {
            if let Some(index) = choose(&world.sequences, *choice) {
                world.save(index);
                world.release(index);
            }
        }
        Call::Restore(choice) => {
            choose(&world.saved, *choice).into_iter().for_each(|index| world.restore(index));
        }
        Call::AdmitAgain(choice) => {
            choose(&world.saved, *choice).into_iter().for_each(|index| world.admit_again(index));
        }
        Call::Forget(choice) => {
            if let Some(index) = choose(&world.saved, *choice) {
                world.saved.swap_remove(index);
            }
        }
    }
}

fn run(
    groups: &[GroupConfig],
    batch: usize,
    keeps: bool,
    calls: &[Call],
    check: bool,
) -> Vec<String> {
    let mut world = World::new(groups, batch, keeps);
    for call in calls {
        make(&mut world, call);
        if check {
            world.check();
        }
    }
    while !world.sequences.is_empty() {
        world.release(0);
    }
    world.check();
    assert!(world.manager.group_statistics().all(|statistics| statistics.referenced == 0));
    world.log
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_calls_agree_with_a_naive_model(
        groups in groups(),
        batch in 1..50_usize,
        keeps: bool,
        calls in prop::collection::vec(call(), 1..150),
    ) {
        let log = run(&groups, batch, keeps, &calls, true);
        prop_assert!(log == run(&groups, batch, keeps, &calls, false), "the same calls, other results");
    }
}
