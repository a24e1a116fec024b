// Embeddings of n-grams that a layer adds to the residual streams (Qwen4-Exp). The bits of a token do not depend on where its
// sequence is cut, or on other sequences.
#include "gating.cuh"
#include "reduce.cuh"
#include "state_runs.cuh"

// Turns keys [rows, streams, hidden] into gated values, and writes what the convolution reads to `inputs` [rows, streams, hidden].
// The gate of a stream is the logistic function of the signed root of the product of the normed key and the normed stream, divided
// by the root of `hidden`. The inputs are the normed gated values. values [rows, hidden]; weights of norms [streams, hidden]. Grid
// (streams, rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    gate_ngrams(float *keys, const float *values, const float *x, const float *key_norm, const float *stream_norm,
                const float *convolution_norm, float *inputs, int hidden, float eps) {
    wait_for_previous();
    // One array for each sum: a warp may begin the next sum while others read the last.
    __shared__ float shared[4][32];
    const size_t stream = blockIdx.x, row = blockIdx.y, at = (row * gridDim.x + stream) * hidden;
    keys += at, x += at, inputs += at;
    values += row * hidden;
    key_norm += stream * hidden, stream_norm += stream * hidden, convolution_norm += stream * hidden;
    float key_squares = 0.0f, squares = 0.0f, value_squares = 0.0f, dot = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float key = keys[i], own = x[i], value = values[i];
        key_squares = __fmaf_rn(key, key, key_squares);
        squares = __fmaf_rn(own, own, squares);
        value_squares = __fmaf_rn(value, value, value_squares);
        dot = __fmaf_rn(__fmul_rn(key, key_norm[i]), __fmul_rn(own, stream_norm[i]), dot);
    }
    const float count = (float)hidden;
    const float key_scale = 1.0f / sqrtf(block_sum(key_squares, shared[0]) / count + eps);
    const float scale = 1.0f / sqrtf(block_sum(squares, shared[1]) / count + eps);
    const float mean = block_sum(value_squares, shared[2]) / count;
    const float agreement = block_sum(dot, shared[3]) * key_scale * scale / sqrtf(count);
    // The sign of 0 is 0, so no agreement at all is a gate of a half.
    const float root = agreement == 0.0f ? 0.0f : copysignf(sqrtf(fmaxf(fabsf(agreement), 1e-6f)), agreement);
    const float gate = times_logistic(1.0f, root);
    const float normed = 1.0f / sqrtf(gate * gate * mean + eps);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float own = gate * values[i];
        keys[i] = own;
        inputs[i] = own * normed * convolution_norm[i];
    }
}

// Adds gated values, and the SiLU of a convolution of `inputs` over `taps` tokens that are `gap` apart, to the streams. x, gated
// and inputs [rows, channels]; weights [taps, channels]. A state [.., state_floats] is the last (taps - 1) * gap inputs. Grid
// (channels / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    add_ngrams(float *x, const float *gated, const float *inputs, const float *weights, int channels, int taps, int gap,
               const u32 *run_words, int runs, int first_row, float *states, u64 state_floats) {
    wait_for_previous();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y + first_row;
    StateRun run;
    if (channel >= channels || !find_run(run_words, runs, row, run)) return;
    const KeptInputs kept(run, row, states, state_floats, (taps - 1) * gap, channels, channel);
    const size_t at = (size_t)blockIdx.y * channels + channel;
    float sum = 0.0f;
    for (int tap = 0; tap < taps; tap++) {
        const int back = (taps - 1 - tap) * gap;
        const float input = back <= kept.token ? inputs[at - (size_t)back * channels] : kept.input(back);
        sum = __fmaf_rn(weights[(size_t)tap * channels + channel], input, sum);
    }
    x[at] += gated[at] + times_logistic(sum, sum);
    kept.keep(inputs[at]);
}
