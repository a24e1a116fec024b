//! Compares the choice of experts and the sorting of pairs with the CPU.

use anyhow::Result;
use forebay_compute::RouterRule;
use forebay_cuda::{
    DECODE_ROWS, DeviceMatrix, DeviceMemory, DevicePtr, MatvecInput, NO_EXPERT, Pairing,
    RouterChoice, RouterMatrix, RouterOutputs, SortedPairs, TokenExperts,
};
use forebay_format::TensorType;
use forebay_ops::{RouterGroups, Scoring};

use super::alone::ROW_COUNTS;
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;
use crate::weights::random_weights;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("router choice", choices),
        Check::new("router weighs experts of a table", by_token),
        Check::new("router of few tokens at once", at_once),
        Check::new("router rows alone", alone),
        Check::new("router reports what is not finite", reports),
        Check::new("router pairs sorted", sorted),
    ]
}

pub fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    for (experts, k) in [(128, 8), (256, 8)] {
        for tokens in [1, 512] {
            benches.push(Bench::new(format!("router choice {tokens}x{k} of {experts}"), {
                move |context| bench_choice(context, tokens, experts, k)
            }));
            benches.push(Bench::new(format!("router sort {tokens}x{k} of {experts}"), {
                move |context| bench_sort(context, tokens, experts, k)
            }));
        }
    }
    benches
}

#[derive(Clone, Copy, Debug)]
struct Case {
    tokens: usize,
    experts: usize,
    k: usize,
    scoring: Scoring,
    renormalise: bool,
    bias: bool,
    logit_bias: bool,
    /// True if every expert has a factor.
    scales: bool,
    /// Number of groups, of groups that are kept, and of experts that count for a group's score.
    groups: Option<(usize, usize, usize)>,
    /// Number of the last experts, which every token uses.
    always: usize,
}

fn choices(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let plain = Case {
        tokens: 33,
        experts: 128,
        k: 8,
        scoring: Scoring::Softmax,
        renormalise: true,
        bias: false,
        logit_bias: false,
        scales: false,
        groups: None,
        always: 0,
    };
    let sigmoid = Case { scoring: Scoring::Sigmoid, bias: true, ..plain };
    let cases = [
        plain,
        Case { tokens: 1, renormalise: false, ..plain },
        Case { experts: 8, k: 2, ..plain },
        Case { experts: 5, k: 5, renormalise: false, ..plain },
        Case { experts: 1, k: 1, ..plain },
        Case { experts: 60, k: 4, ..plain },
        Case { experts: 129, k: 1, ..plain },
        Case { experts: 512, k: 32, ..plain },
        Case { experts: 32, k: 32, scoring: Scoring::Sigmoid, ..plain },
        sigmoid,
        Case { experts: 256, groups: Some((8, 4, 2)), ..sigmoid },
        Case { experts: 256, logit_bias: true, groups: Some((8, 4, 2)), ..sigmoid },
        // DeepSeek-V2 and DeepSeek-V2-Lite.
        Case { experts: 160, k: 6, renormalise: false, groups: Some((8, 3, 1)), ..plain },
        Case { experts: 64, k: 6, renormalise: false, ..plain },
        // gpt-oss: renormalising a softmax over all experts gives a softmax over the chosen ones.
        Case { experts: 32, k: 4, logit_bias: true, ..plain },
        Case { experts: 128, k: 4, logit_bias: true, ..plain },
        Case { experts: 64, k: 8, groups: Some((32, 5, 2)), ..sigmoid },
        Case { experts: 384, k: 8, groups: Some((1, 1, 3)), ..sigmoid },
        // Gemma 4.
        Case { experts: 128, k: 8, scales: true, ..plain },
        // DeepSeek-V4.
        Case { experts: 256, k: 6, scoring: Scoring::SqrtSoftplus, ..sigmoid },
        Case { experts: 128, k: 8, scoring: Scoring::SigmoidOfChosen, ..plain },
        // Inkling.
        Case { experts: 130, k: 8, always: 2, ..sigmoid },
        Case { experts: 9, k: 3, always: 1, ..plain },
        Case { experts: 5, k: 3, always: 3, ..sigmoid },
        // PhiMoE. With many experts, some logits are near the largest.
        Case { experts: 16, k: 2, scoring: Scoring::SparseMixer, renormalise: false, ..plain },
        Case { experts: 512, k: 32, scoring: Scoring::SparseMixer, renormalise: false, ..plain },
    ];
    for case in cases {
        for ties in [false, true] {
            let mut next = choice(context, &case, ties)?;
            next.place.insert_str(0, &format!("{case:?} ties {ties}: "));
            outcome = outcome.worse(next);
        }
    }
    Ok(outcome)
}

