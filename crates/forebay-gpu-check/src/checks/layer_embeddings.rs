//! Compares the gates of tokens' embeddings for a layer with the CPU.

use anyhow::Result;
use forebay_cuda::RowEmbeddings;
use forebay_ops::Gating;

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-3;

pub fn checks() -> Vec<Check> {
    vec![Check::new("embeddings of layers", gates)]
}

/// Checks the sum of a normed projection and an embedding, as the other half of a gate. A row must have the bits that it has
/// alone.
fn gates(context: &Context) -> Result<Outcome> {
    let (gpu, cpu) = (&context.gpu, &context.cpu);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width, layers, layer) in
        [(1, 32, 6, 5), (7, 256, 35, 0), (513, 100, 2, 1), (3, 1, 1, 0)]
    {
        let mut random = Random::new((rows + width) as u64);
        let (stride, count) = (width * layers, rows * width);
        let (before, projected) = (random.gaussians(count), random.gaussians(count));
        let (weight, embeddings) = (random.gaussians(width), random.gaussians(rows * stride));
        let mut own = projected.clone();
        cpu.rms_norm_in_place(&mut own, &weight, EPSILON);
        for (own, row) in own.chunks_exact_mut(width).zip(embeddings.chunks_exact(stride)) {
            let row = &row[layer * width..][..width];
            own.iter_mut().zip(row).for_each(|(own, row)| *own += row);
        }
        let mut expected = before.clone();
        cpu.gate_in_place(forebay_ops::Gating::GeluTanh, &mut expected, &own);

        let [device_projected, device_weight, device_embeddings] =
            [&projected, &weight, &embeddings].map(|values| context.upload(values));
        let (device_projected, device_weight) = (device_projected?, device_weight?);
        let (device_embeddings, device_gates) = (device_embeddings?, context.upload(&before)?);
        let of = |first: usize| RowEmbeddings {
            embeddings: device_embeddings.ptr::<f32>().offset(first * stride),
            stride,
            first: layer * width,
            width,
            projected: device_projected.ptr::<f32>().offset(first * width),
            weight: device_weight.ptr(),
            epsilon: EPSILON,
        };
        gpu.gate_layer_embeddings(device_gates.ptr(), &of(0), Gating::GeluTanh, rows)?;
        let got = gpu.download::<f32>(device_gates.ptr(), count)?;
        let wanted: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
        // A sum of a norm and an embedding may cancel.
        let size = |i: usize| wanted[i].abs().max(f64::from(before[i]).abs());
        let next = Outcome::of(&got, &wanted, size, 4e-6);
        outcome = outcome.worse(next.at(&format!("{rows}x{width} of {layers}")));
        let last = rows - 1;
        let alone = context.upload(&before[last * width..])?;
        gpu.gate_layer_embeddings(alone.ptr(), &of(last), Gating::GeluTanh, 1)?;
        let alone = gpu.download::<f32>(alone.ptr(), width)?;
        outcome = outcome.worse(Outcome::same(&alone, &got[last * width..]));
    }
    Ok(outcome)
}
