// Products of integer groups for one token and for a few, as a whole layer's part: what goes in is normed and encoded by each block for itself, several
// matrices that share it are one launch, and of gate and up what comes out is silu(gate) * up. Grid: as many blocks as the device holds, whose warps deal rows.
//
// A lane takes 32 columns of a row at a time; of / 32 lanes have a group, four groups are a step, and a group's lanes carry its chain: nothing meets in shared
// memory but the activations. D steps are under way, the first of them before the kernel before this one has ended.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"

struct GemvBatched {
    Matmul parts[3];
    // [tokens, cols]: what goes in, to be encoded here; null: it is encoded in the first part's x.
    Tensor x;
    Norm norm;
    // Rows of x.
    u32 tokens;
    u32 count;
    // Parts are gate and up; the first's output takes what becomes of both.
    u32 gated;
    // Groups of activations in a group of all these matrices, and the type of their scales.
    u32 of;
    u32 type;
    u32 unused;
};

static const u32 ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / WARP;

// Where a lane's row of a task lies.
struct Task {
    u32 part;
    u32 output;
    // Row of the product; beyond its rows: computed as the last, and not stored.
    u32 row;
    const u8* data;
    const u8* scales;
    const u8* biases;
};

// A warp takes 2^log rows together: a division takes as long as much of a task.
__device__ __forceinline__ u32 tasks_of(const Matmul& m, u32 log) {
    u32 blocks = (m.rows + (1u << log) - 1) >> log;
    return m.table ? blocks * m.outputs : blocks;
}

__device__ __forceinline__ Task find(const GemvBatched& p, u32 number, u32 log, u32 row_in_warp) {
    Task task;
    u32 index = number;
    task.part = 0;
    if (p.gated) {
        task.part = number % 2;
        index = number / 2;
    } else {
        for (; task.part + 1 < p.count; task.part++) {
            u32 own = tasks_of(p.parts[task.part], log);
            if (index < own) break;
            index -= own;
        }
    }
    const Matmul& m = p.parts[task.part];
    task.output = 0;
    if (m.table) {
        u32 blocks = (m.rows + (1u << log) - 1) >> log;
        task.output = index / blocks;
        index -= task.output * blocks;
    }
    task.row = (index << log) + row_in_warp;
    const Matrix& matrix = m.table ? m.table[m.experts[task.output]] : m.matrix;
    u64 row = m.in_matrix(min(task.row, m.rows - 1));
    u32 size = p.type == F32 ? 4 : 2;
    task.data = matrix.data + row * matrix.row_bytes;
    task.scales = matrix.scales + row * matrix.groups * size;
    task.biases = matrix.biases + row * matrix.groups * size;
    return task;
}

// A scale as it lies.
__device__ __forceinline__ u32 raw(const u8* p, u32 type, u32 i, bool there) {
    if (!there) return 0;
    return type == F32 ? __ldcs((const u32*)p + i) : __ldcs((const u16*)p + i);
}

// Activations in shared memory: of each 32 columns the first and the last sixteen bytes, in arrays of their own so that neighbours meet no bank twice.
struct Staged {
    uint4* low;
    uint4* high;
    float* sx;
    float* mx;
};

