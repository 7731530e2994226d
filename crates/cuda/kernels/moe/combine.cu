// The weighted sum of the outputs of a token's experts.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/tensor.cuh"

struct Combine {
    // [tokens, k, cols]: outputs of each token's experts, and [tokens, k] their weights.
    const float* outputs;
    const float* weights;
    // [tokens, cols]: output of the shared expert; null: there is none.
    const float* shared;
    // [tokens]: gate of the shared expert before the sigmoid; null: 1.
    const float* gates;
    Tensor residual;
    u32 tokens;
    u32 cols;
    u32 k;
    u32 unused;
    // [tokens, k]: each token's experts, and [experts, cols] what is added to their outputs; null: nothing.
    const u32* experts;
    Tensor bias;
};

// `residual += sum of the routed experts + gate * the shared one`
extern "C" __global__ void moe_combine(const Combine p) {
    begin();
    for (u32 t = blockIdx.y; t < p.tokens; t += gridDim.y) {
        for (u32 c = blockIdx.x * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.x * blockDim.x) {
            const int DEEP = 8;
            float* to = p.residual.row(t) + c;
            const float before = *to;
            float sum = 0.0f;
#pragma unroll 1
            for (u32 from = 0; from < p.k; from += DEEP) {
                float weights[DEEP], outputs[DEEP];
#pragma unroll
                for (u32 d = 0; d < DEEP; d++) {
                    const u64 pair = (u64)t * p.k + min(from + d, p.k - 1);
                    weights[d] = p.weights[pair];
                    outputs[d] = p.outputs[pair * p.cols + c];
                    if (p.bias.at) outputs[d] = add(outputs[d], p.bias.row(p.experts[pair])[c]);
                }
#pragma unroll
                for (u32 d = 0; d < DEEP; d++) sum = from + d < p.k ? fma(weights[d], outputs[d], sum) : sum;
            }
            if (p.shared) {
                float gate = p.gates ? sigmoid(p.gates[t]) : 1.0f;
                sum = fma(gate, p.shared[(u64)t * p.cols + c], sum);
            }
            *to = add(before, sum);
        }
    }
}
