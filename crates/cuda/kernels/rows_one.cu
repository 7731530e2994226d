// Products of integer groups with large matrices for one token, or for one token of each expert, as a whole layer's part (rows.cu says what that is; small matrices are
// quicker there). A warp takes up to U rows of
// a matrix together and goes along them by 1,024 columns, 32 in a lane: so reads are whole lines, U of which are under way in each lane, and the activations of
// a chunk stay in registers for all of these rows. What groups sum to meets in shared memory, where four lanes of each row run through its chains.
//
// A unit is a chunk of a row. Of U units a warp has 2^log rows and so many chunks of each that there are U; four lanes belong to each unit, and a row's chains
// wander from the lanes of a chunk to those of the next.
#pragma once
#include "rows.cu"

// Rows that a warp takes: of one part, or where parts are gate and up, half of each.
struct Dealt {
    u32 part;
    u32 output;
    u32 first;
};

// Rows of a part that a warp takes together.
__device__ __forceinline__ u32 rows_of_part(const Rows& p, u32 log) { return log - p.gated; }

__device__ __forceinline__ u32 all_tasks(const Rows& p, u32 log) {
    if (p.gated) return tasks_of(p.parts[0], log - 1);
    u32 tasks = 0;
    for (u32 i = 0; i < p.count; i++) tasks += tasks_of(p.parts[i], log);
    return tasks;
}

// The number of rows, as a power of two, with which the warp that has most has fewest.
__device__ __forceinline__ u32 rows_together(const Rows& p, u32 warps, u32 most) {
    u32 best = p.gated, least = 0xffffffffu;
    for (u32 log = p.gated; log <= most; log++) {
        u32 tasks = all_tasks(p, log), rows = ((tasks + warps - 1) / warps) << log;
        if (rows <= least) {
            least = rows;
            best = log;
        }
    }
    return best;
}

__device__ __forceinline__ Dealt deal(const Rows& p, u32 number, u32 log) {
    Dealt task = {0, 0, number};
    u32 own = rows_of_part(p, log);
    if (!p.gated) {
        for (; task.part + 1 < p.count; task.part++) {
            u32 tasks = tasks_of(p.parts[task.part], own);
            if (task.first < tasks) break;
            task.first -= tasks;
        }
    }
    const Matmul& m = p.parts[task.part];
    if (m.table) {
        u32 blocks = (m.rows + (1u << own) - 1) >> own;
        task.output = task.first / blocks;
        task.first -= task.output * blocks;
    }
    task.first <<= own;
    return task;
}