// Encodes or copies all rows of x, by the whole block. `loose`: [cols] floats, where there is a norm.
__device__ __forceinline__ void stage(const GemvBatched& p, u32 cols, const Staged& to, float* loose) {
    __shared__ float inverse;
    u32 parts = cols / 32;
    if (!p.x.at) {
        const Encoded& x = p.parts[0].x;
        for (u32 i = threadIdx.x; i < p.tokens * parts * 2; i += ROW_THREADS) {
            uint4 v = ((const uint4*)x.q)[i];
            (i % 2 ? to.high : to.low)[i / 2] = v;
        }
        for (u32 i = threadIdx.x; i < p.tokens * parts; i += ROW_THREADS) {
            to.sx[i] = x.sx[i];
            to.mx[i] = x.mx[i];
        }
        __syncthreads();
        return;
    }
    for (u32 t = 0; t < p.tokens; t++) {
        const float* x = p.x.row(t);
        if (p.norm.weight) {
            for (u32 i = threadIdx.x; i < cols / 4; i += ROW_THREADS) ((float4*)loose)[i] = ((const float4*)x)[i];
            __syncthreads();
            if (threadIdx.x < WARP) {
                float inv = inverse_rms(loose, cols, p.norm.eps);
                if (threadIdx.x == 0) inverse = inv;
            }
            __syncthreads();
        }
        // Eight lanes have 32 columns.
        for (u32 from = 0; from < cols / 4; from += ROW_THREADS) {
            u32 i = from + threadIdx.x;
            bool inside = i < cols / 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (inside) v = p.norm.weight ? ((const float4*)loose)[i] : ((const float4*)x)[i];
            if (p.norm.weight && inside) {
                float4 w = ((const float4*)p.norm.weight)[i];
                v.x = mul(mul(v.x, inverse), w.x);
                v.y = mul(mul(v.y, inverse), w.y);
                v.z = mul(mul(v.z, inverse), w.z);
                v.w = mul(mul(v.w, inverse), w.w);
            }
            // Sizes compare as integers, and a NaN is the greatest.
            const u32 SIZE = 0x7fffffffu;
            u32 most = max(max(bits(v.x) & SIZE, bits(v.y) & SIZE), max(bits(v.z) & SIZE, bits(v.w) & SIZE));
#pragma unroll
            for (u32 step = 4; step > 0; step /= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
            float a = bits(most), inv = div(127.0f, a);
            if (!is_finite(inv)) inv = 0.0f;
            int q0 = to_i8(mul(v.x, inv)), q1 = to_i8(mul(v.y, inv)), q2 = to_i8(mul(v.z, inv)), q3 = to_i8(mul(v.w, inv));
            int sum = q0 + q1 + q2 + q3;
#pragma unroll
            for (u32 step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            if (!inside) continue;
            u32 part = t * parts + i / 8;
            // In each eight columns even ones come before odd ones; this is the first or the second half of an eight.
            u8* eight = (u8*)((i % 8 < 4 ? to.low : to.high) + part) + (i % 4 / 2) * 8 + i % 2 * 2;
            *(u16*)eight = (u16)((q0 & 0xff) | (q2 & 0xff) << 8);
            *(u16*)(eight + 4) = (u16)((q1 & 0xff) | (q3 & 0xff) << 8);
            if (i % 8 == 0) {
                float scale = div(a, 127.0f);
                to.sx[part] = scale;
                to.mx[part] = mul(scale, (float)sum);
            }
        }
        __syncthreads();
    }
}

template <class F, int T, int D> __device__ __forceinline__ void gemv_batched_int8(const GemvBatched& p) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 cols = p.parts[0].cols, parts = cols / 32, of = p.of, type = p.type;
    // 1, 2 and 4 are 2^0, 2^1 and 2^2.
    const u32 shift = of / 2, width = 4 << shift, in_row = lane & (width - 1), row_in_warp = lane >> (2 + shift), log = 3 - shift;
    const u32 chunks = (((parts + width - 1) >> (2 + shift)) + D - 1) / D;
    u32 tasks = 0;
    for (u32 i = 0; i < p.count; i++) tasks += tasks_of(p.parts[i], log);
    // Neighbouring rows go to different multiprocessors. Of gate and up a warp takes both.
    const u32 together = p.gated ? 2 : 1, stride = gridDim.x * ROW_WARPS * together;
    u32 number = (warp * gridDim.x + blockIdx.x) * together;

    Staged x;
    const u32 all = (p.tokens * parts + 3) / 4 * 4;
    x.low = (uint4*)smem;
    x.high = x.low + p.tokens * parts;
    x.sx = (float*)(x.high + p.tokens * parts);
    x.mx = x.sx + all;
    float* loose = x.mx + all;

    typename F::Part packed[D];
    u32 scales[D], biases[D];
    auto load = [&](const Task& task, u32 chunk, int d) {
        u32 part = (chunk * D + d) * width + in_row;
        bool there = part < parts;
        packed[d].load(task.data + (u64)part * (4 * F::BITS), there);
        scales[d] = raw(task.scales, type, part >> shift, there);
        biases[d] = raw(task.biases, type, part >> shift, there);
    };
    bool works = number < tasks, early = !p.parts[0].table;
    Task task;
    if (early) {
        if (works) {
            task = find(p, number, log, row_in_warp);
#pragma unroll
            for (int d = 0; d < D; d++) load(task, 0, d);
        }
        if (p.norm.weight) {
            for (u32 i = threadIdx.x * 32; i < cols; i += ROW_THREADS * 32) prefetch(p.norm.weight + i);
        }
    }
    begin();
    if (!early && works) {
        task = find(p, number, log, row_in_warp);
#pragma unroll
        for (int d = 0; d < D; d++) load(task, 0, d);
    }
    stage(p, cols, x, loose);
    if (!works) return;

    u32 chunk = 0;
    float acc[T], gates[T], before = 0.0f;
#pragma unroll
    for (int t = 0; t < T; t++) acc[t] = gates[t] = 0.0f;
    while (true) {
        const Matmul& m = p.parts[task.part];
        bool last = chunk + 1 == chunks;
        u32 next_number = last ? (p.gated && number % 2 == 0 ? number + 1 : number - (p.gated ? 1 : 0) + stride) : number;
        u32 next_chunk = last ? 0 : chunk + 1;
        Task next = task;
        bool more = next_number < tasks;
        if (last && more) next = find(p, next_number, log, row_in_warp);
        if (T == 1 && last && m.accumulate && in_row == 0 && task.row < m.rows) {
            before = m.out.row(task.output)[m.in_output(task.row)];
        }
        u32 row_of_x = m.table ? task.output / m.per_row * parts : 0;
#pragma unroll
        for (int d = 0; d < D; d++) {
            u32 part = (chunk * D + d) * width + in_row;
            bool there = part < parts;
            u32 w[8];
            F::unpack(packed[d].words, w);
            float s = value(scales[d], type), b = value(biases[d], type);
            if (more) load(next, next_chunk, d);
            u32 own = there ? part : 0;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 at = own + (T == 1 ? row_of_x : t * parts);
                if (T > 1 && t >= p.tokens) break;
                uint4 low = x.low[at], high = x.high[at];
                int even = dp4a(w[0], low.x, 0), odd = dp4a(w[1], low.y, 0);
                even = dp4a(w[2], low.z, even);
                odd = dp4a(w[3], low.w, odd);
                even = dp4a(w[4], high.x, even);
                odd = dp4a(w[5], high.y, odd);
                even = dp4a(w[6], high.z, even);
                odd = dp4a(w[7], high.w, odd);
                float sum = (float)(even + odd), joined, mean;
                if (of == 2) {
                    float other = __shfl_xor_sync(ALL, sum, 1);
                    float2 sx = *(const float2*)(x.sx + (at & ~1u)), mx = *(const float2*)(x.mx + (at & ~1u));
                    joined = fma(sx.y, lane % 2 ? sum : other, mul(sx.x, lane % 2 ? other : sum));
                    mean = add(mx.x, mx.y);
                } else if (of == 1) {
                    joined = mul(x.sx[at], sum);
                    mean = x.mx[at];
                } else {
                    float4 sx = *(const float4*)(x.sx + (at & ~3u)), mx = *(const float4*)(x.mx + (at & ~3u));
                    u32 first = lane & ~3u;
                    joined = mul(sx.x, __shfl_sync(ALL, sum, first));
                    joined = fma(sx.y, __shfl_sync(ALL, sum, first + 1), joined);
                    joined = fma(sx.z, __shfl_sync(ALL, sum, first + 2), joined);
                    joined = fma(sx.w, __shfl_sync(ALL, sum, first + 3), joined);
                    mean = add(add(add(mx.x, mx.y), mx.z), mx.w);
                }
                if (there) acc[t] = fma(b, mean, fma(s, joined, acc[t]));
            }
        }
        if (last) {
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (T > 1 && t >= p.tokens) break;
                float y = add(acc[t], __shfl_xor_sync(ALL, acc[t], 2 * of));
                y = add(y, __shfl_xor_sync(ALL, y, of));
                acc[t] = 0.0f;
                if (in_row != (t & (width - 1)) || task.row >= m.rows) {
                } else if (!p.gated) {
                    if (T > 1 || !m.accumulate) {
                        put(p.parts[task.part], task.output + t, task.row, y);
                    } else {
                        if (m.bias) y = add(y, m.bias[task.row]);
                        m.out.row(task.output)[m.in_output(task.row)] = add(before, y);
                    }
                } else if (task.part == 0) {
                    gates[t] = y;
                } else {
                    const Tensor& out = p.parts[0].out;
                    out.row(task.output + t)[task.row] = mul(silu(gates[t]), y);
                }
            }
        }
        if (!more) break;
        task = next;
        number = next_number;
        chunk = next_chunk;
    }
}

