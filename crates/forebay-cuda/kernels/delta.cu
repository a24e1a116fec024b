// Recurrent layers: the gated delta rule (Yang et al. 2025, "Gated Delta Networks"), Kimi Delta Attention (Kimi Team 2025, "Kimi
// Linear") and Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"). Tokens are computed one after another in one fixed order, so
// the bits of a token do not depend on where its sequence is cut, or on other sequences.
// KEY_DIM is the most elements of a key.
#include "gating.cuh"
#include "reduce.cuh"
#include "state_runs.cuh"

// A product of some row length, and its columns: the first one of key head 0, and the distance to the next key head.
#define PRODUCT(name) const float *name, int name##_row, int name##_first, int name##_step

// ln(1 + e^x)
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float silu(float x) { return times_logistic(x, x); }

// Computes the convolution over the last `seen` tokens and its activation: mixed [rows, channels]. Channels are the
// queries and keys of all key heads, then the values of all value heads; `values` is the number of elements of the values
// that one key head serves. `bias` [channels] may be null. A state [.., state_floats] begins with the inputs of the last seen - 1 tokens
// [seen - 1, channels], oldest first. Grid (channels / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    delta_convolve(PRODUCT(q), PRODUCT(k), PRODUCT(v), int key_heads, int key_dim, int values, int seen,
                   const float *weights, const float *bias, const u32 *run_words, int runs, int first_row, float *states,
                   u64 state_floats, float *mixed) {
    wait_for_previous();
    const int keys = key_heads * key_dim, channels = 2 * keys + key_heads * values;
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    // The rows of the products and of `mixed` begin with row `first_row` of the pass.
    const int row = blockIdx.y + first_row;
    StateRun run;
    if (!find_run(run_words, runs, row, run)) return;
    const float *product;
    int column, product_row;
    if (channel < keys) {
        product = q, product_row = q_row;
        column = q_first + channel / key_dim * q_step + channel % key_dim;
    } else if (channel < 2 * keys) {
        product = k, product_row = k_row;
        column = k_first + (channel - keys) / key_dim * k_step + (channel - keys) % key_dim;
    } else {
        product = v, product_row = v_row;
        column = v_first + (channel - 2 * keys) / values * v_step + (channel - 2 * keys) % values;
    }
    const KeptInputs kept(run, row, states, state_floats, seen - 1, channels, channel);
    const size_t at = (size_t)blockIdx.y * product_row + column;
    float sum = bias ? bias[channel] : 0.0f;
    for (int i = 0; i < seen; i++) {
        const int back = seen - 1 - i;
        const float x = back <= kept.token ? product[at - (size_t)back * product_row] : kept.input(back);
        sum = __fmaf_rn(weights[(size_t)i * channels + channel], x, sum);
    }
    mixed[(size_t)blockIdx.y * channels + channel] = silu(sum);
    kept.keep(product[at]);
}

// Threads that share a row of a state.
static constexpr int PARTS = KEY_DIM / 32;
// Groups of 4 elements that a thread keeps.
static constexpr int QUADS = 8;

