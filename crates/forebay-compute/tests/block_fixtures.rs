//! Comparison of products with the fixtures' blocks, by every kernel family, with their reference.

use std::io::Write as _;
use std::path::PathBuf;

use forebay_compute::{Activations, Arithmetic, Cpu, Isa, MatmulJob, Matrix};
use forebay_format::{TensorType, dequantize};
use forebay_ops::RowKind;
use safetensors::SafeTensors;

fn fixture(name: &str) -> Option<Vec<u8>> {
    let project = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from);
    let folders = [named, Some(project.join("../shared/fixtures")), Some(project.join("fixtures"))];
    let found =
        folders.into_iter().flatten().find_map(|folder| std::fs::read(folder.join(name)).ok());
    if found.is_none() {
        // Writes past the test harness, which hides the output of passing tests.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no {name} in FOREBAY_FIXTURES, ../shared/fixtures or fixtures"
        );
    }
    found
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap().data().to_vec();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Multiplies the four rows of `ty` with `x`, repeated `tokens` times, and returns each token's
/// row.
fn product(
    cpu: &Cpu,
    ty: TensorType,
    data: &[u8],
    x: &[f32],
    (tokens, kind): (usize, RowKind),
) -> Vec<f32> {
    let mut activations = Activations::new();
    activations.prepare(cpu, &x.repeat(tokens), tokens, x.len(), &[ty]);
    let mut out = vec![f32::NAN; tokens * 4];
    let w = Matrix { ty, rows: 4, cols: x.len(), data };
    cpu.matmul(&mut [MatmulJob { w, x: &activations, tokens: None, kind, out: &mut out }]);
    out
}

#[test]
fn products_of_all_types_meet_the_reference() {
    let Some(bytes) = fixture("blocks/blocks.safetensors") else { return };
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let x = floats(&file, "vector");
    let mut types = 0;
    for isa in Isa::supported() {
        let exact = Cpu::new(2, isa, Arithmetic::Exact);
        let fast = Cpu::new(2, isa, Arithmetic::Fast);
        for &ty in TensorType::all().iter().filter(|&&ty| Cpu::supports(ty)) {
            let Ok(data) = file.tensor(&format!("{ty}.data")) else { continue };
            types += 1;
            let expected = floats(&file, &format!("{ty}.matvec"));
            let mut weights = vec![0.0; 4 * x.len()];
            dequantize(ty, data.data(), &mut weights).unwrap();
            for (tokens, kind) in [1, 2, 17]
                .into_iter()
                .flat_map(|tokens| [(tokens, RowKind::Prompt), (tokens, RowKind::Decode)])
            {
                let exact = product(&exact, ty, data.data(), &x, (tokens, kind));
                let fast = product(&fast, ty, data.data(), &x, (tokens, kind));
                for i in 0..tokens * 4 {
                    let row = &weights[i % 4 * x.len()..][..x.len()];
                    let terms = || row.iter().zip(&x).map(|(w, x)| w * x);
                    let size: f32 = terms().map(f32::abs).sum();
                    let expected = expected[i % 4];
                    assert!((exact[i] - expected).abs() <= 1e-6 * size, "{isa} {ty} row {i}");
                    // Rounding to 8 bits is off by up to half of 1/127 of the largest nearby
                    // element.
                    let norm = terms().map(|t| t * t).sum::<f32>().sqrt();
                    let error = (fast[i] - expected).abs();
                    assert!(error <= 0.03 * norm + 1e-6 * size, "{isa} {ty} row {i}: {error}");
                }
            }
        }
    }
    assert_eq!(types, 27 * Isa::supported().len());
}
