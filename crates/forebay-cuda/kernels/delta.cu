// Recurrent layers: the gated delta rule (Yang et al. 2025, "Gated Delta Networks"), Kimi Delta Attention (Kimi Team 2025, "Kimi
// Linear"), Mamba-2 (Dao and Gu 2024, "Transformers are SSMs") and lightning attention (Qin et al. 2024, "Various Lengths, Constant Speed"). Tokens are computed one after another in one fixed order, so
// the bits of a token do not depend on where its sequence is cut, or on other sequences.
// KEY_DIM is the most elements of a key.
#include "pipeline.cuh"
#include "recurrent.cuh"
#include "reduce.cuh"
#include "state_runs.cuh"

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

enum Rule { GATED_DELTA, KIMI_DELTA, MAMBA2, LIGHTNING };

// True if values are added to a state, and not what they differ from those that it holds. Keys are then taken as they are, and another
// kernel norms and gates the outputs.
static constexpr __host__ __device__ bool adds(Rule rule) { return rule == MAMBA2 || rule == LIGHTNING; }

// A value head's key head, and its place among those that share columns of a product.
struct Head {
    int key_head, group, inside;

    __device__ __forceinline__ Head(int head, int heads, int key_heads, int tiled) {
        const int per_key = heads / key_heads;
        key_head = tiled ? head % key_heads : head / per_key;
        group = head / per_key, inside = head % per_key;
    }
};

// Returns the factor that makes a query or key `scale` long. All lanes of a warp call this.
__device__ __forceinline__ float key_factor(const float *from, int key_dim, int lane, float scale) {
    float sum = 0.0f;
    for (int i = lane; i < key_dim; i += 32) sum = __fmaf_rn(from[i], from[i], sum);
    return scale / sqrtf(warp_sum(sum) + 1e-6f);
}

// Returns the factor by which a state decays. `bound`, if it is not 0, is the logarithm of KIMI_DELTA's fastest decay.
template <Rule RULE> __device__ __forceinline__ float decay_of(float raw, float decay, float bound) {
    if (RULE == KIMI_DELTA && bound != 0.0f) return expf(bound / (1.0f + expf(decay * raw)));
    return expf(decay * softplus(raw));
}

// Returns the share of a key's value that is replaced, times `scale`.
__device__ __forceinline__ float share_of(float b, float scale) { return scale / __fadd_rn(1.0f, expf(-b)); }

// Returns the factor of the norm of a head's outputs. All lanes of a warp call this.
__device__ __forceinline__ float norm_factor(const float *outputs, int value_dim, int lane, float epsilon) {
    float square = 0.0f;
    for (int i = lane; i < value_dim; i += 32) square = __fmaf_rn(outputs[i], outputs[i], square);
    return 1.0f / sqrtf(warp_sum(square) / (float)value_dim + epsilon);
}

__device__ __forceinline__ float gated_output(float o, float factor, float norm, float gate, int sigmoid_gate) {
    const float normed = o * factor * norm;
    return sigmoid_gate ? times_logistic(normed, gate) : normed * silu(gate);
}

