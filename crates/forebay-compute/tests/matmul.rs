//! Comparison of products of every weight type and every kernel family with models in F64.

use forebay_compute::{Activations, Arithmetic, Cpu, Isa, MatmulJob, Matrix};
use forebay_format::{TensorType, dequantize};
use forebay_ops::RowKind;
use half::f16;

mod weights;
use weights::{Random, gaussian_bf16, random_weights};

/// Types whose products use rounded activations, with the number of elements that share a scale in
/// them.
const ROUNDED: [(TensorType, usize); 13] = [
    (TensorType::Q8_0, 32),
    (TensorType::Q4_0, 32),
    (TensorType::Q4_1, 32),
    (TensorType::Q5_0, 32),
    (TensorType::Q5_1, 32),
    (TensorType::IQ4_NL, 32),
    (TensorType::MXFP4, 32),
    (TensorType::Q2_K, 256),
    (TensorType::Q3_K, 256),
    (TensorType::Q4_K, 256),
    (TensorType::Q5_K, 256),
    (TensorType::Q6_K, 256),
    (TensorType::IQ4_XS, 256),
];

/// Types whose products always use F32 activations.
const FLOATS: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::IQ2_S,
    TensorType::TQ2_0,
    TensorType::F8_B128,
    TensorType::F8_B32,
    TensorType::NVFP4_F32,
    TensorType::I4_BF16,
    TensorType::I4_Z32,
    TensorType::I4_Z128,
];

/// Numbers of tokens on both sides of every switch between kernels, with tails.
const TOKENS: [usize; 10] = [1, 2, 3, 4, 5, 7, 8, 13, 32, 71];

struct Case {
    ty: TensorType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
    x: Vec<f32>,
    tokens: usize,
    kind: RowKind,
}

impl Case {
    fn random(
        ty: TensorType,
        rows: usize,
        cols: usize,
        (tokens, kind): (usize, RowKind),
        random: &mut Random,
    ) -> Case {
        let data = random_weights(ty, rows * cols, random);
        let x = random.gaussians(tokens * cols);
        Case { ty, rows, cols, data, x, tokens, kind }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix { ty: self.ty, rows: self.rows, cols: self.cols, data: &self.data }
    }

    fn run(&self, cpu: &Cpu, selection: Option<&[u32]>) -> Vec<f32> {
        let mut x = Activations::new();
        x.prepare(cpu, &self.x, self.tokens, self.cols, &[self.ty]);
        let count = selection.map_or(self.tokens, <[u32]>::len);
        let mut out = vec![f32::NAN; count * self.rows];
        let w = self.matrix();
        cpu.matmul(&mut [MatmulJob {
            w,
            x: &x,
            tokens: selection,
            kind: self.kind,
            out: &mut out,
        }]);
        out
    }

    fn weights(&self) -> Vec<f32> {
        let mut weights = vec![0.0; self.rows * self.cols];
        dequantize(self.ty, &self.data, &mut weights).unwrap();
        weights
    }

    /// Returns the product with activations `x` in F64, and the sum of the magnitudes of its terms.
    fn model(&self, x: &[f64]) -> Vec<(f64, f64)> {
        let weights = self.weights();
        let mut out = Vec::new();
        for x in x.chunks(self.cols) {
            for w in weights.chunks(self.cols) {
                let terms = x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
                out.push(terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs())));
            }
        }
        out
    }

    /// Returns the activations in F64, rounded in blocks of `block` as the kernels document it.
    fn rounded(&self, block: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for x in self.x.chunks(block) {
            let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let scale = largest / 127.0;
            let scale = if block == 32 { f16::from_f32(scale).to_f32() } else { scale };
            let value = |x: &f32| f64::from((x * inverse).round_ties_even()) * f64::from(scale);
            out.extend(x.iter().map(value));
        }
        out
    }
}

/// Returns every number of tokens with both kinds of rows.
fn in_both_kinds<const N: usize>(tokens: [usize; N]) -> impl Iterator<Item = (usize, RowKind)> {
    let kinds = |tokens| [(tokens, RowKind::Prompt), (tokens, RowKind::Decode)];
    tokens.into_iter().flat_map(kinds)
}

fn cpu(isa: Isa, arithmetic: Arithmetic) -> Cpu {
    Cpu::new(2, isa, arithmetic)
}

