// One token as floats that each block of a product's kernel norms and encodes as integers of 11 bits for itself.
#pragma once
#include "format/int11.cuh"
#include "gemm/matmul.cuh"
#include "gemv/fused.cuh"
#include "prim/cp_async.cuh"
#include "prim/reduce.cuh"

struct OneToken {
    Matmul parts[3];
    Tensor x;
    Norm norm;
    // Parts are gate and up; the first's output takes silu(gate) * up.
    u32 gated;
    // Whether there is room to keep the floats; a norm needs it.
    u32 keeps;
};

// Encodes a token by the whole block. `kept`: room for it as floats; without it they are read twice. `put(i, v, e, sum)` takes v = n 2^e of each eight
// columns, and the sum of v of their group of 64. Returns what results are multiplied with.
template <u32 BLOCK_WARPS, class Put> __device__ __forceinline__ float encode_token(const float* x, const Norm& norm, u32 cols, float* kept, const float* weights, Put put) {
    __shared__ float inverse;
    __shared__ u32 greatest[BLOCK_WARPS];
    const u32 lane = threadIdx.x % WARP, eights = cols / 8;
    if (norm.weight) {
        for (u32 i = threadIdx.x; i < cols / 4; i += blockDim.x) ((float4*)kept)[i] = __ldcg((const float4*)x + i);
        cp_async_wait_all();
        __syncthreads();
        if (threadIdx.x < WARP) {
            const float own = inverse_rms_256(kept, cols, norm.eps);
            if (lane == 0) inverse = own;
        }
        __syncthreads();
    }
    u32 most = 0;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < cols / 4; i += blockDim.x) {
        float4 v = norm.weight ? ((const float4*)kept)[i] : __ldcg((const float4*)x + i);
        if (norm.weight) {
            const float4 w = ((const float4*)weights)[i];
            const float inv = inverse;
            v = make_float4(mul(mul(v.x, inv), w.x), mul(mul(v.y, inv), w.y), mul(mul(v.z, inv), w.z), mul(mul(v.w, inv), w.w));
        }
        if (kept) ((float4*)kept)[i] = v;
        most = max(max(most, max(bits(v.x) & 0x7fffffffu, bits(v.y) & 0x7fffffffu)), max(bits(v.z) & 0x7fffffffu, bits(v.w) & 0x7fffffffu));
    }
    most = warp_max_redux(most);
    if (lane == 0) greatest[threadIdx.x / WARP] = most;
    __syncthreads();
    most = 0;
#pragma unroll
    for (u32 i = 0; i < BLOCK_WARPS; i++) most = max(most, greatest[i]);
    const TokenScale scale = scale_of_token(most);
    // Whole warps go on, so that groups stay together.
#pragma unroll 1
    for (u32 i = threadIdx.x; i / WARP * WARP < eights; i += blockDim.x) {
        float own[8], v[8], sum;
        if (kept) load_eight(own, kept, i, i < eights);
        else load_eight_written(own, x, i, i < eights);
        const int e = round_eight(own, scale.before, v, sum);
        if (i < eights) put(i, v, e, sum);
    }
    return scale.behind;
}