// Four columns of x, of which eight neighbouring lanes have 32, go to where products take them.
__device__ __forceinline__ void encode_four(float4 v, bool inside, u32 part, u32 eighth, u32 of, const Staged& to) {
    // Sizes compare as integers, and a NaN is the greatest.
    const u32 SIZE = 0x7fffffffu;
    u32 most = max(max(bits(v.x) & SIZE, bits(v.y) & SIZE), max(bits(v.z) & SIZE, bits(v.w) & SIZE));
#pragma unroll
    for (u32 step = 4; step > 0; step /= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
    float a = bits(most), inv = div(127.0f, a), scale = div(a, 127.0f);
    if (!is_finite(inv)) inv = 0.0f;
    int q0 = to_i8(mul(v.x, inv)), q1 = to_i8(mul(v.y, inv)), q2 = to_i8(mul(v.z, inv)), q3 = to_i8(mul(v.w, inv));
    int sum = q0 + q1 + q2 + q3;
#pragma unroll
    for (u32 step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    float mean = mul(scale, (float)sum);
    // A weight group's: of four groups of activations the sums are joined in their order.
    if (of == 2) mean = add(mean, __shfl_xor_sync(ALL, mean, 8));
    if (of == 4) {
        float first = __shfl_sync(ALL, mean, 0), second = __shfl_sync(ALL, mean, 8);
        float third = __shfl_sync(ALL, mean, 16), fourth = __shfl_sync(ALL, mean, 24);
        mean = add(add(add(first, second), third), fourth);
    }
    if (!inside) return;
    // In each eight columns even ones come before odd ones; this is the first or the second half of an eight.
    u8* eight = (u8*)((eighth < 4 ? to.low : to.high) + part) + (eighth % 4 / 2) * 8 + eighth % 2 * 2;
    *(u16*)eight = (u16)((q0 & 0xff) | (q2 & 0xff) << 8);
    *(u16*)(eight + 4) = (u16)((q1 & 0xff) | (q3 & 0xff) << 8);
    if (eighth == 0) {
        to.sx[part] = scale;
        if (part % of == 0) to.mx[part / of] = mean;
    }
}

// Encodes or copies all rows of x, by the whole block; `mx` has the joined sums of each weight group. `loose`: [cols] floats, where there is a norm.
// `weights`: the norm's, of this thread's columns, as far as they are under way.
static const u32 AHEAD = 4;

template <u32 OF> __device__ __forceinline__ void stage_joined(const Rows& p, u32 cols, const Staged& to, float* loose, const float4 (&weights)[AHEAD]) {
    __shared__ float inverse;
    const u32 parts = cols / 32, of = OF, quarters = cols / 4, all = p.tokens * quarters;
    if (!p.x.at) {
        const Encoded& x = p.parts[0].x;
        for (u32 i = threadIdx.x; i < p.tokens * parts * 2; i += ROW_THREADS) {
            uint4 v = ((const uint4*)x.q)[i];
            (i % 2 ? to.high : to.low)[i / 2] = v;
        }
        for (u32 i = threadIdx.x; i < p.tokens * parts; i += ROW_THREADS) to.sx[i] = x.sx[i];
        for (u32 i = threadIdx.x; i < p.tokens * parts / of; i += ROW_THREADS) {
            float mean = x.mx[i * of];
            for (u32 j = 1; j < of; j++) mean = add(mean, x.mx[i * of + j]);
            to.mx[i] = mean;
        }
        __syncthreads();
        return;
    }
    if (!p.norm.weight) {
        // All rows together, several fours under way.
        for (u32 from = 0; from < all; from += AHEAD * ROW_THREADS) {
            float4 v[AHEAD];
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u32 i = from + k * ROW_THREADS + threadIdx.x, t = p.tokens == 1 ? 0 : i / quarters;
                v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i < all) v[k] = ((const float4*)p.x.row(t))[i - t * quarters];
            }
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u32 i = from + k * ROW_THREADS + threadIdx.x;
                if (from + k * ROW_THREADS < all) encode_four(v[k], i < all, i / 8, i % 8, of, to);
            }
        }
        __syncthreads();
        return;
    }
    for (u32 t = 0; t < p.tokens; t++) {
        const float4* x = (const float4*)p.x.row(t);
        float4 v[AHEAD];
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u32 i = k * ROW_THREADS + threadIdx.x;
            v[k] = i < quarters ? x[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u32 i = k * ROW_THREADS + threadIdx.x;
            if (i < quarters) ((float4*)loose)[i] = v[k];
        }
        for (u32 i = AHEAD * ROW_THREADS + threadIdx.x; i < quarters; i += ROW_THREADS) ((float4*)loose)[i] = x[i];
        __syncthreads();
        if (threadIdx.x < WARP) {
            float low = 0.0f, high = 0.0f;
            u32 lane = threadIdx.x, whole = cols / 64 * 64;
#pragma unroll 8
            for (u32 i = lane; i < whole; i += 64) {
                float a = loose[i], b = loose[i + 32];
                low = fma(a, a, low);
                high = fma(b, b, high);
            }
            if (whole < cols) low = fma(loose[whole + lane], loose[whole + lane], low);
            float sum = wide_tree(low, high);
            if (threadIdx.x == 0) inverse = div(1.0f, __fsqrt_rn(add(div(sum, (float)cols), p.norm.eps)));
        }
        __syncthreads();
        float inv = inverse;
        auto encode = [&](float4 v, float4 w, u32 i) {
            v.x = mul(mul(v.x, inv), w.x);
            v.y = mul(mul(v.y, inv), w.y);
            v.z = mul(mul(v.z, inv), w.z);
            v.w = mul(mul(v.w, inv), w.w);
            encode_four(v, i < quarters, t * parts + i / 8, i % 8, of, to);
        };
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            if (k * ROW_THREADS < quarters) encode(v[k], weights[k], k * ROW_THREADS + threadIdx.x);
        }
        for (u32 from = AHEAD * ROW_THREADS; from < quarters; from += ROW_THREADS) {
            u32 i = min(from + threadIdx.x, quarters - 1);
            encode(((const float4*)loose)[i], ((const float4*)p.norm.weight)[i], from + threadIdx.x);
        }
        __syncthreads();
    }
}