// A thread's part of a row of a state matrix [value_dim, key_dim]: quads number part + i * PARTS. Elements beyond key_dim are 0 and
// stay so.
template <Rule RULE> struct RowState {
    float state[QUADS][4];

    __device__ __forceinline__ void load(const float *row, int part, int key_dim) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const int at = 4 * (part + i * PARTS);
            float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row && at < key_dim) quad = *(const float4 *)(row + at);
            state[i][0] = quad.x, state[i][1] = quad.y, state[i][2] = quad.z, state[i][3] = quad.w;
        }
    }

    __device__ __forceinline__ void store(float *row, int part, int key_dim) const {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const int at = 4 * (part + i * PARTS);
            if (at < key_dim) *(float4 *)(row + at) = make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
        }
    }

    // Takes one token: decays the row, replaces a share of what it holds for the key by `value`, and returns its product with the
    // query. `factors` [key_dim] are KIMI_DELTA's decays; the others decay by `decay`. MAMBA2 and LIGHTNING add the value instead.
    __device__ __forceinline__ float advance(const float *keys, const float *queries, const float *factors, float decay, float share,
                                             float value, int part) {
        float change = share * value;
        if (!adds(RULE)) {
            // What the decayed state holds for the key.
            float held[4] = {};
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 k = *(const float4 *)(keys + 4 * (part + i * PARTS));
                if (RULE == KIMI_DELTA) {
                    const float4 d = *(const float4 *)(factors + 4 * (part + i * PARTS));
                    state[i][0] *= d.x, state[i][1] *= d.y, state[i][2] *= d.z, state[i][3] *= d.w;
                }
                held[0] = __fmaf_rn(state[i][0], k.x, held[0]);
                held[1] = __fmaf_rn(state[i][1], k.y, held[1]);
                held[2] = __fmaf_rn(state[i][2], k.z, held[2]);
                held[3] = __fmaf_rn(state[i][3], k.w, held[3]);
            }
            float sum = part_sum(__fadd_rn(__fadd_rn(held[0], held[1]), __fadd_rn(held[2], held[3])));
            if (RULE == GATED_DELTA) sum = __fmul_rn(decay, sum);
            change = share * __fsub_rn(value, sum);
        }
        float out[4] = {};
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
            out[0] = __fmaf_rn(state[i][0], q.x, out[0]);
            out[1] = __fmaf_rn(state[i][1], q.y, out[1]);
            out[2] = __fmaf_rn(state[i][2], q.z, out[2]);
            out[3] = __fmaf_rn(state[i][3], q.w, out[3]);
        }
        return part_sum(__fadd_rn(__fadd_rn(out[0], out[1]), __fadd_rn(out[2], out[3])));
    }
};

#define STEPS_PARAMETERS                                                                                                   \
    const float *mixed, int key_heads, int key_dim, int value_dim, int tiled, int sigmoid_gate, PRODUCT(z), PRODUCT(b),    \
        PRODUCT(a), const float *decays, const float *steps, const float *skips, const float *norm, float epsilon,         \
        float bound, float share_scale, const u32 *run_words, int first_row, float *states, u64 state_floats,              \
        u64 tail_floats, float *out
#define STEPS_ARGUMENTS                                                                                                    \
    mixed, key_heads, key_dim, value_dim, tiled, sigmoid_gate, z, z_row, z_first, z_step, b, b_row, b_first, b_step, a,    \
        a_row, a_first, a_step, decays, steps, skips, norm, epsilon, bound, share_scale, run_words, first_row, states,     \
        state_floats, tail_floats, out

// Computes the steps of all tokens of a run for one value head: out [rows, value_heads, value_dim], normed and gated except for
// MAMBA2 and LIGHTNING. KIMI_DELTA has a step for each element of a key, the others have one for each head. This is for runs of few tokens: it
// prepares each token, takes its step and finishes its outputs in turn. Grid (value_heads, runs), block value_dim * PARTS, a
// multiple of 32.
template <Rule RULE> __device__ __forceinline__ void compute_steps(STEPS_PARAMETERS) {
    wait_for_previous();
    __shared__ __align__(16) float keys[KEY_DIM], queries[KEY_DIM], factors[KEY_DIM];
    __shared__ float share, outputs[1024 / PARTS];
    const StateRun run = ((const StateRun *)run_words)[blockIdx.y];
    if (run.count == 0) return;
    const int index = blockIdx.x, heads = gridDim.x;
    const Head head(index, heads, key_heads, tiled);
    const int channels = 2 * key_heads * key_dim + heads * value_dim;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const u64 matrix = tail_floats + ((u64)index * value_dim + row) * key_dim;
    RowState<RULE> own;
    own.load(run.from == NO_STATE ? nullptr : states + run.from * state_floats + matrix, part, key_dim);
    const float key_scale = 1.0f / sqrtf((float)key_dim);
    for (u32 token = 0; token < run.count; token++) {
        const size_t at = run.first - first_row + token;
        const float *in = mixed + at * channels;
        for (int job = warp; job < 3; job += warps) {
            if (job == 2) {
                const int width = RULE == KIMI_DELTA ? key_dim : 1;
                const float *raw = a + at * a_row + a_first + head.group * a_step + head.inside * width;
                if (RULE == LIGHTNING) {
                    if (lane == 0) factors[0] = expf(decays[index]), share = 1.0f;
                    continue;
                }
                for (int i = lane; i < (RULE == KIMI_DELTA ? KEY_DIM : 1); i += 32) {
                    const float step = i < width ? raw[i] + steps[index * width + i] : 0.0f;
                    factors[i] = i < width ? decay_of<RULE>(step, decays[index], bound) : 0.0f;
                    if (RULE == MAMBA2) share = softplus(step);
                }
                if (RULE != MAMBA2 && lane == 0) {
                    share = share_of(b[at * b_row + b_first + head.group * b_step + head.inside], share_scale);
                }
                continue;
            }
            const float *from = in + (job == 0 ? key_heads * key_dim : 0) + head.key_head * key_dim;
            float *to = job == 0 ? keys : queries;
            const float factor = adds(RULE) ? 1.0f : key_factor(from, key_dim, lane, job == 0 ? 1.0f : key_scale);
            for (int i = lane; i < KEY_DIM; i += 32) to[i] = i < key_dim ? from[i] * factor : 0.0f;
        }
        __syncthreads();
        const float value = in[2 * key_heads * key_dim + index * value_dim + row];
        const float o = own.advance(keys, queries, factors, factors[0], share, value, part);
        float *to = out + (at * heads + index) * value_dim + row;
        if (adds(RULE)) {
            if (part == 0) *to = skips ? __fmaf_rn(value, skips[index], o) : o;
            __syncthreads();
            continue;
        }
        if (part == 0) outputs[row] = o;
        // This also ends the use of keys, queries and factors by all threads.
        __syncthreads();
        const float factor = norm_factor(outputs, value_dim, lane, epsilon);
        if (part == 0) {
            const float gate = z[at * z_row + z_first + head.group * z_step + head.inside * value_dim + row];
            *to = gated_output(o, factor, norm[row], gate, sigmoid_gate);
        }
    }
    own.store(states + run.to * state_floats + matrix, part, key_dim);
}

