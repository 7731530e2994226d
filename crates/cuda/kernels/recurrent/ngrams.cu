// Embeddings of n-grams: how much of a value each residual stream takes, in front of a short convolution, and the sum of both.
#include "attention/lanes.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

struct Ngrams {
    // [rows, count * hidden], normed: keys and streams.
    Tensor keys;
    Tensor queries;
    // [rows, hidden]
    Tensor value;
    // [rows, count * hidden]
    Tensor streams;
    // A run of weights for each stream.
    Norm norm;
    // [rows, count * hidden]: what gates let through, the same normed, and that convolved.
    float* gated;
    float* normed;
    const float* convolved;
    u32 rows;
    u32 hidden;
    u32 count;
    // Of products of keys and streams.
    float scale;
};

static const u32 NGRAM_THREADS = 256;

// The root of what is at least a millionth, with the sign of x; 0 for 0.
__device__ __forceinline__ float signed_root(float x) {
    if (x == 0.0f) return 0.0f;
    const float size = bits(bits(x) & 0x7fffffffu), root = __fsqrt_rn(size < 1e-6f ? 1e-6f : size);
    return bits(bits(root) | (bits(x) & 0x80000000u));
}

// A block takes a stream of a row; its first warp sums. Grid (rows, streams).
extern "C" __global__ void __launch_bounds__(NGRAM_THREADS) ngram_gate(const Ngrams p) {
    __shared__ float share, inverse;
    begin();
    const u32 hidden = p.hidden, lane = threadIdx.x % 16;
    const u64 from = (u64)blockIdx.y * hidden;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float *key = p.keys.row(r) + from, *query = p.queries.row(r) + from, *value = p.value.row(r), *weight = p.norm.weight + from;
        const u64 at = (u64)r * p.count * hidden + from;
        float *gated = p.gated + at, *normed = p.normed + at;
        __syncthreads();
        if (threadIdx.x < WARP) {
            float dot = 0.0f;
            // Both halves of the warp have the same sixteen lanes.
            for (u32 i = lane; i < (hidden + 15) / 16 * 16; i += 16) dot = fma(i < hidden ? key[i] : 0.0f, i < hidden ? query[i] : 0.0f, dot);
            const float own = sigmoid(signed_root(mul(lane_tree(dot), p.scale)));
            if (threadIdx.x == 0) share = own;
        }
        __syncthreads();
        for (u32 c = threadIdx.x; c < hidden; c += blockDim.x) gated[c] = mul(share, value[c]);
        __syncthreads();
        if (threadIdx.x < WARP) {
            const float inv = inverse_rms(gated, hidden, p.norm.eps);
            if (threadIdx.x == 0) inverse = inv;
        }
        __syncthreads();
        for (u32 c = threadIdx.x; c < hidden; c += blockDim.x) normed[c] = mul(mul(gated[c], inverse), weight[c]);
    }
}

// Grid (rows, parts).
extern "C" __global__ void __launch_bounds__(NGRAM_THREADS) ngram_add(const Ngrams p) {
    begin();
    const u32 all = p.count * p.hidden;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* streams = p.streams.row(r);
        const float *gated = p.gated + (u64)r * all, *convolved = p.convolved + (u64)r * all;
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < all; c += gridDim.y * blockDim.x) streams[c] = add(streams[c], add(gated[c], convolved[c]));
    }
}