fn assert_close(got: &[f32], model: &[(f64, f64)], tolerance: f64, what: &str) {
    assert_eq!(got.len(), model.len());
    for (i, (got, (expected, size))) in got.iter().zip(model).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(
            error <= tolerance * size.max(1e-30),
            "{what}: output {i} is {got}, expected {expected}, terms add up to {size}"
        );
    }
}

#[test]
fn rounded_products_follow_the_formula_for_all_token_counts() {
    let mut random = Random::new(1);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for (ty, block) in ROUNDED {
            for (tokens, kind) in in_both_kinds(TOKENS) {
                let case = Case::random(ty, 37, 512, (tokens, kind), &mut random);
                let model = case.model(&case.rounded(block));
                assert_close(&case.run(&cpu, None), &model, 1e-6, &format!("{isa} {ty} {tokens}"));
            }
        }
    }
}

#[test]
fn float_products_follow_the_formula_for_all_token_counts() {
    let mut random = Random::new(2);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for ty in FLOATS {
            for (tokens, kind) in in_both_kinds(TOKENS) {
                let case = Case::random(ty, 37, 512, (tokens, kind), &mut random);
                let x: Vec<f64> = case.x.iter().map(|&x| f64::from(x)).collect();
                let model = case.model(&x);
                assert_close(&case.run(&cpu, None), &model, 1e-6, &format!("{isa} {ty} {tokens}"));
            }
        }
    }
}

#[test]
fn exact_products_of_every_type_keep_activations() {
    let mut random = Random::new(3);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Exact);
        for &ty in TensorType::all().iter().filter(|&&ty| Cpu::supports(ty)) {
            for (tokens, kind) in in_both_kinds([1, 3, 20]) {
                let cols = 512usize.next_multiple_of(ty.block_elements());
                let case = Case::random(ty, 19, cols, (tokens, kind), &mut random);
                let x: Vec<f64> = case.x.iter().map(|&x| f64::from(x)).collect();
                let model = case.model(&x);
                assert_close(&case.run(&cpu, None), &model, 1e-6, &format!("{isa} {ty} {tokens}"));
            }
        }
    }
}

/// Compact weights are the same numbers, so every kernel must add their products in the order of plain ones.
#[test]
fn compact_weights_give_the_bits_of_plain_ones() {
    let mut random = Random::new(12);
    for isa in Isa::supported() {
        for arithmetic in [Arithmetic::Fast, Arithmetic::Exact] {
            let cpu = cpu(isa, arithmetic);
            for (ty, cols) in [(TensorType::BF16_C2048, 4096), (TensorType::BF16_C256, 768)] {
                for (tokens, kind) in in_both_kinds([1, 2, 3, 20]) {
                    let mut compact = Case::random(ty, 37, cols, (tokens, kind), &mut random);
                    if tokens == 3 {
                        compact.data = gaussian_bf16(ty, 37 * cols, &mut random);
                    }
                    let plain = compact.weights().into_iter();
                    let data = plain.flat_map(|w| half::bf16::from_f32(w).to_le_bytes()).collect();
                    let x = compact.x.clone();
                    let plain = Case { ty: TensorType::BF16, data, x, ..compact };
                    let (a, b) = (compact.run(&cpu, None), plain.run(&cpu, None));
                    assert_eq!(bits(&a), bits(&b), "{isa} {ty} {tokens} {kind:?}");
                }
            }
        }
    }
}

#[test]
fn families_agree_with_the_portable_one() {
    let mut random = Random::new(4);
    let portable = cpu(Isa::Portable, Arithmetic::Fast);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for ty in ROUNDED.iter().map(|(ty, _)| *ty).chain(FLOATS) {
            for ((rows, cols, tokens), kind) in
                [(64, 2048, 1), (33, 1280, 2), (16, 2304, 4), (50, 1024, 33)]
                    .into_iter()
                    .flat_map(|shape| [(shape, RowKind::Prompt), (shape, RowKind::Decode)])
            {
                let case = Case::random(ty, rows, cols, (tokens, kind), &mut random);
                let (a, b) = (case.run(&cpu, None), case.run(&portable, None));
                let largest = b.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
                for (a, b) in a.iter().zip(&b) {
                    let error = (a - b).abs() / largest;
                    assert!(error <= 1e-5, "{isa} {ty} {rows}x{cols}x{tokens}: {a} {b}");
                }
            }
        }
    }
}