__device__ __forceinline__ float part_sum(float x) {
#pragma unroll
    for (int distance = PARTS / 2; distance > 0; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// Computes a gated short convolution (LFM2): out [rows, channels] = z * convolution(b * v), where each of the three is
// `channels` columns of a product. A state [.., state_floats] is the last seen - 1 values of b * v [seen - 1, channels],
// oldest first. `bias` [channels] may be null. Grid (channels / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    short_convolution(PRODUCT(b), PRODUCT(v), PRODUCT(z), int channels, int seen, const float *weights, const float *bias,
                      const u32 *run_words, int runs, int first_row, float *states, u64 state_floats, float *out) {
    wait_for_previous();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const int row = blockIdx.y + first_row;
    StateRun run;
    if (!find_run(run_words, runs, row, run)) return;
    const KeptInputs kept(run, row, states, state_floats, seen - 1, channels, channel);
    const size_t own = blockIdx.y;
    float sum = bias ? bias[channel] : 0.0f, last = 0.0f;
    for (int i = 0; i < seen; i++) {
        const int back = seen - 1 - i;
        const size_t at = own - back;
        const float x = back <= kept.token
                            ? __fmul_rn(b[at * b_row + b_first + channel], v[at * v_row + v_first + channel])
                            : kept.input(back);
        sum = __fmaf_rn(weights[(size_t)i * channels + channel], x, sum);
        last = x;
    }
    out[own * channels + channel] = sum * z[own * z_row + z_first + channel];
    kept.keep(last);
}

enum Rule { GATED_DELTA, KIMI_DELTA, MAMBA2 };

#define STEPS_PARAMETERS                                                                                                   \
    const float *mixed, int key_heads, int key_dim, int value_dim, int tiled, int sigmoid_gate, PRODUCT(z), PRODUCT(b),    \
        PRODUCT(a), const float *decays, const float *steps, const float *skips, const float *norm, float epsilon,         \
        float bound, const u32 *run_words, int first_row, float *states, u64 state_floats, u64 tail_floats, float *out

// Computes the steps of all tokens of a run for one value head: out [rows, value_heads, value_dim], normed and gated except for
// MAMBA2. A thread keeps PARTS-th of a row of the state matrix [value_dim, key_dim] in registers: quads number
// part + i * PARTS. Elements beyond key_dim are 0 and stay so. KIMI_DELTA has a step for each element of a key, the others have
// one for each head. If `bound` is not 0, it is the logarithm of KIMI_DELTA's fastest decay. Grid (value_heads, runs), block value_dim * PARTS, a multiple of 32.
template <Rule RULE> __device__ __forceinline__ void compute_steps(STEPS_PARAMETERS) {
    wait_for_previous();
    __shared__ __align__(16) float keys[KEY_DIM], queries[KEY_DIM], factors[KEY_DIM];
    __shared__ float share, sums[32];
    const StateRun run = ((const StateRun *)run_words)[blockIdx.y];
    if (run.count == 0) return;
    const int head = blockIdx.x, heads = gridDim.x, per_key = heads / key_heads;
    const int key_head = tiled ? head % key_heads : head / per_key;
    const int group = head / per_key, inside = head % per_key;
    const int channels = 2 * key_heads * key_dim + heads * value_dim;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const u64 matrix = tail_floats + (u64)head * value_dim * key_dim + (u64)row * key_dim;
    float state[QUADS][4];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int at = 4 * (part + i * PARTS);
        float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < key_dim && run.from != NO_STATE) quad = *(const float4 *)(states + run.from * state_floats + matrix + at);
        state[i][0] = quad.x;
        state[i][1] = quad.y;
        state[i][2] = quad.z;
        state[i][3] = quad.w;
    }
    const float key_scale = 1.0f / sqrtf((float)key_dim);
    for (u32 token = 0; token < run.count; token++) {
        const size_t at = run.first - first_row + token;
        const float *in = mixed + at * channels;
        for (int job = warp; job < 3; job += warps) {
            if (job == 2) {
                const int width = RULE == KIMI_DELTA ? key_dim : 1;
                const float *own = a + at * a_row + a_first + group * a_step + inside * width;
                for (int i = lane; i < (RULE == KIMI_DELTA ? KEY_DIM : 1); i += 32) {
                    float factor = 0.0f;
                    if (i < width) {
                        const float raw = own[i] + steps[head * width + i];
                        if (RULE == KIMI_DELTA && bound != 0.0f) {
                            factor = expf(bound / (1.0f + expf(decays[head] * raw)));
                        } else {
                            const float step = softplus(raw);
                            factor = expf(decays[head] * step);
                            if (RULE == MAMBA2) share = step;
                        }
                    }
                    factors[i] = factor;
                }
                if (RULE != MAMBA2 && lane == 0)
                    share = 1.0f / __fadd_rn(1.0f, expf(-b[at * b_row + b_first + group * b_step + inside]));
                continue;
            }
            const float *from = in + (job == 0 ? key_heads * key_dim : 0) + key_head * key_dim;
            float *to = job == 0 ? keys : queries;
            float factor = 1.0f;
            if (RULE != MAMBA2) {
                float sum = 0.0f;
                for (int i = lane; i < key_dim; i += 32) sum = __fmaf_rn(from[i], from[i], sum);
                factor = (job == 0 ? 1.0f : key_scale) / sqrtf(warp_sum(sum) + 1e-6f);
            }
            for (int i = lane; i < KEY_DIM; i += 32) to[i] = i < key_dim ? from[i] * factor : 0.0f;
        }
        __syncthreads();
        const float decay = factors[0];
        const float value = in[2 * key_heads * key_dim + head * value_dim + row];
        float change = share * value;
        if (RULE != MAMBA2) {
            // What the decayed state holds for the key.
            float held = 0.0f;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                if (RULE == KIMI_DELTA) {
                    const float4 d = *(const float4 *)(factors + 4 * (part + i * PARTS));
                    state[i][0] *= d.x;
                    state[i][1] *= d.y;
                    state[i][2] *= d.z;
                    state[i][3] *= d.w;
                }
                const float4 k = *(const float4 *)(keys + 4 * (part + i * PARTS));
                held = __fmaf_rn(state[i][0], k.x, held);
                held = __fmaf_rn(state[i][1], k.y, held);
                held = __fmaf_rn(state[i][2], k.z, held);
                held = __fmaf_rn(state[i][3], k.w, held);
            }
            held = part_sum(held);
            if (RULE == GATED_DELTA) held = __fmul_rn(decay, held);
            change = share * __fsub_rn(value, held);
        }
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = *(const float4 *)(keys + 4 * (part + i * PARTS));
            const float4 q = *(const float4 *)(queries + 4 * (part + i * PARTS));
            // KIMI_DELTA has decayed it already.
            const float kept = RULE == KIMI_DELTA ? 1.0f : decay;
            state[i][0] = __fmaf_rn(change, k.x, __fmul_rn(state[i][0], kept));
            state[i][1] = __fmaf_rn(change, k.y, __fmul_rn(state[i][1], kept));
            state[i][2] = __fmaf_rn(change, k.z, __fmul_rn(state[i][2], kept));
            state[i][3] = __fmaf_rn(change, k.w, __fmul_rn(state[i][3], kept));
            o = __fmaf_rn(state[i][0], q.x, o);
            o = __fmaf_rn(state[i][1], q.y, o);
            o = __fmaf_rn(state[i][2], q.z, o);
            o = __fmaf_rn(state[i][3], q.w, o);
        }
        o = part_sum(o);
        float *to = out + (at * heads + head) * value_dim + row;
        if (RULE == MAMBA2) {
            if (part == 0) *to = skips ? __fmaf_rn(value, skips[head], o) : o;
            __syncthreads();
            continue;
        }
        // Its barrier also ends the use of keys, queries and factors by all threads.
        const float square = block_sum(part == 0 ? o * o : 0.0f, sums);
        if (part == 0) {
            const float scale = 1.0f / sqrtf(square / (float)value_dim + epsilon);
            const float gate = z[at * z_row + z_first + group * z_step + inside * value_dim + row];
            const float normed = o * scale * norm[row];
            *to = sigmoid_gate ? times_logistic(normed, gate) : normed * silu(gate);
        }
    }
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int at = 4 * (part + i * PARTS);
        if (at < key_dim)
            *(float4 *)(states + run.to * state_floats + matrix + at) =
                make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
    }
}