#define GEMV_BATCHED(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 3) gemv_batched_##name##_1(const __grid_constant__ GemvBatched p) { gemv_batched_int8<F, 1, 4>(p); } \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_batched_##name##_2(const __grid_constant__ GemvBatched p) { gemv_batched_int8<F, 2, 4>(p); } \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_batched_##name##_4(const __grid_constant__ GemvBatched p) { gemv_batched_int8<F, 4, 2>(p); } \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_batched_##name##_8(const __grid_constant__ GemvBatched p) { gemv_batched_int8<F, 8, 2>(p); }

INT8_FORMATS(GEMV_BATCHED)

__device__ __forceinline__ void stage_pairs(const GemvBatched& p, u32 cols, u16* to, float* loose) {
    __shared__ float inverse;
    if (!p.x.at) {
        const u32* from = (const u32*)p.parts[0].x.h;
        for (u32 i = threadIdx.x; i < p.tokens * cols / 2; i += ROW_THREADS) ((u32*)to)[i] = from[i];
        __syncthreads();
        return;
    }
    for (u32 t = 0; t < p.tokens; t++) {
        const float* x = p.x.row(t);
        if (p.norm.weight) {
            for (u32 i = threadIdx.x; i < cols / 4; i += ROW_THREADS) ((float4*)loose)[i] = ((const float4*)x)[i];
            __syncthreads();
            if (threadIdx.x < WARP) {
                float inv = inverse_rms(loose, cols, p.norm.eps);
                if (threadIdx.x == 0) inverse = inv;
            }
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < cols; i += ROW_THREADS) {
            float v = p.norm.weight ? mul(mul(loose[i], inverse), p.norm.weight[i]) : x[i];
            to[t * cols + i] = to_bf16(v);
        }
        __syncthreads();
    }
}