// The integer sum of 32 columns, exact, as a float.
template <int BITS> __device__ __forceinline__ float part_sum(const u32 (&words)[BITS], uint4 low, uint4 high) {
    // Added to these bits, a sum of less than 2^22 is the float 2^23 + 2^22 and that sum.
    const u32 MAGIC_BITS = 0x4b400000u;
    int sum;
    if (BITS == 4) {
        const u32 EVEN = 0x0f0f0f0fu, ODD = 0xf0f0f0f0u;
        // Odd columns are sixteen times too large, exactly.
        int even = dot4(words[0] & EVEN, low.x, (int)MAGIC_BITS), odd = dot4(words[0] & ODD, low.y, 0);
        even = dot4(words[1 % BITS] & EVEN, low.z, even);
        odd = dot4(words[1 % BITS] & ODD, low.w, odd);
        even = dot4(words[2 % BITS] & EVEN, high.x, even);
        odd = dot4(words[2 % BITS] & ODD, high.y, odd);
        even = dot4(words[3 % BITS] & EVEN, high.z, even);
        odd = dot4(words[3 % BITS] & ODD, high.w, odd);
        sum = even + (odd >> 4);
    } else {
        u32 w[8];
        spread<BITS>(words, w);
        int even = dot4(w[0], low.x, (int)MAGIC_BITS), odd = dot4(w[1], low.y, 0);
        even = dot4(w[2], low.z, even);
        odd = dot4(w[3], low.w, odd);
        even = dot4(w[4], high.x, even);
        odd = dot4(w[5], high.y, odd);
        even = dot4(w[6], high.z, even);
        odd = dot4(w[7], high.w, odd);
        sum = even + odd;
    }
    return sub(bits((u32)sum), 12582912.0f);
}

// Floats from unit to unit of what groups sum to: 32 groups, and four so that units meet no bank twice.
static const u32 LEFT = 36;

