// Recurrent layers with the gated delta rule (Yang et al. 2025, "Gated Delta Networks"). Tokens are computed one after
// another in one fixed order, so the bits of a token do not depend on where its sequence is cut, or on other sequences.
// KEY_DIM is the most elements of a key.
#include "gating.cuh"
#include "reduce.cuh"

// Consecutive rows of one sequence. `from` and `to` are numbers of states; NO_STATE stands for the empty state.
struct StateRun {
    u32 first, count, from, to;
};
static constexpr u32 NO_STATE = ~0u;

// Columns of a product: the first one of key head 0, and the distance to the next key head.
struct HeadColumns {
    int first, step;
};

// ln(1 + e^x)
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float silu(float x) { return times_logistic(x, x); }

// Computes the convolution over the last `seen` tokens and its activation: mixed [rows, channels]. Channels are the
// queries and keys of all key heads, then the values of all value heads; `values` is the number of elements of the values
// that one key head serves. A state [.., state_floats] begins with the inputs of the last seen - 1 tokens
// [seen - 1, channels], oldest first. Grid (channels / 256, rows).
extern "C" __global__ void __launch_bounds__(256)
    delta_convolve(const float *product, int product_row, int q_first, int q_step, int k_first, int k_step, int v_first,
                   int v_step, int key_heads, int key_dim, int values, int seen, const float *weights, const u32 *run_words,
                   int runs, int first_row, float *states, u64 state_floats, float *mixed) {
    wait_for_previous();
    const int keys = key_heads * key_dim, channels = 2 * keys + key_heads * values;
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    // The rows of `product` and `mixed` begin with row `first_row` of the pass.
    const int row = blockIdx.y + first_row;
    const StateRun *all = (const StateRun *)run_words;
    int index = 0;
    while (index < runs && (u32)row - all[index].first >= all[index].count) index++;
    if (index == runs) return;
    const StateRun run = all[index];
    int column;
    if (channel < keys) {
        column = q_first + channel / key_dim * q_step + channel % key_dim;
    } else if (channel < 2 * keys) {
        column = k_first + (channel - keys) / key_dim * k_step + (channel - keys) % key_dim;
    } else {
        column = v_first + (channel - 2 * keys) / values * v_step + (channel - 2 * keys) % values;
    }
    const float *before = run.from == NO_STATE ? nullptr : states + run.from * state_floats + channel;
    float *after = states + run.to * state_floats + channel;
    const int token = row - (int)run.first, count = (int)run.count, kept = seen - 1;
    const size_t at = (size_t)blockIdx.y * product_row + column;
    float sum = 0.0f;
    for (int i = 0; i < seen; i++) {
        const int back = kept - i;
        float x = 0.0f;
        if (back <= token) {
            x = product[at - (size_t)back * product_row];
        } else if (before) {
            x = before[(size_t)(kept + token - back) * channels];
        }
        sum = __fmaf_rn(weights[(size_t)i * channels + channel], x, sum);
    }
    mixed[(size_t)blockIdx.y * channels + channel] = silu(sum);
    // The inputs that later tokens need. If the run is short, some of them are of tokens before it.
    const int entry = token - (count - kept);
    if (entry >= 0) after[(size_t)entry * channels] = product[at];
    if (token == 0)
        for (int i = 0; i + count < kept; i++) after[(size_t)i * channels] = before ? before[(size_t)(i + count) * channels] : 0.0f;
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

// Computes the steps of all tokens of a run for one value head: out [rows, value_heads, value_dim], normed and gated. A
// thread keeps PARTS-th of a row of the state matrix [value_dim, key_dim] in registers: quads number part + i * PARTS.
// Elements beyond key_dim are 0 and stay so. Grid (value_heads, runs), block value_dim * PARTS, a multiple of 32.
extern "C" __global__ void __launch_bounds__(KEY_DIM > 128 ? 1024 : 512)
    delta_steps(const float *mixed, int key_heads, int key_dim, int value_dim, int tiled, const float *z, int z_row,
                int z_first, int z_step, const float *b, int b_row, int b_first, int b_step, const float *a, int a_row,
                int a_first, int a_step, const float *decays, const float *steps, const float *norm, float epsilon,
                const u32 *run_words, int first_row, float *states, u64 state_floats, u64 tail_floats, float *out) {
    wait_for_previous();
    __shared__ __align__(16) float keys[KEY_DIM], queries[KEY_DIM];
    __shared__ float factors[2], sums[32];
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
                if (lane == 0) {
                    const float step = a[at * a_row + a_first + group * a_step + inside] + steps[head];
                    factors[0] = expf(decays[head] * softplus(step));
                    factors[1] = 1.0f / __fadd_rn(1.0f, expf(-b[at * b_row + b_first + group * b_step + inside]));
                }
                continue;
            }
            const float *from = in + (job == 0 ? key_heads * key_dim : 0) + key_head * key_dim;
            float *to = job == 0 ? keys : queries;
            float sum = 0.0f;
            for (int i = lane; i < key_dim; i += 32) sum = __fmaf_rn(from[i], from[i], sum);
            const float factor = (job == 0 ? 1.0f : key_scale) / sqrtf(warp_sum(sum) + 1e-6f);
            for (int i = lane; i < KEY_DIM; i += 32) to[i] = i < key_dim ? from[i] * factor : 0.0f;
        }
        __syncthreads();
        const float decay = factors[0];
        float held = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = *(const float4 *)(keys + 4 * (part + i * PARTS));
            held = __fmaf_rn(state[i][0], k.x, held);
            held = __fmaf_rn(state[i][1], k.y, held);
            held = __fmaf_rn(state[i][2], k.z, held);
            held = __fmaf_rn(state[i][3], k.w, held);
        }
        const float value = in[2 * key_heads * key_dim + head * value_dim + row];
        const float change = factors[1] * __fsub_rn(value, __fmul_rn(decay, part_sum(held)));
        float o = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = *(const float4 *)(keys + 4 * (part + i * PARTS));
            const float4 q = *(const float4 *)(queries + 4 * (part + i * PARTS));
            state[i][0] = __fmaf_rn(change, k.x, __fmul_rn(state[i][0], decay));
            state[i][1] = __fmaf_rn(change, k.y, __fmul_rn(state[i][1], decay));
            state[i][2] = __fmaf_rn(change, k.z, __fmul_rn(state[i][2], decay));
            state[i][3] = __fmaf_rn(change, k.w, __fmul_rn(state[i][3], decay));
            o = __fmaf_rn(state[i][0], q.x, o);
            o = __fmaf_rn(state[i][1], q.y, o);
            o = __fmaf_rn(state[i][2], q.z, o);
            o = __fmaf_rn(state[i][3], q.w, o);
        }
        o = part_sum(o);
        // Its barrier also ends the use of keys, queries and factors by all threads.
        const float square = block_sum(part == 0 ? o * o : 0.0f, sums);
        if (part == 0) {
            const float scale = 1.0f / sqrtf(square / (float)value_dim + epsilon);
            const float gate = z[at * z_row + z_first + group * z_step + inside * value_dim + row];
            out[(at * heads + head) * value_dim + row] = o * scale * norm[row] * silu(gate);
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
