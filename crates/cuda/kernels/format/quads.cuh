// Rows of a matrix as floats in shared memory, for kernels that route one token or a few.
#pragma once
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"

// Threads that load a row, or the norm's weights.
static const u32 OF_ROW = 128;

// Floats in shared memory are ordered for lane sums: a quad has four elements of one lane, columns i, i + 16, i + 32 and i + 48, and the sixteen lanes' quads follow
// one another. This is column i of a quad.
__device__ __forceinline__ u32 column_of(u32 quad) { return quad / 16 * 64 + quad % 16; }

// A quad as it was loaded, with scale and bias if it is affine.
struct Quad {
    u32 raw[4];
    u32 s;
    u32 b;
};

// Converts a row to quads, by OF_ROW threads, each of which issues several loads before it uses the first.
template <class Ask, class Value> __device__ __forceinline__ void widen(u32 cols, float* to, Ask ask, Value value) {
    const int DEEP = 4;
    const u32 quads = cols / 4;
#pragma unroll 1
    for (u32 from = threadIdx.x % OF_ROW; from < quads; from += DEEP * OF_ROW) {
        Quad own[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) own[d] = ask(column_of(min(from + d * OF_ROW, quads - 1)));
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            // Several threads may load the last quad.
            const u32 quad = min(from + d * OF_ROW, quads - 1), i = column_of(quad);
            ((float4*)to)[quad] = make_float4(value(own[d], i, 0), value(own[d], i, 1), value(own[d], i, 2), value(own[d], i, 3));
        }
    }
}

// Converts a row of any format to quads, by OF_ROW threads. Each format has its own path, so that no branch lies between loads.
__device__ __forceinline__ void widen_row(const Matrix& m, u64 row, u32 cols, float* to) {
    const u8* data = m.data + row * m.row_bytes;
    if (m.kind == KIND_affine_f32 && 32 % m.bits == 0 && m.group >= 64 && m.type != F32) {
        const u32 log = 31 - __clz(m.bits), shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1, type = m.type;
        const u16 *scales = (const u16*)m.scales + row * m.groups, *biases = (const u16*)m.biases + row * m.groups;
        widen(
            cols, to,
            [&](u32 i) {
                Quad own;
#pragma unroll
                for (u32 r = 0; r < 4; r++) own.raw[r] = ((const u32*)data)[(i + 16 * r << log) / 32];
                own.s = scales[i >> shift];
                own.b = biases[i >> shift];
                return own;
            },
            [&](const Quad& own, u32 i, u32 r) { return fma((float)(own.raw[r] >> ((i + 16 * r << log) & 31) & mask), half_value(own.s, type), half_value(own.b, type)); });
    } else if (m.kind == KIND_affine_f32) {
#pragma unroll 1
        for (u32 quad = threadIdx.x % OF_ROW; quad < cols / 4; quad += OF_ROW) {
            const u32 i = column_of(quad);
            ((float4*)to)[quad] = make_float4(affine_weight(m, row, i), affine_weight(m, row, i + 16), affine_weight(m, row, i + 32), affine_weight(m, row, i + 48));
        }
    } else if (m.type == F32) {
        widen(
            cols, to,
            [&](u32 i) {
                const u32* at = (const u32*)data + i;
                return Quad{{at[0], at[16], at[32], at[48]}, 0, 0};
            },
            [](const Quad& own, u32, u32 r) { return bits(own.raw[r]); });
    } else {
        const u32 type = m.type;
        widen(
            cols, to,
            [&](u32 i) {
                const u16* at = (const u16*)data + i;
                return Quad{{at[0], at[16], at[32], at[48]}, 0, 0};
            },
            [&](const Quad& own, u32, u32 r) { return half_value(own.raw[r], type); });
    }
}

// `1 / sqrt(mean of squares + eps)` of `n` elements in quads, a multiple of 256, by a whole warp: a thread has four of a wide sum's lanes.
__device__ __forceinline__ float inverse_rms_quads(const float4* x, u32 n, float eps) {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    x += threadIdx.x % 16;
#pragma unroll 2
    for (u32 from = 0; from < n / 4; from += 64) {
        float4 own[4];
#pragma unroll
        for (int i = 0; i < 4; i++) own[i] = x[from + 16 * i];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums.x = fma(own[i].x, own[i].x, sums.x);
            sums.y = fma(own[i].y, own[i].y, sums.y);
            sums.z = fma(own[i].z, own[i].z, sums.z);
            sums.w = fma(own[i].w, own[i].w, sums.w);
        }
    }
    float sum = lane_tree(add(add(sums.x, sums.z), add(sums.y, sums.w))), mean;
    // Dividing by a power of two is exactly a multiplication.
    if (n & (n - 1)) mean = div(sum, (float)n);
    else mean = mul(sum, bits((u32)(127 - 31 + __clz(n)) << 23));
    return div(1.0f, __fsqrt_rn(add(mean, eps)));
}