/// Returns random logits. If `ties` is true, they have only nine different values.
fn logits(case: &Case, ties: bool) -> Vec<f32> {
    let mut random = Random::new((case.experts * case.k) as u64);
    let logits = random.gaussians(case.tokens * case.experts);
    let rounded = |x: f32| if ties { (x * 2.0).round().clamp(-4.0, 4.0) } else { x * 3.0 };
    logits.into_iter().map(rounded).collect()
}

fn choice(context: &Context, case: &Case, ties: bool) -> Result<Outcome> {
    let Case { tokens, experts, k, .. } = *case;
    let gpu = &context.gpu;
    let mut logits = logits(case, ties);
    let device = context.upload(&logits)?;
    let biases = Biases::random(context, experts)?;
    if case.logit_bias {
        context.cpu.add_bias_rows(&mut logits, &biases.logits);
    }
    let rule = RouterRule {
        logit_scale: 1.0,
        scoring: case.scoring,
        always: case.always,
        renormalise: case.renormalise,
        scale: 2.5,
        expert_scales: case.scales.then_some(&biases.logits[..]),
        correction_bias: case.bias.then_some(&biases.scores[..]),
        groups: case.groups.map(|(n_groups, groups_kept, experts_scored)| RouterGroups {
            n_groups,
            groups_kept,
            experts_scored,
        }),
    };
    let (mut expected_ids, mut expected) = (vec![0; tokens * k], vec![0.0; tokens * k]);
    context.cpu.route(&rule, &logits, experts, k, &mut expected_ids, &mut expected)?;

    let (ids, weights) = (context.poisoned(tokens * k)?, context.poisoned(tokens * k)?);
    let flag = context.upload(&[u32::MAX])?;
    let choice = biases.choice(case);
    gpu.route(&choice, device.ptr(), &outputs(&ids, &weights, &flag), tokens)?;
    let got_ids = gpu.download::<u32>(ids.ptr(), tokens * k)?;
    let got = gpu.download::<f32>(weights.ptr(), tokens * k)?;
    let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
    Ok(Outcome::same(&got_ids, &expected_ids)
        .worse(Outcome::of(&got, &expected, |i| expected[i].abs(), 3e-6))
        .worse(Outcome::same(&gpu.download::<u32>(flag.ptr(), 1)?, &[u32::MAX])))
}

