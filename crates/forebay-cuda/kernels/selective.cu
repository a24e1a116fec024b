// Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"): every value has a state of `key_dim`
// numbers. Tokens are computed one after another in one fixed order, so the bits of a token do not depend on where its sequence is
// cut, or on other sequences.
#include "recurrent.cuh"
#include "reduce.cuh"
#include "state_runs.cuh"

// Computes the convolution over the last `seen` tokens and its activation: mixed [rows, values]. `bias` [values] may be null. A
// state [.., state_floats] begins with the inputs of the last seen - 1 tokens [seen - 1, values], oldest first. Grid
// (values / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    mix_values(PRODUCT(v), int values, int seen, const float *weights, const float *bias, const u32 *run_words, int runs,
               int first_row, float *states, u64 state_floats, float *mixed) {
    wait_for_previous();
    const int value = blockIdx.x * blockDim.x + threadIdx.x;
    if (value >= values) return;
    // The rows of the product and of `mixed` begin with row `first_row` of the pass.
    const int row = blockIdx.y + first_row;
    StateRun run;
    if (!find_run(run_words, runs, row, run)) return;
    const KeptInputs kept(run, row, states, state_floats, seen - 1, values, value);
    const size_t at = (size_t)blockIdx.y * v_row + v_first + value;
    float sum = bias ? bias[value] : 0.0f;
    for (int i = 0; i < seen; i++) {
        const int back = seen - 1 - i;
        const float x = back <= kept.token ? v[at - (size_t)back * v_row] : kept.input(back);
        sum = __fmaf_rn(weights[(size_t)i * values + value], x, sum);
    }
    mixed[(size_t)blockIdx.y * values + value] = silu(sum);
    kept.keep(v[at]);
}

// Norms the parts of `all` [rows, rank + 2 * key_dim], compressed steps, keys and queries, each with its norm, and copies the steps
// to steps [rows, rank]. Norms that are null change nothing. Grid (3, rows), block 128.
extern "C" __global__ void __launch_bounds__(128)
    norm_compressed(float *all, int rank, int key_dim, const float *step_norm, const float *key_norm, const float *query_norm,
                    float epsilon, float *steps) {
    wait_for_previous();
    __shared__ float sums[32];
    const int part = blockIdx.x, width = part == 0 ? rank : key_dim;
    const size_t row = blockIdx.y;
    float *own = all + row * (rank + 2 * key_dim) + (part == 0 ? 0 : rank + (part - 1) * key_dim);
    float *to = part == 0 ? steps + row * rank : own;
    const float *norm = part == 0 ? step_norm : part == 1 ? key_norm : query_norm;
    float scale = 1.0f;
    if (norm) {
        float square = 0.0f;
        for (int i = threadIdx.x; i < width; i += blockDim.x) square = __fmaf_rn(own[i], own[i], square);
        scale = 1.0f / sqrtf(block_sum(square, sums) / (float)width + epsilon);
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = norm ? own[i] * scale * norm[i] : own[i];
}

// Numbers of a state that a thread keeps in registers over all tokens of a run.
static constexpr int NUMBERS = 16;

// Takes the steps of all tokens of a run: out [rows, values], times the activated gates. `a` has the steps of all values without
// their bias, `k` and `q` keys and queries, which all values share. `parts` threads share a value: a power of two, and
// parts * NUMBERS is at least `key_dim`. `rates` is [values, key_dim]; `skips` [values] may be null. Grid
// (values * parts / 256, runs).
//
// Time budget for each token: a thread takes 16 exponentials of about 10 instructions each, 250 instructions in all, while loads
// of the token hit the first cache. With one warp for each scheduler that is about 0.3 us, whatever the number of values, as long
// as all blocks run at a time.
extern "C" __global__ void __launch_bounds__(256)
    selective_scan(const float *mixed, PRODUCT(a), PRODUCT(k), PRODUCT(q), PRODUCT(z), int values, int key_dim, int parts,
                   const float *rates, const float *biases, const float *skips, const u32 *run_words, int first_row,
                   float *states, u64 state_floats, u64 tail_floats, float *out) {
    wait_for_previous();
    const StateRun run = ((const StateRun *)run_words)[blockIdx.y];
    if (run.count == 0) return;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, part = thread % parts, first = part * NUMBERS;
    // Threads beyond the last value compute it too, because all lanes of a warp take part in the sums.
    const bool is_there = thread / parts < values;
    const int value = is_there ? thread / parts : values - 1;
    const u64 place = tail_floats + (u64)value * key_dim + first;
    const float *before = run.from == NO_STATE ? nullptr : states + run.from * state_floats + place;
    float state[NUMBERS], rate[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        const bool is_number = first + i < key_dim;
        state[i] = is_number && before ? before[i] : 0.0f;
        rate[i] = is_number ? rates[(size_t)value * key_dim + first + i] : 0.0f;
    }
    const float bias = biases[value], skip = skips ? skips[value] : 0.0f;
    for (u32 token = 0; token < run.count; token++) {
        const size_t at = run.first - first_row + token;
        const float x = mixed[at * values + value], step = softplus(a[at * a_row + a_first + value] + bias);
        const float *keys = k + at * k_row + k_first + first, *queries = q + at * q_row + q_first + first;
        const float added = __fmul_rn(step, x);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < NUMBERS; i++) {
            if (first + i >= key_dim) break;
            state[i] = __fmaf_rn(added, keys[i], __fmul_rn(state[i], expf(__fmul_rn(step, rate[i]))));
            sum = __fmaf_rn(state[i], queries[i], sum);
        }
        for (int distance = parts / 2; distance > 0; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
        const float y = skips ? __fmaf_rn(x, skip, sum) : sum;
        if (part == 0 && is_there) out[at * values + value] = y * silu(z[at * z_row + z_first + value]);
    }
    if (!is_there) return;
    float *after = states + run.to * state_floats + place;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++)
        if (first + i < key_dim) after[i] = state[i];
}
