// Rows of the embedding table, decoded. The table may lie in device memory or in host memory that the GPU reads.
#include "dequantize.cuh"

// Grid (columns / 256, tokens). A token outside of the vocabulary gives NaN.
template <class T>
__device__ inline void embed(const u8 *table, const u32 *tokens, float *out, int hidden, int vocabulary) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    const size_t row = blockIdx.y;
    const u32 token = tokens[row];
    float x = __int_as_float(0x7fffffff);
    if (token < (u32)vocabulary) {
        const size_t blocks = hidden / T::ELEMENTS;
        x = T::element(table + (token * blocks + i / T::ELEMENTS) * T::BYTES, i % T::ELEMENTS);
    }
    out[row * hidden + i] = x;
}

#define EMBED(NAME, TYPE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                           \
        NAME(const u8 *table, const u32 *tokens, float *out, int hidden, int vocabulary) {                     \
        embed<TYPE>(table, tokens, out, hidden, vocabulary);                                                    \
    }

EMBED(embed_f32, F32)
EMBED(embed_f16, F16)
EMBED(embed_bf16, Bf16)
EMBED(embed_q4_0, Q4_0)
EMBED(embed_q4_1, Q4_1)
EMBED(embed_q5_0, Q5_0)
EMBED(embed_q5_1, Q5_1)
EMBED(embed_q8_0, Q8_0)
EMBED(embed_q2_k, Q2_K)
EMBED(embed_q3_k, Q3_K)
EMBED(embed_q4_k, Q4_K)
EMBED(embed_q5_k, Q5_K)
EMBED(embed_q6_k, Q6_K)
EMBED(embed_iq4_nl, Iq4Nl)
EMBED(embed_iq4_xs, Iq4Xs)
EMBED(embed_mxfp4, Mxfp4)