/// Checks the weights of experts that a table gives, for prompt rows and for few rows at once.
fn by_token(context: &Context) -> Result<Outcome> {
    let (gpu, vocabulary, cols) = (&context.gpu, 50, 64);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (tokens, experts, k) in [(1, 256, 6), (9, 6, 3), (9, 512, 32)] {
        for scoring in [Scoring::SqrtSoftplus, Scoring::Softmax] {
            let table = random_ids(vocabulary, experts, k);
            let numbers: Vec<u32> = (0..tokens as u32).map(|row| (row * 7 + 49) % 50).collect();
            let ids: Vec<u32> = numbers
                .iter()
                .flat_map(|token| table[*token as usize * k..][..k].iter().copied())
                .collect();
            let (device_table, device_numbers) =
                (context.upload(&table)?, context.upload(&numbers)?);
            let case = Case {
                tokens,
                experts,
                k,
                scoring,
                renormalise: true,
                bias: false,
                logit_bias: false,
                scales: false,
                groups: None,
                always: 0,
            };
            let by_token = TokenExperts {
                table: device_table.ptr(),
                vocabulary,
                tokens: device_numbers.ptr(),
            };
            let choice = RouterChoice {
                by_token: Some(by_token),
                ..Biases::random(context, experts)?.choice(&case)
            };
            let ty = TensorType::F32;
            let matrix =
                context.upload(&random_weights(ty, experts * cols, &mut Random::new(5)))?;
            let x = context.upload(&Random::new(9).gaussians(tokens * cols))?;
            let out = Choice::new(context, tokens, experts, k)?;
            let tickets = context.upload(&vec![0_u32; tokens])?;
            let router = RouterMatrix { ty, data: matrix.ptr(), cols };
            let (logits, places) = (out.logits.ptr(), out.outputs());
            gpu.route_few(&choice, router, x.ptr(), logits, &places, tickets.ptr(), tokens)?;
            let few = gpu.download::<f32>(out.weights.ptr(), tokens * k)?;
            outcome = outcome
                .worse(Outcome::same(&gpu.download::<u32>(out.ids.ptr(), tokens * k)?, &ids));
            let logits = gpu.download::<f32>(out.logits.ptr(), tokens * experts)?;
            let rule = RouterRule { scoring, scale: 2.5, ..RouterRule::softmax(true) };
            let mut expected = vec![0.0; tokens * k];
            context.cpu.weigh_experts(&rule, &logits, experts, &ids, &mut expected)?;
            let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
            let next = Outcome::of(&few, &expected, |i| expected[i].abs(), 3e-6);
            outcome = outcome.worse(next.at(&format!("{tokens} tokens, {k} of {experts}")));
            let many = Choice::new(context, tokens, experts, k)?;
            gpu.route(&choice, out.logits.ptr(), &many.outputs(), tokens)?;
            let many_ids = gpu.download::<u32>(many.ids.ptr(), tokens * k)?;
            let many = gpu.download::<f32>(many.weights.ptr(), tokens * k)?;
            outcome = outcome.worse(Outcome::same(&many_ids, &ids));
            outcome = outcome.worse(Outcome::same(&many, &few));
        }
    }
    Ok(outcome)
}

/// Biases of a router, on the host and on the device.
struct Biases {
    scores: Vec<f32>,
    logits: Vec<f32>,
    device: DeviceMemory,
}

impl Biases {
    /// Creates biases of halves and quarters, which add up without rounding, so that ties stay ties.
    fn random(context: &Context, experts: usize) -> Result<Biases> {
        let mut random = Random::new(11);
        let mut quarters = || (random.unit() * 2.0).round() / 4.0;
        let both: Vec<f32> = (0..2 * experts).map(|_| quarters()).collect();
        let (scores, logits) = both.split_at(experts);
        let device = context.upload(&both)?;
        Ok(Biases { scores: scores.to_vec(), logits: logits.to_vec(), device })
    }

    fn choice(&self, case: &Case) -> RouterChoice {
        let at = |wanted, first| match wanted {
            true => self.device.ptr::<f32>().offset(first),
            false => DevicePtr::null(),
        };
        RouterChoice {
            experts: case.experts,
            k: case.k,
            scoring: case.scoring,
            by_token: None,
            always: case.always,
            renormalise: case.renormalise,
            scale: 2.5,
            logit_bias: at(case.logit_bias, case.experts),
            correction_bias: at(case.bias, 0),
            expert_scales: at(case.scales, case.experts),
            groups: case.groups.map(|(n_groups, groups_kept, experts_scored)| RouterGroups {
                n_groups,
                groups_kept,
                experts_scored,
            }),
        }
    }
}

