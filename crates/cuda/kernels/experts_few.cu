// Products of a mixture's experts that have a few tokens each: by rows, whose weights are read once for up to TOGETHER tokens, since tiles of tensor cores would be mostly
// empty, and their blocks wait for one thing after the other. Groups of 64, scales of sixteen bits. A warp takes eight rows, a lane a group, a chain's lane all groups of the
// chain. Rows of all experts are dealt out to as many blocks as the device holds at once, evenly, and their weights come without a pause from set of rows to set.
#pragma once
#include "rows_one.cu"

struct ExpertsFew {
    // Of each expert: the matrix; and where what it gives is put through `silu(gate) * up`, that of up.
    const Matrix* table;
    const Matrix* up;
    // As in `Pairs`, with TOGETHER pairs a tile at most.
    const u32* tiles;
    const u32* order;
    Encoded x;
    // [pairs, rows]: what is hidden, in integers, where there is an `up`; else `out`.
    Encoded hidden;
    Tensor out;
    // Pairs of each row of x.
    u32 per_row;
    u32 rows;
    u32 cols;
    u32 type;
};

static const u32 FEW_THREADS = 256, FEW_ROWS = FEW_THREADS / 4, TOGETHER = 4;

// Bytes of a token's activations in shared memory.
__device__ __forceinline__ u32 few_bytes(u32 groups) { return 64 * (groups + 1) + (12 * groups + 15) / 16 * 16; }

// Encodes 32 columns, one a lane, as `encode` does it; `at`: of the first.
__device__ __forceinline__ void encode_lanes(float v, u64 at, const Encoded& to) {
    const u32 lane = threadIdx.x % WARP, eighth = lane % 8;
    const float a = bits(warp_greatest(bits(v) & 0x7fffffffu));
    float inv = div(127.0f, a);
    if (!is_finite(inv)) inv = 0.0f;
    const int q = to_i8(mul(v, inv)), sum = warp_sum(q);
    to.q[at + lane - eighth + eighth / 2 + eighth % 2 * 4] = (i8)q;
    if (lane == 0) {
        const float scale = div(a, 127.0f);
        to.sx[at / 32] = scale;
        to.mx[at / 32] = mul(scale, (float)sum);
    }
}

// A set of rows is FEW_ROWS of them; with GATED, half as many of gate and of up.
template <int BITS, bool GATED> __device__ __forceinline__ void experts_few(const ExpertsFew& p) {
    __shared__ u32 outputs[TOGETHER];
    // Of two sets one behind the other.
    __shared__ float both[GATED ? 2 : 1][TOGETHER][2][WARP];
    // Units that are under way.
    const u32 DEEP = BITS <= 4 ? 3 : BITS <= 6 ? 2 : 1;
    const u32 of_set = GATED ? FEW_ROWS / 2 : FEW_ROWS;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, chain = lane & 3, groups = p.cols / 64, rounds = (groups + 3) / 4, bytes = few_bytes(groups);
    const u32 in_set = (warp * 8 + lane / 4) % of_set, is_up = GATED ? warp / 4 : 0, sets = (p.rows + of_set - 1) / of_set;
    const u64 row_bytes = groups * (8 * BITS);
    u8* const all = (u8*)room;
    const Matrix* const table = is_up ? p.up : p.table;
    begin();
    const u32 tasks = p.tiles[0] * sets, end = (u32)((u64)(blockIdx.x + 1) * tasks / gridDim.x);
    u32 task = (u32)((u64)blockIdx.x * tasks / gridDim.x), turn = 0;
#pragma unroll 1
    while (task < end) {
        // A tile's rows, as far as they are this block's.
        const u32 tile = task / sets, set = task - tile * sets, count = min(end - task, sets - set);
        task += count;
        const uint4 of = ((const uint4*)p.tiles)[1 + tile];
        const u32 n = of.z;
        const Matrix& m = table[of.x];
        // Of an expert that is not there.
        const u32 KIND = INTEGERS + (BITS == 8 ? 5 : BITS - 2);
        if (p.table[of.x].kind != KIND || GATED && p.up[of.x].kind != KIND) continue;
        const OnePart place = {m.data, m.scales, m.biases, nullptr};
        // 1. The first weights, and activations
        u32 words[DEEP][2 * BITS], s[DEEP], b[DEEP], next_row = set * of_set + in_set, next_round = 0;
        auto load = [&](u32 d) {
            const u32 group = chain + 4 * next_round;
            load_unit<BITS>(words[d], s[d], b[d], place, next_row, row_bytes, groups, group, next_row < p.rows && group < groups);
            if (++next_round == rounds) next_round = 0, next_row += of_set;
        };
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) load(d);
        __syncthreads();
        if (threadIdx.x < n) outputs[threadIdx.x] = p.order[of.y + threadIdx.x];
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
        u32 row = set * of_set + in_set, group = chain;
        u32 left = count * rounds, round = 0;
#pragma unroll 1
        for (; left > 0; left--) {
            u32 own[2 * BITS];
#pragma unroll
            for (int i = 0; i < 2 * BITS; i++) own[i] = words[0][i];
            const float scale = half_value(s[0], p.type), bias = half_value(b[0], p.type);
#pragma unroll
            for (u32 d = 0; d + 1 < DEEP; d++) {
#pragma unroll
                for (int i = 0; i < 2 * BITS; i++) words[d][i] = words[d + 1][i];
                s[d] = s[d + 1], b[d] = b[d + 1];
            }
            // What lies behind the last set is not asked for.
            if (left > DEEP) load(DEEP - 1);
#pragma unroll
            for (u32 t = 0; t < TOGETHER; t++) {
                if (t >= n) continue;
                const Quarters x = {(uint4*)(all + t * bytes), groups + 1, (float2*)(all + t * bytes + 64 * (groups + 1)), (float*)(all + t * bytes + 64 * (groups + 1) + 8 * groups)};
                float sum, mean;
                unit_sum<BITS>(own, x, min(group, groups - 1), sum, mean);
                const float y = fma(bias, mean, fma(scale, sum, acc[t]));
                if (group < groups) acc[t] = y;
            }
            group += 4;
            if (++round < rounds) continue;
            // 3. Results of a set
            round = 0, group = chain;
#pragma unroll
            for (u32 t = 0; t < TOGETHER; t++) {
                float y = add(acc[t], __shfl_xor_sync(ALL, acc[t], 2));
                y = add(y, __shfl_xor_sync(ALL, y, 1));
                acc[t] = 0.0f;
                if (t < n && chain == t) {
                    if (GATED) both[turn][t][is_up][in_set] = y;
                    else if (row < p.rows) p.out.row(outputs[t])[row] = y;
                }
            }
            if (GATED) {
                __syncthreads();
                if (warp < n) encode_lanes(mul(silu(both[turn][warp][0][lane]), both[turn][warp][1][lane]), (u64)outputs[warp] * p.rows + (row - in_set), p.hidden);
                turn ^= 1;
            }
            row += of_set;
        }
    }
}

#define FEW(bits)                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 3) few_##bits(const __grid_constant__ ExpertsFew p) { experts_few<bits, false>(p); }         \
    extern "C" __global__ void __launch_bounds__(256, 3) few_gated_##bits(const __grid_constant__ ExpertsFew p) { experts_few<bits, true>(p); }

FEW(2)
FEW(3)
FEW(4)
FEW(5)
FEW(6)
FEW(8)