#[test]
fn small_and_odd_shapes() {
    let mut random = Random::new(5);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for (ty, block) in ROUNDED.into_iter().chain(FLOATS.map(|ty| (ty, 1))) {
            let unit = ty.block_elements();
            for (rows, blocks) in [(1, 1), (7, 3), (8, 5), (9, 9), (17, 11), (31, 1)] {
                for (tokens, kind) in in_both_kinds([1, 4, 9]) {
                    let case = Case::random(ty, rows, blocks * unit, (tokens, kind), &mut random);
                    let plain = || case.x.iter().map(|&x| f64::from(x)).collect();
                    let x = if block > 1 { case.rounded(block) } else { plain() };
                    let what = format!("{isa} {ty} {rows}x{blocks}x{tokens}");
                    assert_close(&case.run(&cpu, None), &case.model(&x), 1e-6, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_any_others() {
    let mut random = Random::new(10);
    for (isa, arithmetic) in Isa::supported()
        .into_iter()
        .flat_map(|isa| [(isa, Arithmetic::Fast), (isa, Arithmetic::Exact)])
    {
        let cpu = cpu(isa, arithmetic);
        for ty in ROUNDED.iter().map(|(ty, _)| *ty).chain(FLOATS) {
            for (tokens, kind) in in_both_kinds([2, 3, 4, 7, 70]) {
                let case = Case::random(ty, 37, 768, (tokens, kind), &mut random);
                let all = case.run(&cpu, None);
                for row in 0..tokens {
                    let alone = case.run(&cpu, Some(&[row as u32]));
                    let what = format!("{isa} {arithmetic} {ty} {kind:?} row {row} of {tokens}");
                    assert_eq!(bits(&alone), bits(&all[row * 37..][..37]), "{what}");
                }
            }
        }
    }
}

#[test]
fn every_cut_of_the_tokens_gives_the_same_bits() {
    const TOKENS: usize = 40;
    const ROWS: usize = 77;
    let mut random = Random::new(11);
    for (isa, arithmetic) in Isa::supported()
        .into_iter()
        .flat_map(|isa| [(isa, Arithmetic::Fast), (isa, Arithmetic::Exact)])
    {
        let cpu = cpu(isa, arithmetic);
        for ty in ROUNDED.iter().map(|(ty, _)| *ty).chain(FLOATS) {
            // Whole slabs of columns, and a rest where the blocks of the type allow one.
            let cols = 1024 + ty.block_elements().max(32);
            for kind in [RowKind::Prompt, RowKind::Decode] {
                let case = Case::random(ty, ROWS, cols, (TOKENS, kind), &mut random);
                let whole = bits(&case.run(&cpu, None));
                let tokens: Vec<u32> = (0..TOKENS as u32).collect();
                for count in (1..=20).chain([TOKENS - 1]) {
                    for (i, piece) in tokens.chunks(count).enumerate() {
                        let got = bits(&case.run(&cpu, Some(piece)));
                        let expected = &whole[i * count * ROWS..][..piece.len() * ROWS];
                        let what = format!("{isa} {arithmetic} {ty} {kind:?} piece {i} of {count}");
                        assert!(got == expected, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn selected_tokens_equal_a_product_of_these_tokens_alone() {
    let mut random = Random::new(6);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for ty in ROUNDED.iter().map(|(ty, _)| *ty).chain(FLOATS) {
            for (kind, selection) in
                [RowKind::Prompt, RowKind::Decode].into_iter().flat_map(|kind| {
                    let selections = [&[17_u32][..], &[3, 39], &[0, 5, 1, 38, 22], &[9; 21]];
                    selections.map(|selection| (kind, selection))
                })
            {
                let case = Case::random(ty, 24, 512, (40, kind), &mut random);
                let gathered = Case {
                    x: selection.iter().flat_map(|&t| token(&case, t).to_vec()).collect(),
                    tokens: selection.len(),
                    data: case.data.clone(),
                    ..case
                };
                assert_eq!(bits(&case.run(&cpu, Some(selection))), bits(&gathered.run(&cpu, None)));
            }
        }
    }
}

fn token(case: &Case, token: u32) -> &[f32] {
    &case.x[token as usize * case.cols..][..case.cols]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn threads_rows_in_one_job_and_other_jobs_do_not_change_a_bit() {
    let mut random = Random::new(7);
    for isa in Isa::supported() {
        let [one, three] = [1, 3].map(|threads| Cpu::new(threads, isa, Arithmetic::Fast));
        for ty in ROUNDED.iter().map(|(ty, _)| *ty).chain(FLOATS) {
            for (tokens, kind) in in_both_kinds([1, 3, 40]) {
                let case = Case::random(ty, 200, 768, (tokens, kind), &mut random);
                let whole = case.run(&one, None);
                assert_eq!(bits(&whole), bits(&case.run(&three, None)), "{isa} {ty} {tokens}");
                // The same rows as two jobs of one call, split at a row where no kernel would
                // split.
                let mut x = Activations::new();
                x.prepare(&three, &case.x, tokens, case.cols, &[ty]);
                let (mut a, mut b) = (vec![0.0; tokens * 77], vec![0.0; tokens * 123]);
                let (upper, lower) = case.data.split_at(case.data.len() / 200 * 77);
                let matrix = |rows, data| Matrix { ty, rows, cols: case.cols, data };
                three.matmul(&mut [
                    MatmulJob { w: matrix(77, upper), x: &x, tokens: None, kind, out: &mut a },
                    MatmulJob { w: matrix(123, lower), x: &x, tokens: None, kind, out: &mut b },
                ]);
                for t in 0..tokens {
                    let expected = bits(&whole[t * 200..][..200]);
                    assert_eq!(bits(&a[t * 77..][..77]), expected[..77], "{isa} {ty}");
                    assert_eq!(bits(&b[t * 123..][..123]), expected[77..], "{isa} {ty}");
                }
            }
        }
    }
}

#[test]
fn arbitrary_bytes_do_no_harm_and_nan_is_seen() {
    let mut random = Random::new(8);
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for &ty in TensorType::all().iter().filter(|&&ty| Cpu::supports(ty)) {
            for (tokens, kind) in in_both_kinds([1, 2, 30]) {
                let cols = 768usize.next_multiple_of(ty.block_elements());
                let mut case = Case::random(ty, 16, cols, (tokens, kind), &mut random);
                case.data.iter_mut().for_each(|byte| *byte = random.next() as u8);
                case.run(&cpu, None);
            }
        }
        for (ty, _) in ROUNDED {
            for (tokens, kind) in in_both_kinds([1, 2, 30]) {
                let mut case = Case::random(ty, 9, 768, (tokens, kind), &mut random);
                case.x[5] = f32::NAN;
                let out = case.run(&cpu, None);
                assert!(out[..9].iter().all(|x| x.is_nan()), "{isa} {ty}: a NaN was lost");
                assert!(out[9..].iter().all(|x| x.is_finite()), "{isa} {ty}: a NaN spread");
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    const BYTES: [u8; 4] = [0x00, 0x7f, 0x80, 0xff];
    for isa in Isa::supported() {
        let cpu = cpu(isa, Arithmetic::Fast);
        for (ty, block) in ROUNDED {
            for (tokens, kind) in in_both_kinds([1, 6]) {
                let case = |byte, sign| {
                    let mut case = Case::random(ty, 16, 512, (tokens, kind), &mut Random::new(9));
                    weights::fill_codes(ty, &mut case.data, byte);
                    case.x.fill(sign);
                    case
                };
                // All weights may be zero, as the difference of integers that are far from zero.
                let sizes = BYTES.map(|byte| {
                    let case = case(byte, 1.0);
                    case.model(&case.rounded(block)).iter().fold(0.0_f64, |a, (_, b)| a.max(*b))
                });
                let size = sizes.into_iter().fold(0.0, f64::max);
                for (byte, sign) in BYTES.into_iter().flat_map(|b| [(b, 1.0), (b, -1.0)]) {
                    let case = case(byte, sign);
                    let mut model = case.model(&case.rounded(block));
                    model.iter_mut().for_each(|(_, own)| *own = size);
                    let what = format!("{isa} {ty} {byte:#x}");
                    assert_close(&case.run(&cpu, None), &model, 1e-6, &what);
                }
            }
        }
    }
}