fn outputs(ids: &DeviceMemory, weights: &DeviceMemory, flag: &DeviceMemory) -> RouterOutputs {
    RouterOutputs { ids: ids.ptr(), weights: weights.ptr(), flag: flag.ptr() }
}

/// Checks that product and choice in one launch give the same bits as two launches, and leave the tickets at 0.
fn at_once(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let types = [TensorType::F32, TensorType::F16, TensorType::BF16];
    let plain = |experts, k| Case {
        tokens: 1,
        experts,
        k,
        scoring: Scoring::Softmax,
        renormalise: true,
        bias: false,
        logit_bias: false,
        scales: false,
        groups: None,
        always: 0,
    };
    let v3 =
        Case { scoring: Scoring::Sigmoid, bias: true, groups: Some((8, 4, 2)), ..plain(256, 8) };
    let cases = [
        (plain(128, 8), 2048),
        (plain(5, 2), 64),
        (plain(8, 2), 4096),
        (plain(257, 6), 1000),
        (plain(512, 32), 7168),
        (v3, 7168),
        (Case { renormalise: false, groups: Some((8, 3, 1)), ..plain(160, 6) }, 5120),
        (Case { logit_bias: true, ..plain(128, 4) }, 2880),
        (Case { scales: true, ..plain(128, 8) }, 2816),
    ];
    for (ty, tokens) in types.into_iter().zip([1, 3, 9]) {
        for (case, cols) in cases {
            let Case { experts, k, .. } = case;
            let matrix =
                context.upload(&random_weights(ty, experts * cols, &mut Random::new(5)))?;
            let x = context.upload(&Random::new(9).gaussians(tokens * cols))?;
            let (once, twice) = (
                Choice::new(context, tokens, experts, k)?,
                Choice::new(context, tokens, experts, k)?,
            );
            let tickets = context.upload(&vec![0_u32; tokens])?;
            let biases = Biases::random(context, experts)?;
            let choice = biases.choice(&case);
            let router = RouterMatrix { ty, data: matrix.ptr(), cols };
            for _ in 0..2 {
                let (logits, places) = (once.logits.ptr(), once.outputs());
                gpu.route_few(&choice, router, x.ptr(), logits, &places, tickets.ptr(), tokens)?;
            }
            let logits = twice.logits.ptr();
            let product = DeviceMatrix { data: matrix.ptr(), rows: experts, out: logits };
            let x = MatvecInput::Float(x.ptr());
            gpu.matvec(ty, &[product], x, tokens, cols, Pairing::Separate)?;
            gpu.route(&choice, logits, &twice.outputs(), tokens)?;
            let mut next = once.compare(context, &twice)?;
            next.place.insert_str(0, &format!("{ty}, {tokens} tokens, {k} of {experts}: "));
            let left = gpu.download::<u32>(tickets.ptr(), tokens)?;
            outcome = outcome.worse(next).worse(Outcome::same(&left, &vec![0; tokens]));
        }
    }
    Ok(outcome)
}

