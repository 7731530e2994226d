// Products of a mixture's experts that have a few tokens each: by rows, whose weights are read once for up to TOGETHER tokens, since tiles of tensor cores would be mostly
// empty, and their blocks wait for one thing after the other. Groups of 64, scales of sixteen bits. A warp takes eight rows, a lane a group, a chain's lane all groups of the
// chain. Grid: (blocks of rows, tiles, parts).
#pragma once
#include "rows_one.cu"

static const u32 FEW_THREADS = 256, FEW_ROWS = FEW_THREADS / 4, TOGETHER = 4;

// Bytes of a token's activations in shared memory.
__device__ __forceinline__ u32 few_bytes(u32 groups) { return 64 * (groups + 1) + (12 * groups + 15) / 16 * 16; }

template <int BITS> __device__ __forceinline__ void experts_few(const Matmul& p) {
    __shared__ u32 outputs[TOGETHER];
    // Rounds that are under way.
    const int DEEP = BITS <= 4 ? 2 : 1;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, chain = lane & 3, groups = p.cols / 64;
    const u32 row = blockIdx.x * FEW_ROWS + warp * 8 + lane / 4, bytes = few_bytes(groups);
    u8* const all = (u8*)room;
    begin();
    const u32 tiles = p.tiles[0];
#pragma unroll 1
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        const uint4 of = ((const uint4*)p.tiles)[1 + tile];
        const Matrix m = p.table[of.x];
        // Of an expert that is not there.
        if (m.kind != INTEGERS + (BITS == 8 ? 5 : BITS - 2)) continue;
        const bool inside = row < p.rows;
#pragma unroll 1
        for (u32 from = 0; from < of.z; from += TOGETHER) {
            const u32 n = min(TOGETHER, of.z - from);
            // 1. The first weights, and activations
            u32 words[DEEP][2 * BITS], s[DEEP], b[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const u32 group = chain + 4 * d;
                load_unit<BITS>(words[d], s[d], b[d], m, row, m.row_bytes, groups, group, inside && group < groups);
            }
            __syncthreads();
            if (threadIdx.x < n) outputs[threadIdx.x] = p.order[of.y + from + threadIdx.x];
            __syncthreads();
#pragma unroll 1
            for (u32 t = 0; t < n; t++) {
                const u64 input = outputs[t] / p.per_row;
                const uint4* q = (const uint4*)(p.x.q + input * p.cols);
                const float2 *sx = (const float2*)(p.x.sx + input * (p.cols / 32)), *mx = (const float2*)(p.x.mx + input * (p.cols / 32));
                const Quarters to = {(uint4*)(all + t * bytes), groups + 1, (float2*)(all + t * bytes + 64 * (groups + 1)), (float*)(all + t * bytes + 64 * (groups + 1) + 8 * groups)};
                for (u32 i = threadIdx.x; i < 4 * groups; i += FEW_THREADS) copy_later(to.q + i % 4 * to.stride + i / 4, q + i);
                for (u32 i = threadIdx.x; i < groups; i += FEW_THREADS) {
                    const float2 mean = mx[i];
                    to.sx[i] = sx[i];
                    to.m[i] = add(mean.x, mean.y);
                }
            }
            copied();
            __syncthreads();
            // 2. Chains
            float acc[TOGETHER];
#pragma unroll
            for (u32 t = 0; t < TOGETHER; t++) acc[t] = 0.0f;
#pragma unroll 1
            for (u32 group = chain; group - chain < groups; group += 4) {
                u32 own[2 * BITS];
#pragma unroll
                for (int i = 0; i < 2 * BITS; i++) own[i] = words[0][i];
                const float scale = half_value(s[0], m.type), bias = half_value(b[0], m.type);
#pragma unroll
                for (int d = 0; d + 1 < DEEP; d++) {
#pragma unroll
                    for (int i = 0; i < 2 * BITS; i++) words[d][i] = words[d + 1][i];
                    s[d] = s[d + 1], b[d] = b[d + 1];
                }
                const u32 next = group + 4 * DEEP;
                load_unit<BITS>(words[DEEP - 1], s[DEEP - 1], b[DEEP - 1], m, row, m.row_bytes, groups, next, inside && next < groups);
#pragma unroll
                for (u32 t = 0; t < TOGETHER; t++) {
                    if (t >= n) continue;
                    const Quarters x = {(uint4*)(all + t * bytes), groups + 1, (float2*)(all + t * bytes + 64 * (groups + 1)), (float*)(all + t * bytes + 64 * (groups + 1) + 8 * groups)};
                    float sum, mean;
                    unit_sum<BITS>(own, x, min(group, groups - 1), sum, mean);
                    const float y = fma(bias, mean, fma(scale, sum, acc[t]));
                    if (group < groups) acc[t] = y;
                }
            }
            // 3. Results
#pragma unroll
            for (u32 t = 0; t < TOGETHER; t++) {
                float y = add(acc[t], __shfl_xor_sync(ALL, acc[t], 2));
                y = add(y, __shfl_xor_sync(ALL, y, 1));
                if (t < n && chain == 0 && inside) p.out.row(outputs[t])[row] = y;
            }
        }
    }
}

#define FEW(bits) \
    extern "C" __global__ void __launch_bounds__(256, 3) few_##bits(const __grid_constant__ Products p) { experts_few<bits>(p.parts[blockIdx.z]); }

FEW(2)
FEW(3)
FEW(4)
FEW(5)
FEW(6)
FEW(8)
