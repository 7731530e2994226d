// The router of a mixture for one token, which norms for itself and leaves what it normed encoded; what of it others use that route few tokens. Where loads shall be under way
// together, no branch may lie between them.
#pragma once
#include "rows_one.cu"

struct RouteOne {
    Row x;
    // [experts, cols]
    Matrix router;
    // [1, cols]: of the expert that all tokens take; no data where there is none.
    Matrix gate;
    // [rows]: the gate's comes last.
    float* logits;
    // What was normed, encoded as `Quarters` lie in shared memory.
    u8* encoded;
    // [cols]: the same as it is; null where nobody wants it.
    float* normed;
    // The host's answer, which is still to be given; null where it is not asked.
    u32* answer;
    u32 experts;
    // Experts, and the gate.
    u32 rows;
};

// Rows of a block, one for each half of its first warp.
static const u32 ROUTE_ROWS = 2;
// So many bring each of these, and the norm's weights.
static const u32 OF_ROW = 128, ROUTE_THREADS = (ROUTE_ROWS + 1) * OF_ROW;

// Where x lies that is encoded, from `at` on.
__device__ __forceinline__ Quarters quarters(void* at, u32 groups) {
    Quarters x;
    x.q = (uint4*)at;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    return x;
}

// Floats lie in shared memory as lanes of a lane sum take them: four of a lane's elements side by side, a quad, those of the sixteen lanes one behind the other. This is
// the first column of a quad; the others are sixteen, 32 and 48 further.
__device__ __forceinline__ u32 column_of(u32 quad) { return quad / 16 * 64 + quad % 16; }

// The elements of a quad as they were loaded, with the scale and the bias of affine ones.
struct Quad {
    u32 raw[4];
    u32 s;
    u32 b;
};

// A row's quads by OF_ROW threads, each of which asks for several before it computes the first.
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
            // The last may be brought several times.
            const u32 quad = min(from + d * OF_ROW, quads - 1), i = column_of(quad);
            ((float4*)to)[quad] = make_float4(value(own[d], i, 0), value(own[d], i, 1), value(own[d], i, 2), value(own[d], i, 3));
        }
    }
}

// A row of a matrix as floats in quads, by OF_ROW threads. No branch lies between loads: each kind of matrix is a path of its own.
__device__ __forceinline__ void widen_row(const Matrix& m, u64 row, u32 cols, float* to) {
    const u8* data = m.data + row * m.row_bytes;
    if (m.kind == LANES_AFFINE && 32 % m.bits == 0 && m.group >= 64 && m.type != F32) {
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
    } else if (m.kind == LANES_AFFINE) {
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
    // The quotient by a power of two is a product, exactly.
    if (n & (n - 1)) mean = div(sum, (float)n);
    else mean = mul(sum, bits((u32)(127 - 31 + __clz(n)) << 23));
    return div(1.0f, __fsqrt_rn(add(mean, eps)));
}

// The lane sum of a row and of x as it is normed, all of them in quads, by half a warp: each pointer is the lane's.
__device__ __forceinline__ float normed_product(const float4* of_row, const float4* of_x, const float4* of_weights, u32 cols, float inverse) {
    float sum = 0.0f;
    const int DEEP = 4;
#pragma unroll 2
    for (u32 from = 0; from < cols / 4; from += 16 * DEEP) {
        float4 a[DEEP], b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const float4 v = of_x[from + 16 * d], w = of_weights[from + 16 * d];
            a[d] = of_row[from + 16 * d];
            b[d] = make_float4(mul(mul(v.x, inverse), w.x), mul(mul(v.y, inverse), w.y), mul(mul(v.z, inverse), w.z), mul(mul(v.w, inverse), w.w));
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            sum = fma(a[d].x, b[d].x, sum);
            sum = fma(a[d].y, b[d].y, sum);
            sum = fma(a[d].z, b[d].z, sum);
            sum = fma(a[d].w, b[d].w, sum);
        }
    }
    return lane_tree(sum);
}

// Shared memory: x, the norm's weights and rows [ROUTE_ROWS], of [cols] in quads each. After its wait only the first two warps have something to do, and wait for
// nobody: each norms for itself.
extern "C" __global__ void __launch_bounds__(384) route_one(const __grid_constant__ RouteOne p) {
    WATCH();
    const u32 cols = p.x.cols, first = blockIdx.x * ROUTE_ROWS, warp = threadIdx.x / WARP, part = threadIdx.x / OF_ROW;
    float *x = room, *norm = x + cols, *rows = norm + cols;
    // A row that is not there is computed as the first, and not stored.
    const u32 r = part < ROUTE_ROWS && first + part < p.rows ? first + part : 0;
    const bool of_norm = part == ROUTE_ROWS, of_gate = r >= p.experts;
    // By value: parameters that are looked at through a pointer come from memory.
    Matrix m = of_gate ? p.gate : p.router;
    if (of_norm) m.data = (const u8*)p.x.norm, m.kind = LANES_F32, m.type = F32;
    widen_row(m, of_gate || of_norm ? 0 : r, cols, of_norm ? norm : rows + part * cols);
    STAMP(0, 0);
    begin();
    STAMP(0, 1);
    if (p.answer && blockIdx.x == 0 && threadIdx.x == 0) *p.answer = 0;
#pragma unroll 1
    for (u32 quad = threadIdx.x; quad < cols / 4; quad += 2 * ROUTE_THREADS) {
        // Both are asked for before the first is there.
        const u32 other = min(quad + ROUTE_THREADS, cols / 4 - 1);
        const float *near = p.x.x + column_of(quad), *far = p.x.x + column_of(other);
        const float4 a = make_float4(__ldcg(near), __ldcg(near + 16), __ldcg(near + 32), __ldcg(near + 48));
        const float4 b = make_float4(__ldcg(far), __ldcg(far + 16), __ldcg(far + 32), __ldcg(far + 48));
        ((float4*)x)[quad] = a;
        ((float4*)x)[other] = b;
    }
    __syncthreads();
    STAMP(0, 2);
    // Of the second warp each block's has some groups.
    if (warp > 1 || warp == 1 && blockIdx.x >= cols / 64) return;
    const float inverse = inverse_rms_quads((const float4*)x, cols, p.x.eps);
    STAMP(0, 3);
    const u32 lane = threadIdx.x % 16;
    if (warp == 1) {
        const Quarters to = quarters(p.encoded, cols / 64);
        const u32 thread = threadIdx.x % WARP;
        for (u32 g = blockIdx.x; g < cols / 64; g += gridDim.x) {
            float v[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 at = 64 * g + (thread % 2 * 8 + k) * 4 + thread / 2 % 4;
                v[k] = mul(mul(x[at], inverse), norm[at]);
            }
            if (p.normed && thread < 8) {
                float4* to = (float4*)p.normed + 2 * (8 * g + thread);
                to[0] = make_float4(v[0], v[1], v[2], v[3]);
                to[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
            encode_group(v, thread < 8, 8 * g + thread, to);
        }
        return;
    }
    const u32 row = threadIdx.x / 16;
    const float4 *of_row = (const float4*)(rows + row * cols) + lane, *of_x = (const float4*)x + lane, *of_weights = (const float4*)norm + lane;
    const float sum = normed_product(of_row, of_x, of_weights, cols, inverse);
    if (lane == 0 && first + row < p.rows) p.logits[first + row] = sum;
    STAMP(0, 5);
}