#define STEPS(name, rule)                                                                              \
    extern "C" __global__ void __launch_bounds__(KEY_DIM > 128 ? 1024 : 512) name(STEPS_PARAMETERS) { \
        compute_steps<rule>(STEPS_ARGUMENTS);                                                          \
    }

STEPS(delta_steps, GATED_DELTA)
STEPS(kimi_steps, KIMI_DELTA)
STEPS(mamba2_steps, MAMBA2)
STEPS(lightning_steps, LIGHTNING)

// Long runs have three kernels instead, which give the same bits: the first prepares all tokens, the second takes their steps one
// after another, and the last finishes all outputs. So the second does nothing else, and since rows of a state do not depend on one
// another, it spreads them over many blocks.
//
// Time budget of the second, for each token: a thread has 32 elements, which cost 4 instructions each with their loads, and two sums
// over PARTS threads, 50 clocks each, of which one is on the way to the next token. With one warp for each scheduler that is 200 to
// 250 clocks, 0.13 us, whatever the number of heads, as long as all blocks run at a time.

// Normalises queries and keys in `mixed`, and replaces `b` and `a` by shares and decays; MAMBA2 has steps in `a`. Grid
// (ceil(jobs / 4), rows), block 128. A job is a query or key (not for MAMBA2), or 32 decays.
template <Rule RULE>
__device__ __forceinline__ void prepare(float *mixed, int key_heads, int key_dim, int heads, int value_dim, float *b, int b_row,
                                        int b_first, int b_step, float *a, int a_row, int a_first, int a_step, const float *decays,
                                        const float *steps, float bound, float share_scale) {
    wait_for_previous();
    const int lane = threadIdx.x & 31, per_key = heads / key_heads;
    const size_t at = blockIdx.y;
    int job = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int keys = RULE == MAMBA2 ? 0 : 2 * key_heads;
    if (job < keys) {
        // Queries of all heads come first, then keys.
        float *own = mixed + at * (2 * key_heads * key_dim + heads * value_dim) + job * key_dim;
        const float factor = key_factor(own, key_dim, lane, job < key_heads ? 1.0f / sqrtf((float)key_dim) : 1.0f);
        for (int i = lane; i < key_dim; i += 32) own[i] *= factor;
        return;
    }
    const int width = RULE == KIMI_DELTA ? key_dim : 1, index = (job - keys) * 32 + lane, head = index / width;
    if (head >= heads) return;
    const int group = head / per_key, inside = head % per_key, element = index % width;
    float *const own = a + at * a_row + a_first + group * a_step + inside * width + element;
    const float raw = *own + steps[index];
    *own = RULE == MAMBA2 ? softplus(raw) : decay_of<RULE>(raw, decays[head], bound);
    if (RULE != MAMBA2 && element == 0) {
        float *const share = b + at * b_row + b_first + group * b_step + inside;
        *share = share_of(*share, share_scale);
    }
}

