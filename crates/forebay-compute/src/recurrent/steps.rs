//! The recurrence: steps of the state matrices. Every vector has eight elements of a key.

use std::ops::Range;

use forebay_ops::DeltaRule;

use crate::simd::{Kernel, LANES, Simd};

/// The steps of all tokens of a run for eight elements of a head's value. The rows of the state matrix for other elements do
/// not matter to them, so these rows stay in the nearest cache from token to token.
pub(super) struct HeadSteps<'a, F> {
    pub rule: DeltaRule,
    /// `[8, key_dim]`
    pub state: &'a mut [f32],
    /// Queries, keys and values of the run's tokens, `[tokens, channels]`.
    pub mixed: &'a [f32],
    /// Factors of the tokens from the run's first one on, of `factors_row` floats each. Those of the head are in
    /// `factors_of`: the decays, then the share.
    pub factors: &'a [f32],
    pub factors_row: usize,
    pub factors_of: Range<usize>,
    /// Factor of the value that is added to the output.
    pub skip: f32,
    pub channels: usize,
    /// First channels of query, key and the eight elements of the value.
    pub query: usize,
    pub key: usize,
    pub value: usize,
    pub key_dim: usize,
    /// Takes the number of a token and its output.
    pub out: F,
}

/// What a token brings to eight rows of a state.
struct Token<'a> {
    query: &'a [[f32; LANES]],
    key: &'a [[f32; LANES]],
    value: &'a [f32; LANES],
    decays: &'a [f32],
    share: f32,
    skip: f32,
}

impl<F: Fn(usize, &[f32; LANES])> Kernel for HeadSteps<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let key_dim = self.key_dim;
        for (index, row) in self.mixed.chunks_exact(self.channels).enumerate() {
            let factors = &self.factors[index * self.factors_row..][self.factors_of.clone()];
            let (share, decays) = factors.split_last().expect("every head has a share");
            let token = Token {
                query: row[self.query..][..key_dim].as_chunks().0,
                key: row[self.key..][..key_dim].as_chunks().0,
                value: row[self.value..].first_chunk().expect("values are whole vectors"),
                decays,
                share: *share,
                skip: self.skip,
            };
            let out = match self.rule {
                DeltaRule::GatedDelta => gated_delta(simd, &token, self.state, key_dim),
                DeltaRule::KimiDelta => kimi_delta(simd, &token, self.state, key_dim),
                DeltaRule::Mamba2 | DeltaRule::Lightning => {
                    mamba2(simd, &token, self.state, key_dim)
                }
                DeltaRule::Mamba | DeltaRule::ShortConvolution => unreachable!("not of such heads"),
            };
            let mut stored = [0.0; LANES];
            simd.store(out, &mut stored);
            (self.out)(index, &stored);
        }
    }
}

/// Returns eight elements of row `lane` of the state.
#[inline(always)]
fn place(state: &mut [f32], lane: usize, index: usize, key_dim: usize) -> &mut [f32; LANES] {
    let at = lane * key_dim + index * LANES;
    state[at..].first_chunk_mut().expect("keys are whole vectors")
}

/// Returns the changes of the rows: the share of what the value differs from `held`.
#[inline(always)]
fn changes<S: Simd>(simd: S, token: &Token<'_>, held: S::V) -> [f32; LANES] {
    let change = simd.mul(simd.sub(simd.load(token.value), held), simd.splat(token.share));
    let mut changes = [0.0; LANES];
    simd.store(change, &mut changes);
    changes
}

#[inline(always)]
fn gated_delta<S: Simd>(simd: S, token: &Token<'_>, state: &mut [f32], key_dim: usize) -> S::V {
    let decay = simd.splat(token.decays[0]);
    // What the decayed state holds for the key: one sum for each row.
    let mut sums = [simd.splat(0.0); LANES];
    for (index, key) in token.key.iter().enumerate() {
        let key = simd.load(key);
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum = simd.mul_add(simd.load(place(state, lane, index, key_dim)), key, *sum);
        }
    }
    let held = simd.mul(simd.sums(sums), decay);
    let changes = changes(simd, token, held);
    let mut sums = [simd.splat(0.0); LANES];
    for (index, (key, query)) in token.key.iter().zip(token.query).enumerate() {
        let (key, query) = (simd.load(key), simd.load(query));
        for (lane, sum) in sums.iter_mut().enumerate() {
            let state = place(state, lane, index, key_dim);
            let decayed = simd.mul(simd.load(state), decay);
            let new = simd.mul_add(simd.splat(changes[lane]), key, decayed);
            simd.store(new, state);
            *sum = simd.mul_add(new, query, *sum);
        }
    }
    simd.sums(sums)
}

#[inline(always)]
fn kimi_delta<S: Simd>(simd: S, token: &Token<'_>, state: &mut [f32], key_dim: usize) -> S::V {
    let decays = token.decays.as_chunks::<LANES>().0;
    let mut sums = [simd.splat(0.0); LANES];
    for (index, (key, decay)) in token.key.iter().zip(decays).enumerate() {
        let (key, decay) = (simd.load(key), simd.load(decay));
        for (lane, sum) in sums.iter_mut().enumerate() {
            let state = place(state, lane, index, key_dim);
            let decayed = simd.mul(simd.load(state), decay);
            simd.store(decayed, state);
            *sum = simd.mul_add(decayed, key, *sum);
        }
    }
    let changes = changes(simd, token, simd.sums(sums));
    let mut sums = [simd.splat(0.0); LANES];
    for (index, (key, query)) in token.key.iter().zip(token.query).enumerate() {
        let (key, query) = (simd.load(key), simd.load(query));
        for (lane, sum) in sums.iter_mut().enumerate() {
            let state = place(state, lane, index, key_dim);
            let new = simd.mul_add(simd.splat(changes[lane]), key, simd.load(state));
            simd.store(new, state);
            *sum = simd.mul_add(new, query, *sum);
        }
    }
    simd.sums(sums)
}

#[inline(always)]
fn mamba2<S: Simd>(simd: S, token: &Token<'_>, state: &mut [f32], key_dim: usize) -> S::V {
    let decay = simd.splat(token.decays[0]);
    let value = simd.load(token.value);
    let mut added = [0.0; LANES];
    simd.store(simd.mul(value, simd.splat(token.share)), &mut added);
    let mut sums = [simd.splat(0.0); LANES];
    for (index, (key, query)) in token.key.iter().zip(token.query).enumerate() {
        let (key, query) = (simd.load(key), simd.load(query));
        for (lane, sum) in sums.iter_mut().enumerate() {
            let state = place(state, lane, index, key_dim);
            let decayed = simd.mul(simd.load(state), decay);
            let new = simd.mul_add(simd.splat(added[lane]), key, decayed);
            simd.store(new, state);
            *sum = simd.mul_add(new, query, *sum);
        }
    }
    simd.mul_add(value, simd.splat(token.skip), simd.sums(sums))
}
