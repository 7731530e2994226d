// One token, normed or not, as integers of 11 bits in a block's shared memory.
#pragma once
#include "format/int11.cuh"
#include "gemv/fused.cuh"
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

// Encodes `cols` floats, of which there are whole groups, by the whole block: `to` [groups][128 bytes] as a row of a tile, `sums` [groups]. `kept`: room for the floats,
// without which they are read twice; a norm needs it, and columns by 256. Returns what results are multiplied with. The block then waits for all of its threads.
__device__ __forceinline__ float stage_int11(const float* x, const Norm& norm, u32 cols, u8* to, float* sums, float* kept) {
    __shared__ float inverse;
    __shared__ u32 greatest[32];
    const u32 lane = threadIdx.x % WARP, eights = cols / 8;
    if (norm.weight) {
        for (u32 i = threadIdx.x; i < cols / 4; i += blockDim.x) ((float4*)kept)[i] = __ldcg((const float4*)x + i);
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
            const float4 w = ((const float4*)norm.weight)[i];
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
    for (u32 i = 0; i < blockDim.x / WARP; i++) most = max(most, greatest[i]);
    const TokenScale scale = scale_of_token(most);
    // Whole warps go on, so that groups stay together.
#pragma unroll 1
    for (u32 i = threadIdx.x; i / WARP * WARP < eights; i += blockDim.x) {
        float v[8];
        u32 words[4];
        if (kept) load_eight(v, kept, i, i < eights);
        else load_eight_written(v, x, i, i < eights);
        const float sum = encode_eight(v, scale.before, words);
        if (i >= eights) continue;
        u8* row = to + i / 8 * 128 + i % 2 * 64 + i % 8 / 2 * 4;
#pragma unroll
        for (u32 c = 0; c < 4; c++) *(u32*)(row + 16 * c) = words[c];
        // A sum of integers below 2^20: exact.
        if (i % 8 == 0) sums[i / 8] = mul(sum, STEP);
    }
    return scale.behind;
}