template <int T, int D> __device__ __forceinline__ void gemv_batched_bf16(const GemvBatched& p) {
    u32 lane = threadIdx.x % 16, warp = threadIdx.x / WARP, row_in_warp = threadIdx.x % WARP / 16;
    const u32 cols = p.parts[0].cols, steps = cols / 32, log = 1, chunks = (steps + D - 1) / D;
    u32 tasks = 0;
    for (u32 i = 0; i < p.count; i++) tasks += tasks_of(p.parts[i], log);
    const u32 together = p.gated ? 2 : 1, stride = gridDim.x * ROW_WARPS * together;
    u32 number = (warp * gridDim.x + blockIdx.x) * together;
    u32* x = (u32*)smem;
    float* loose = (float*)(x + (p.tokens * cols / 2 + 3) / 4 * 4);

    u32 words[D];
    auto load = [&](const Task& task, u32 chunk, int d) {
        u32 step = chunk * D + d;
        words[d] = step < steps ? __ldcs((const u32*)task.data + step * 16 + lane) : 0;
    };
    bool works = number < tasks, early = !p.parts[0].table;
    Task task;
    if (early) {
        if (works) {
            task = find(p, number, log, row_in_warp);
#pragma unroll
            for (int d = 0; d < D; d++) load(task, 0, d);
        }
        if (p.norm.weight) {
            for (u32 i = threadIdx.x * 32; i < cols; i += ROW_THREADS * 32) prefetch(p.norm.weight + i);
        }
    }
    begin();
    if (!early && works) {
        task = find(p, number, log, row_in_warp);
#pragma unroll
        for (int d = 0; d < D; d++) load(task, 0, d);
    }
    stage_pairs(p, cols, (u16*)x, loose);
    if (!works) return;

    u32 chunk = 0;
    float acc[T], gates[T];
#pragma unroll
    for (int t = 0; t < T; t++) acc[t] = gates[t] = 0.0f;
    while (true) {
        const Matmul& m = p.parts[task.part];
        bool last = chunk + 1 == chunks;
        u32 next_number = last ? (p.gated && number % 2 == 0 ? number + 1 : number - (p.gated ? 1 : 0) + stride) : number;
        u32 next_chunk = last ? 0 : chunk + 1;
        Task next = task;
        bool more = next_number < tasks;
        if (last && more) next = find(p, next_number, log, row_in_warp);
        u32 row_of_x = m.table ? task.output / m.per_row : 0;
#pragma unroll
        for (int d = 0; d < D; d++) {
            u32 step = chunk * D + d, w = words[d];
            if (more) load(next, next_chunk, d);
            if (step >= steps) continue;
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (T > 1 && t >= p.tokens) break;
                u32 v = x[((T == 1 ? row_of_x : t) * steps + step) * 16 + lane];
                acc[t] = flushed_fma(bits(w & 0xffff0000u), bits(v & 0xffff0000u), acc[t]);
                acc[t] = flushed_fma(bits(w << 16), bits(v << 16), acc[t]);
            }
        }
        if (last) {
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (T > 1 && t >= p.tokens) break;
                float y = lane_tree(acc[t]);
                acc[t] = 0.0f;
                if (lane != t || task.row >= m.rows) {
                } else if (!p.gated) {
                    put(p.parts[task.part], task.output + t, task.row, y);
                } else if (task.part == 0) {
                    gates[t] = y;
                } else {
                    p.parts[0].out.row(task.output + t)[task.row] = mul(silu(gates[t]), y);
                }
            }
        }
        if (!more) break;
        task = next;
        number = next_number;
        chunk = next_chunk;
    }
}

#define GEMV_BATCHED_BF16(T, D) \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_batched_bf16_bf16_##T(const __grid_constant__ GemvBatched p) { gemv_batched_bf16<T, D>(p); }

GEMV_BATCHED_BF16(1, 32)
GEMV_BATCHED_BF16(2, 32)
GEMV_BATCHED_BF16(4, 16)
GEMV_BATCHED_BF16(8, 16)
