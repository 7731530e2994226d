// The inputs of pairs of a token and an expert, where each expert takes columns in an order of its own.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/tensor.cuh"

struct Gather {
    // [tokens, cols]
    Tensor x;
    // [experts, cols]: which column belongs at each place, as a number.
    Tensor order;
    // [pairs, cols]
    Tensor out;
    // [pairs]: the expert of each.
    const u32* experts;
    u32 pairs;
    u32 cols;
    // Pairs of each token.
    u32 per_token;
    u32 unused;
};

// A thread takes a column: grid (pairs, parts).
extern "C" __global__ void moe_gather(const Gather p) {
    begin();
    for (u32 pair = blockIdx.x; pair < p.pairs; pair += gridDim.x) {
        const float *x = p.x.row(pair / p.per_token), *order = p.order.row(p.experts[pair]);
        float* out = p.out.row(pair);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) out[c] = x[(u32)order[c]];
    }
}