template <int BITS, int U, u32 OF, u32 TYPE> __device__ __forceinline__ void multiply_rows_one(const Rows& p) {
    __shared__ float left[ROW_WARPS][U][LEFT];
    const u32 LOG_U = U == 8 ? 3 : 2, LANES = 4 * U;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 cols = p.parts[0].cols, parts = cols / 32, groups = parts / OF;
    const u32 of = OF, type = TYPE, shift = OF / 2, GROUPS = 8 >> shift;
    const u32 chunks = (parts + 31) / 32, stride = gridDim.x * ROW_WARPS;
    u32 number = warp * gridDim.x + blockIdx.x;
    const u32 log = rows_together(p, stride, LOG_U), together = 1u << log, deep = LOG_U - log;
    const u32 tasks = all_tasks(p, log), rounds = (chunks + (1u << deep) - 1) >> deep;
    // This lane's unit: which of the rows, which of the chunks.
    const u32 unit = lane / 4 % U, row_of_unit = unit & (together - 1), chunk_of_unit = unit >> log, chain = lane % 4;

    Staged x;
    x.low = (uint4*)room;
    x.high = x.low + p.tokens * parts;
    x.sx = (float*)(x.high + p.tokens * parts);
    x.mx = x.sx + (p.tokens * parts + 3) / 4 * 4;
    float* loose = x.mx + (p.tokens * parts + 3) / 4 * 4;

    // Where this lane's row lies; beyond the rows of the product it is the last.
    const u8 *data, *scales, *biases;
    u32 row, part;
    Dealt task;
    auto aim = [&](u32 number) {
        task = deal(p, number, log);
        u32 own = rows_of_part(p, log);
        part = p.gated ? row_of_unit >> own : task.part;
        row = task.first + (row_of_unit & ((1u << own) - 1));
        const Matmul& m = p.parts[part];
        const Matrix& matrix = m.table ? m.table[m.experts[task.output]] : m.matrix;
        u64 in_matrix = m.in_matrix(min(row, m.rows - 1)), size = type == F32 ? 4 : 2;
        data = matrix.data + in_matrix * matrix.row_bytes;
        scales = matrix.scales + in_matrix * matrix.groups * size;
        biases = matrix.biases + in_matrix * matrix.groups * size;
    };
    Packed<BITS> packed[U];
    u32 s[8 >> (OF / 2)], b[8 >> (OF / 2)];
    auto bring = [&](u32 round, int u) {
        u32 at = ((round << deep) + (u >> log)) * 32 + lane;
        const u8* from = (const u8*)__shfl_sync(ALL, (u64)data, 4 * u);
        packed[u].load(from + (u64)at * (4 * BITS), at < parts);
    };
    auto bring_scales = [&](u32 round) {
        u32 first = ((((round << deep) + chunk_of_unit) * 32) >> shift) + chain;
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++) {
            u32 g = first + 4 * j;
            s[j] = raw(scales, type, g, g < groups);
            b[j] = raw(biases, type, g, g < groups);
        }
    };
    auto bring_all = [&]() {
        aim(number);
#pragma unroll
        for (int u = 0; u < U; u++) bring(0, u);
        bring_scales(0);
    };
    bool works = number < tasks, early = !p.parts[0].table;
    float4 weights[AHEAD];
    if (early) {
        if (works) bring_all();
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u32 i = k * ROW_THREADS + threadIdx.x;
            weights[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (p.norm.weight && i < cols / 4) weights[k] = ((const float4*)p.norm.weight)[i];
        }
    }
    begin();
    if (!early) {
        if (works) bring_all();
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u32 i = k * ROW_THREADS + threadIdx.x;
            weights[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (p.norm.weight && i < cols / 4) weights[k] = ((const float4*)p.norm.weight)[i];
        }
    }
    stage_joined<OF>(p, cols, x, loose, weights);
    if (!works) return;

    u32 round = 0;
    float acc = 0.0f, before = 0.0f;
    while (true) {
        bool last = round + 1 == rounds;
        u32 next_number = last ? number + stride : number, next_round = last ? 0 : round + 1;
        bool more = next_number < tasks;
        const Dealt now = task;
        const u32 row_now = row, part_now = part;
        const Matmul& m = p.parts[now.part];
        bool stores = chunk_of_unit + 1 == (1u << deep) && chain == 0 && lane < LANES && row_now < m.rows;
        float* to = m.out.row(now.output) + m.in_output(row_now);
        if (last && m.accumulate && stores) before = *to;
        if (last && more) aim(next_number);
        const u32 row_of_x = m.table ? now.output / m.per_row * parts : 0;
        // 1. Integer sums, joined within each weight group
        uint4 low, high;
        float sx = 0.0f, sx1 = 0.0f, sx2 = 0.0f, sx3 = 0.0f;
#pragma unroll
        for (int u = 0; u < U; u++) {
            u32 chunk = (round << deep) + (u >> log);
            if (chunk < chunks) {
                if ((u & (together - 1)) == 0) {
                    u32 at = row_of_x + min(chunk * 32 + lane, parts - 1);
                    low = x.low[at];
                    high = x.high[at];
                    sx = x.sx[at];
                    if (of > 1) sx1 = __shfl_down_sync(ALL, sx, 1);
                    if (of > 2) {
                        sx2 = __shfl_down_sync(ALL, sx, 2);
                        sx3 = __shfl_down_sync(ALL, sx, 3);
                    }
                }
                float sum = part_sum<BITS>(packed[u].words, low, high);
                float joined = mul(sx, sum);
                if (of > 1) joined = fma(sx1, __shfl_down_sync(ALL, sum, 1), joined);
                if (of > 2) {
                    joined = fma(sx2, __shfl_down_sync(ALL, sum, 2), joined);
                    joined = fma(sx3, __shfl_down_sync(ALL, sum, 3), joined);
                }
                if ((lane & (of - 1)) == 0) left[warp][u][lane >> shift] = joined;
            }
            if (more) bring(next_round, u);
        }
        __syncwarp();
        // 2. Chains
        const float* means = x.mx + (row_of_x >> shift);
        u32 first = ((((round << deep) + chunk_of_unit) * 32) >> shift) + chain;
        for (u32 d = 0; d < (1u << deep); d++) {
            float carried = __shfl_sync(ALL, acc, (lane % LANES + LANES - 4 * together) % LANES);
            if (chunk_of_unit != d) continue;
            acc = carried;
#pragma unroll
            for (u32 j = 0; j < GROUPS; j++) {
                if (first + 4 * j < groups) {
                    acc = fma(value(s[j], type), left[warp][unit][chain + 4 * j], acc);
                    acc = fma(value(b[j], type), means[first + 4 * j], acc);
                }
            }
        }
        __syncwarp();
        if (more) bring_scales(next_round);
        if (last) {
            float y = add(acc, __shfl_xor_sync(ALL, acc, 2));
            y = add(y, __shfl_xor_sync(ALL, y, 1));
            acc = 0.0f;
            if (p.gated) {
                float up = __shfl_xor_sync(ALL, y, 2 * together);
                if (stores && part_now == 0) p.parts[0].out.row(now.output)[row_now] = mul(silu(y), up);
            } else if (stores) {
                if (m.bias) y = add(y, m.bias[row_now]);
                *to = m.accumulate ? add(before, y) : y;
            }
        }
        if (!more) break;
        number = next_number;
        round = next_round;
    }
}

// Groups of 64 with scales of bf16, which are the usual ones. Units take registers: of wide q there are fewer.
#define ROWS_WIDE(bits, units) \
    extern "C" __global__ void __launch_bounds__(256, 2) rows_##bits##_wide(const __grid_constant__ Rows p) { multiply_rows_one<bits, units, 2, BF16>(p); }

ROWS_WIDE(2, 8)
ROWS_WIDE(3, 8)
ROWS_WIDE(4, 8)
ROWS_WIDE(5, 4)
ROWS_WIDE(6, 4)
ROWS_WIDE(8, 4)
