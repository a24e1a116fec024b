// Short convolutions over the tokens of a sequence that are added to their inputs (Inkling).
#include "state_runs.cuh"

// x [rows, channels] += the convolution of `inputs` [rows, channels] over `taps` tokens, in their order. The inputs are a copy of
// x. weights [taps, channels], those of the token itself last. A state [.., state_floats] has the last taps - 1 inputs from where
// `states` points. Grid (channels / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    add_convolution(float *x, const float *inputs, const float *weights, int channels, int taps, const u32 *run_words, int runs,
                    int first_row, float *states, u64 state_floats) {
    wait_for_previous();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y + first_row;
    StateRun run;
    if (channel >= channels || !find_run(run_words, runs, row, run)) return;
    const KeptInputs kept(run, row, states, state_floats, taps - 1, channels, channel);
    const size_t at = (size_t)blockIdx.y * channels + channel;
    float sum = inputs[at];
    for (int tap = 0; tap < taps; tap++) {
        const int back = taps - 1 - tap;
        const float input = back <= kept.token ? inputs[at - (size_t)back * channels] : kept.input(back);
        sum = __fadd_rn(sum, __fmul_rn(weights[(size_t)tap * channels + channel], input));
    }
    x[at] = sum;
    kept.keep(inputs[at]);
}