#define STEPS(name, rule)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(KEY_DIM > 128 ? 1024 : 512) name(STEPS_PARAMETERS) {                      \
        compute_steps<rule>(mixed, key_heads, key_dim, value_dim, tiled, sigmoid_gate, z, z_row, z_first, z_step, b,       \
                            b_row, b_first, b_step, a, a_row, a_first, a_step, decays, steps, skips, norm, epsilon, bound, \
                            run_words, first_row, states, state_floats, tail_floats, out);                                 \
    }

STEPS(delta_steps, GATED_DELTA)
STEPS(kimi_steps, KIMI_DELTA)
STEPS(mamba2_steps, MAMBA2)

// Multiplies outputs [rows, groups, width] by the activated gate, then norms each group. `values` is the number of elements of
// the gate that one key head serves. Grid (groups, rows).
extern "C" __global__ void __launch_bounds__(256)
    mamba2_norm(PRODUCT(z), int values, int width, const float *norm, float epsilon, float *out) {
    wait_for_previous();
    __shared__ float sums[32];
    const size_t row = blockIdx.y;
    const int first = blockIdx.x * width;
    float *own = out + (row * gridDim.x + blockIdx.x) * width;
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int element = first + i;
        const float x = own[i] * silu(z[row * z_row + z_first + element / values * z_step + element % values]);
        own[i] = x;
        square = __fmaf_rn(x, x, square);
    }
    const float scale = 1.0f / sqrtf(block_sum(square, sums) / (float)width + epsilon);
    for (int i = threadIdx.x; i < width; i += blockDim.x) own[i] = own[i] * scale * norm[first + i];
}
