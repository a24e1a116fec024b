//! Rates of a GPU's kernels by quantisation type, with weights that its cache does not hold.

use forebay_cuda::{
    CudaError, DeviceMatrix, DevicePtr, Gpu, MatvecInput, Pairing, RoundedActivations, Timer,
    supports_weights, takes_rounded,
};
use forebay_format::TensorType;
use forebay_format::random_weights::Content;
use forebay_store::Interrupt;

use super::KernelRate;
use super::compute::{TYPES, fill};

const COLS: usize = 4096;
/// Bytes of one matrix. Its product takes so long that the launch time does not matter.
const MATRIX_BYTES: usize = 64 << 20;
/// Bytes of all matrices, which are used in turn. This is several times the largest cache (126 MiB on a B200).
const WEIGHTS_BYTES: usize = 512 << 20;
/// Bytes of random weights. The rest repeats them.
const SOME_BYTES: usize = 4 << 20;
/// Number of products that are queued at a time, one after the other as in a model.
const QUEUED: usize = 8;
const ROUNDS: usize = 9;

/// Measures products with one token for every type that models use, in bytes of weights per second. Loading the kernels
/// of a type takes some tenths of a second when the driver sees them for the first time.
pub(super) fn measure(gpu: &Gpu) -> Result<Vec<KernelRate>, CudaError> {
    let free = gpu.memory_bytes()?.0 as usize;
    // Room for 16 bytes on each side, because kernels may read up to 15 bytes beside a matrix.
    let bytes = WEIGHTS_BYTES.min(free / 4).max(MATRIX_BYTES) / MATRIX_BYTES * MATRIX_BYTES;
    let weights = gpu.allocate(bytes + 32)?;
    let first = weights.ptr::<u8>().offset(16);
    let inputs = Inputs::new(gpu)?;
    let timer = Timer::new(gpu)?;
    let types = TYPES.into_iter().chain([TensorType::F16]);
    let types = types.filter(|&ty| supports_weights(ty) && Content::weights(ty, 1.0).is_some());
    types
        .map(|ty| {
            fill_device(gpu, ty, first, bytes)?;
            let bytes_per_second = inputs.rate(gpu, &timer, ty, first, bytes / MATRIX_BYTES)?;
            let name = ty.name().to_owned();
            Ok(KernelRate { name, bytes_per_second, prompt_multiply_adds_per_second: None })
        })
        .collect()
}

/// Fills `bytes` of device memory with weights of a type: some random rows, repeated.
fn fill_device(
    gpu: &Gpu,
    ty: TensorType,
    to: DevicePtr<u8>,
    bytes: usize,
) -> Result<(), CudaError> {
    let mut some = vec![0; whole_rows(ty, SOME_BYTES)];
    // Takes no time that an interrupt would have to cut short.
    fill(ty, &mut some, &Interrupt::new());
    gpu.upload(&some, to)?;
    let mut done = some.len();
    while done < bytes {
        let more = done.min(bytes - done);
        gpu.copy(to, to.offset(done), more)?;
        done += more;
    }
    Ok(())
}

fn row_bytes(ty: TensorType) -> usize {
    ty.row_bytes(COLS as u64).unwrap_or(1) as usize
}

fn whole_rows(ty: TensorType, bytes: usize) -> usize {
    bytes / row_bytes(ty) * row_bytes(ty)
}

/// Activations of one token in the forms that kernels take, and memory for a product.
struct Inputs {
    floats: forebay_cuda::DeviceMemory,
    codes: forebay_cuda::DeviceMemory,
    scales: forebay_cuda::DeviceMemory,
    out: forebay_cuda::DeviceMemory,
}

impl Inputs {
    fn new(gpu: &Gpu) -> Result<Inputs, CudaError> {
        let x: Vec<f32> = (0..COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        let (codes, scales) = RoundedActivations::bytes(1, COLS);
        // The narrowest rows have one bit per weight, so a matrix has at most this many rows.
        let out = 4 * MATRIX_BYTES / (COLS / 8);
        let inputs = Inputs {
            floats: gpu.allocate_with(&x)?,
            codes: gpu.allocate(codes)?,
            scales: gpu.allocate(scales)?,
            out: gpu.allocate(out)?,
        };
        gpu.quantize_q8(inputs.floats.ptr(), inputs.rounded(), 1, COLS)?;
        Ok(inputs)
    }

    fn rounded(&self) -> RoundedActivations {
        RoundedActivations { codes: self.codes.ptr(), scales: self.scales.ptr() }
    }

    fn rate(
        &self,
        gpu: &Gpu,
        timer: &Timer,
        ty: TensorType,
        weights: DevicePtr<u8>,
        matrices: usize,
    ) -> Result<f64, CudaError> {
        let x = match takes_rounded(ty) {
            true => MatvecInput::Rounded(self.rounded()),
            false => MatvecInput::Float(self.floats.ptr()),
        };
        let bytes = whole_rows(ty, MATRIX_BYTES);
        let rows = bytes / row_bytes(ty);
        let mut turn = 0;
        let mut round = || {
            timer.time(gpu, || {
                (0..QUEUED).try_for_each(|_| {
                    turn += 1;
                    let data = weights.offset(turn % matrices * bytes);
                    let matrix = DeviceMatrix { data, rows, out: self.out.ptr() };
                    gpu.matvec(ty, &[matrix], x, 1, COLS, Pairing::Separate)
                })
            })
        };
        // The first round loads the kernels and does not count.
        round()?;
        let best = (0..ROUNDS).try_fold(f64::INFINITY, |best, _| Ok(best.min(round()?)))?;
        Ok((QUEUED * bytes) as f64 / best)
    }
}