#define PREPARE(name, rule)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128)                                                                      \
        name(float *mixed, int key_heads, int key_dim, int heads, int value_dim, float *b, int b_row, int b_first,         \
             int b_step, float *a, int a_row, int a_first, int a_step, const float *decays, const float *steps,            \
             float bound, float share_scale) {                                                                             \
        prepare<rule>(mixed, key_heads, key_dim, heads, value_dim, b, b_row, b_first, b_step, a, a_row, a_first, a_step,   \
                      decays, steps, bound, share_scale);                                                                  \
    }

PREPARE(delta_prepare, GATED_DELTA)
PREPARE(kimi_prepare, KIMI_DELTA)
PREPARE(mamba2_prepare, MAMBA2)

// Tokens of a stage of shared memory, and stages: two are on their way while one is used.
static constexpr int STAGE_TOKENS = 4, STAGES = 3;
// The most threads of a block, and the rows of a state that they have.
static constexpr int SCAN_THREADS = 128, SCAN_ROWS = SCAN_THREADS / PARTS;

// Takes the steps of prepared tokens for some rows of the state of a value head: out [rows, value_heads, value_dim], neither normed
// nor gated. Grid (value_heads * blocks of a head, runs), block a divisor of value_dim * PARTS.
template <Rule RULE> __device__ __forceinline__ void scan(STEPS_PARAMETERS, int heads) {
    constexpr int DECAYS = RULE == KIMI_DELTA ? KEY_DIM : 4;
    struct Stage {
        float keys[STAGE_TOKENS][KEY_DIM], queries[STAGE_TOKENS][KEY_DIM], factors[STAGE_TOKENS][DECAYS];
        float values[STAGE_TOKENS][SCAN_ROWS], shares[STAGE_TOKENS];
    };
    __shared__ __align__(16) Stage stages[STAGES];
    wait_for_previous();
    const StateRun run = ((const StateRun *)run_words)[blockIdx.y];
    if (run.count == 0) return;
    const int of_head = gridDim.x / heads, index = blockIdx.x / of_head, rows = blockDim.x / PARTS;
    const Head head(index, heads, key_heads, tiled);
    const int channels = 2 * key_heads * key_dim + heads * value_dim;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int first_of_head = blockIdx.x % of_head * rows, in_block = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const int row = first_of_head + in_block;
    const u64 matrix = tail_floats + ((u64)index * value_dim + row) * key_dim;
    RowState<RULE> own;
    own.load(run.from == NO_STATE ? nullptr : states + run.from * state_floats + matrix, part, key_dim);
    // No copy writes the elements beyond key_dim.
    for (int s = 0; s < STAGES; s++)
        for (int t = 0; t < STAGE_TOKENS; t++)
            for (int i = key_dim + threadIdx.x; i < KEY_DIM; i += blockDim.x) {
                stages[s].keys[t][i] = stages[s].queries[t][i] = 0.0f;
                if (RULE == KIMI_DELTA) stages[s].factors[t][i] = 0.0f;
            }
    const int width = RULE == KIMI_DELTA ? key_dim : 1, count = (int)run.count;
    const size_t begin = run.first - first_row;
    const auto fill = [&](int first, Stage &stage) {
        for (int t = warp; t < STAGE_TOKENS && first + t < count; t += warps) {
            const size_t at = begin + first + t;
            const float *query = mixed + at * channels + head.key_head * key_dim, *key = query + key_heads * key_dim;
            for (int i = 4 * lane; i < key_dim; i += 128) {
                copy_async(shared_address(stage.keys[t] + i), (u64)(key + i));
                copy_async(shared_address(stage.queries[t] + i), (u64)(query + i));
            }
            const float *values = mixed + at * channels + 2 * key_heads * key_dim + index * value_dim + first_of_head;
            for (int i = lane; i < rows; i += 32) copy_async_4(shared_address(stage.values[t] + i), (u64)(values + i));
            if (RULE == LIGHTNING) continue;
            const float *decay = a + at * a_row + a_first + head.group * a_step + head.inside * width;
            for (int i = lane; i < width; i += 32) copy_async_4(shared_address(stage.factors[t] + i), (u64)(decay + i));
            if (RULE != MAMBA2 && lane == 0) {
                const float *share = b + at * b_row + b_first + head.group * b_step + head.inside;
                copy_async_4(shared_address(stage.shares + t), (u64)share);
            }
        }
        copy_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) fill(s * STAGE_TOKENS, stages[s]);
    float *to = out + (begin * heads + index) * value_dim + row;
    const float decay_of_head = RULE == LIGHTNING ? expf(decays[index]) : RULE == MAMBA2 ? decays[index] : 0.0f;
    const float skip = RULE == MAMBA2 && skips ? skips[index] : 0.0f;
    int now = 0;
    for (int first = 0; first < count; first += STAGE_TOKENS) {
        copy_wait<STAGES - 2>();
        // This stage is there for all threads, and none reads the one before it any more.
        __syncthreads();
        fill(first + (STAGES - 1) * STAGE_TOKENS, stages[now == 0 ? STAGES - 1 : now - 1]);
        const Stage &stage = stages[now];
        now = now + 1 == STAGES ? 0 : now + 1;
#pragma unroll
        for (int t = 0; t < STAGE_TOKENS; t++) {
            if (first + t >= count) break;
            const float value = stage.values[t][in_block], step = RULE == LIGHTNING ? 1.0f : stage.factors[t][0];
            const float decay = RULE == LIGHTNING ? decay_of_head : RULE == MAMBA2 ? expf(decay_of_head * step) : step;
            const float share = adds(RULE) ? step : stage.shares[t];
            const float o = own.advance(stage.keys[t], stage.queries[t], stage.factors[t], decay, share, value, part);
            if (part == 0) *to = RULE == MAMBA2 && skips ? __fmaf_rn(value, skip, o) : o;
            to += (size_t)heads * value_dim;
        }
    }
    own.store(states + run.to * state_floats + matrix, part, key_dim);
}