/// Checks that up to 32 rows at once get the bits that each gets alone.
fn alone(context: &Context) -> Result<Outcome> {
    let (gpu, experts, k, most) = (&context.gpu, 60, 4, DECODE_ROWS);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let types = [TensorType::F32, TensorType::F16, TensorType::BF16];
    for (ty, cols) in types.into_iter().flat_map(|ty| [(ty, 64), (ty, 1001), (ty, 2880)]) {
        let matrix = context.upload(&random_weights(ty, experts * cols, &mut Random::new(5)))?;
        let router = RouterMatrix { ty, data: matrix.ptr(), cols };
        let x = context.upload(&Random::new(9).gaussians(most * cols))?;
        let tickets = context.upload(&vec![0_u32; most])?;
        let choice = plain_choice(experts, k);
        let run = |first: usize, tokens: usize| -> Result<[Vec<u32>; 3]> {
            let out = Choice::new(context, tokens, experts, k)?;
            let (x, logits) = (x.ptr::<f32>().offset(first * cols), out.logits.ptr());
            gpu.route_few(&choice, router, x, logits, &out.outputs(), tickets.ptr(), tokens)?;
            Ok([
                gpu.download(out.logits.ptr(), tokens * experts)?,
                gpu.download(out.ids.ptr(), tokens * k)?,
                gpu.download(out.weights.ptr(), tokens * k)?,
            ])
        };
        let rows = (0..most).map(|row| run(row, 1)).collect::<Result<Vec<_>>>()?;
        for tokens in ROW_COUNTS {
            for (i, got) in run(0, tokens)?.iter().enumerate() {
                let expected: Vec<u32> =
                    rows[..tokens].iter().flat_map(|of| of[i].clone()).collect();
                let case = format!("{ty}, {cols} columns, {tokens} rows");
                outcome = outcome.worse(Outcome::same(got, &expected).at(&case));
            }
        }
    }
    Ok(outcome)
}

/// Outputs of a router.
struct Choice {
    logits: DeviceMemory,
    ids: DeviceMemory,
    weights: DeviceMemory,
    flag: DeviceMemory,
    /// Number of logits, and of ids.
    counts: [usize; 2],
}

impl Choice {
    fn new(context: &Context, tokens: usize, experts: usize, k: usize) -> Result<Choice> {
        let counts = [tokens * experts, tokens * k];
        Ok(Choice {
            logits: context.poisoned(counts[0])?,
            ids: context.poisoned(counts[1])?,
            weights: context.poisoned(counts[1])?,
            flag: context.upload(&[u32::MAX])?,
            counts,
        })
    }

    fn outputs(&self) -> RouterOutputs {
        outputs(&self.ids, &self.weights, &self.flag)
    }

    fn compare(&self, context: &Context, other: &Choice) -> Result<Outcome> {
        let mut outcome = Outcome::same::<u32>(&[], &[]);
        let [logits, pairs] = self.counts;
        let memories = |choice: &Choice| {
            [
                (choice.logits.ptr(), logits),
                (choice.ids.ptr(), pairs),
                (choice.weights.ptr(), pairs),
            ]
        };
        for ((got, count), (expected, _)) in memories(self).into_iter().zip(memories(other)) {
            let got = context.gpu.download::<u32>(got, count)?;
            outcome = outcome.worse(Outcome::same(&got, &context.gpu.download(expected, count)?));
        }
        Ok(outcome)
    }
}

/// Checks that the first bad token is reported, and that all ids are still valid.
fn reports(context: &Context) -> Result<Outcome> {
    let (gpu, tokens, experts, k) = (&context.gpu, 9, 64, 8);
    let mut logits = Random::new(3).gaussians(tokens * experts);
    (logits[7 * experts], logits[6 * experts + 63]) = (f32::INFINITY, f32::NEG_INFINITY);
    logits[8 * experts..].fill(f32::NAN);
    let device = context.upload(&logits)?;
    let (ids, weights) = (context.poisoned(tokens * k)?, context.poisoned(tokens * k)?);
    let flag = context.upload(&[u32::MAX])?;
    let choice = plain_choice(experts, k);
    gpu.route(&choice, device.ptr(), &outputs(&ids, &weights, &flag), tokens)?;
    let ids = gpu.download::<u32>(ids.ptr(), tokens * k)?;
    anyhow::ensure!(ids.iter().all(|&id| (id as usize) < experts), "ids: {ids:?}");
    Ok(Outcome::same(&gpu.download::<u32>(flag.ptr(), 1)?, &[6]))
}

fn plain_choice(experts: usize, k: usize) -> RouterChoice {
    RouterChoice {
        experts,
        k,
        scoring: Scoring::Softmax,
        renormalise: true,
        scale: 1.0,
        logit_bias: DevicePtr::null(),
        correction_bias: DevicePtr::null(),
        expert_scales: DevicePtr::null(),
        groups: None,
        always: 0,
        by_token: None,
    }
}