#define SCAN(name, rule)                                                                                  \
    extern "C" __global__ void __launch_bounds__(SCAN_THREADS) name(STEPS_PARAMETERS, int heads) { \
        scan<rule>(STEPS_ARGUMENTS, heads);                                                               \
    }

SCAN(delta_scan, GATED_DELTA)
SCAN(kimi_scan, KIMI_DELTA)
SCAN(mamba2_scan, MAMBA2)
SCAN(lightning_scan, LIGHTNING)

// Norms and gates outputs [rows, heads, value_dim]. Grid (ceil(heads / 4), rows), block 128: a warp has a head.
extern "C" __global__ void __launch_bounds__(128)
    delta_finish(int key_heads, int heads, int value_dim, int sigmoid_gate, PRODUCT(z), const float *norm, float epsilon, float *out) {
    wait_for_previous();
    const int lane = threadIdx.x & 31, head = blockIdx.x * 4 + (threadIdx.x >> 5), per_key = heads / key_heads;
    if (head >= heads) return;
    const size_t at = blockIdx.y;
    float *const own = out + (at * heads + head) * value_dim;
    const float *const gates = z + at * z_row + z_first + head / per_key * z_step + head % per_key * value_dim;
    const float factor = norm_factor(own, value_dim, lane, epsilon);
    for (int i = lane; i < value_dim; i += 32) own[i] = gated_output(own[i], factor, norm[i], gates[i], sigmoid_gate);
}

// Multiplies outputs [rows, groups, width] by the activated gate, then norms each group unless `norm` is null. If `gate_last` is 1, norms
// each group first, then multiplies it by the sigmoid of the gate. `values` is the number of elements of the gate that one key head
// serves. Grid (groups, rows).
extern "C" __global__ void __launch_bounds__(256)
    norm_groups(PRODUCT(z), int values, int width, const float *norm, float epsilon, int gate_last, float *out) {
    wait_for_previous();
    __shared__ float sums[32];
    const size_t row = blockIdx.y;
    const int first = blockIdx.x * width;
    float *own = out + (row * gridDim.x + blockIdx.x) * width;
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int element = first + i;
        float x = own[i];
        if (!gate_last) {
            x *= silu(z[row * z_row + z_first + element / values * z_step + element % values]);
            own[i] = x;
        }
        square = __fmaf_rn(x, x, square);
    }
    if (!norm) return;
    const float scale = 1.0f / sqrtf(block_sum(square, sums) / (float)width + epsilon);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int element = first + i;
        float x = own[i] * scale * norm[element];
        if (gate_last) x = times_logistic(x, z[row * z_row + z_first + element / values * z_step + element % values]);
        own[i] = x;
    }
}