/// Returns `k` different experts for every token.
fn random_ids(tokens: usize, experts: usize, k: usize) -> Vec<u32> {
    let mut random = Random::new((tokens + experts) as u64);
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let start = ids.len();
        while ids.len() < start + k {
            // The square makes some experts frequent and others rare.
            let unit = f64::from(random.unit().abs());
            let id = ((unit * unit * experts as f64) as u32).min(experts as u32 - 1);
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

fn sorted(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let shapes = [(1, 1, 1), (1, 128, 8), (5, 8, 2), (512, 128, 8), (300, 511, 7)];
    // The last rows of some shapes have no experts.
    for ((tokens, experts, k), without) in
        shapes.into_iter().zip([0; 5]).chain([((32, 128, 8), 5), ((3, 8, 2), 3)])
    {
        let (mut ids, pairs) = (random_ids(tokens, experts, k), tokens * k);
        ids[pairs - without * k..].fill(NO_EXPERT);
        let device = context.upload(&ids)?;
        let out = context.poisoned(experts + 1 + 3 * pairs)?;
        let at = |index: usize| out.ptr::<u32>().offset(index);
        let places = SortedPairs {
            starts: at(0),
            pair_tokens: at(experts + 1),
            pairs: at(experts + 1 + pairs),
            row_of_pair: at(experts + 1 + 2 * pairs),
        };
        gpu.sort_pairs(device.ptr(), &places, tokens, k, experts)?;
        let mut order: Vec<u32> = (0..pairs as u32).collect();
        order.sort_by_key(|&pair| ids[pair as usize]);
        let below = |expert| ids.iter().filter(|&&id| (id as usize) < expert).count() as u32;
        let mut expected: Vec<u32> = (0..=experts).map(below).collect();
        expected.extend(order.iter().map(|pair| pair / k as u32));
        expected.extend(&order);
        let mut rows = vec![0; pairs];
        order.iter().enumerate().for_each(|(place, &pair)| rows[pair as usize] = place as u32);
        expected.extend(rows);
        let mut next = Outcome::same(&gpu.download::<u32>(at(0), expected.len())?, &expected);
        next.place.insert_str(0, &format!("{tokens} tokens, {k} of {experts}: "));
        outcome = outcome.worse(next);
    }
    Ok(outcome)
}

fn bench_choice(context: &Context, tokens: usize, experts: usize, k: usize) -> Result<Measured> {
    let logits = context.upload(&Random::new(3).gaussians(tokens * experts))?;
    let (ids, weights) = (context.poisoned(tokens * k)?, context.poisoned(tokens * k)?);
    let flag = context.upload(&[u32::MAX])?;
    let choice = plain_choice(experts, k);
    let seconds = median_seconds(context, |_| {
        context.gpu.route(&choice, logits.ptr(), &outputs(&ids, &weights, &flag), tokens)
    })?;
    Ok(Measured { seconds, bytes: (tokens * experts * 4) as f64, flops: 0.0 })
}

fn bench_sort(context: &Context, tokens: usize, experts: usize, k: usize) -> Result<Measured> {
    let ids = context.upload(&random_ids(tokens, experts, k))?;
    let out = context.poisoned(experts + 1 + 3 * tokens * k)?;
    let at = |index: usize| out.ptr::<u32>().offset(experts + 1 + index * tokens * k);
    let places =
        SortedPairs { starts: out.ptr(), pair_tokens: at(0), pairs: at(1), row_of_pair: at(2) };
    let seconds = median_seconds(context, |_| {
        context.gpu.sort_pairs(ids.ptr(), &places, tokens, k, experts)
    })?;
    Ok(Measured { seconds, bytes: (tokens * k * 16) as f64, flops: 0.0 })
}
