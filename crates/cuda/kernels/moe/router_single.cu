// The router of a mixture for one token. It norms for itself and leaves what it normed encoded. Where loads must be under way together, no branch may lie
// between them.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "format/quads.cuh"
#include "format/slices.cuh"
#include "gemv/parts.cuh"
#include "moe/router.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"

struct RouterSingle {
    NormedRow x;
    // [experts, cols]
    Matrix router;
    // [1, cols]: of the expert that all tokens take; no data where there is none.
    Matrix gate;
    // [rows]: the gate's comes last.
    float* logits;
    // The normed row, encoded, as `Quarters` lie in shared memory, or `Slices` with what results are multiplied with behind them.
    u8* encoded;
    // [cols]: the same as it is; null where nobody wants it.
    float* normed;
    // The host's answer, which is still to be given; null where it is not asked.
    u32* answer;
    u32 experts;
    // Rows of the router: one for each expert, and the gate's.
    u32 rows;
};

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

// Columns 8 i to 8 i + 7 of the normed row; x and the norm's weights in quads.
__device__ __forceinline__ void normed_eight(const float* x, const float* norm, float inverse, u32 i, float (&v)[8], float* normed) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        const u32 at = 64 * (i / 8) + (i % 2 * 8 + k) * 4 + i % 8 / 2;
        v[k] = mul(mul(x[at], inverse), norm[at]);
    }
    if (normed) {
        float4* to = (float4*)normed + 2 * i;
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}

// A warp of each block encodes some groups: in groups of int8.
__device__ __forceinline__ void encode_int8(const RouterSingle& p, const float* x, const float* norm, float inverse) {
    const u32 groups = p.x.cols / 64, thread = threadIdx.x % WARP;
    const Quarters to = quarters(p.encoded, groups);
    for (u32 g = blockIdx.x; g < groups; g += gridDim.x) {
        float v[8];
        normed_eight(x, norm, inverse, 8 * g + thread % 8, v, thread < 8 ? p.normed : nullptr);
        quantize_group(v, thread < 8, 8 * g + thread, to);
    }
}

// As integers of 11 bits, four groups at a time.
__device__ __forceinline__ void encode_int11(const RouterSingle& p, const float* x, const float* norm, float inverse) {
    const u32 cols = p.x.cols, groups = cols / 64, lane = threadIdx.x % WARP;
    u32 most = 0;
#pragma unroll 4
    for (u32 i = lane; i < cols; i += WARP) most = max(most, bits(mul(mul(x[i], inverse), norm[i])) & 0x7fffffffu);
    const TokenScale scale = scale_of_token(warp_max_redux(most));
    const Slices to = slices(p.encoded, groups);
    // Columns are a multiple of 256: all lanes have a group.
    for (u32 i = blockIdx.x * WARP + lane; i < cols / 8; i += gridDim.x * WARP) {
        float v[8], rounded[8], sum;
        normed_eight(x, norm, inverse, i, v, p.normed);
        const int e = round_eight(v, scale.before, rounded, sum);
        put_slices(to, i, rounded, e, sum);
    }
    if (blockIdx.x == 0 && lane == 0) *behind(to, groups) = scale.behind;
}

// Shared memory: x, the norm's weights and rows [ROUTER_ROWS], of [cols] in quads each. After its wait only the first two warps have something to do, and wait for
// nobody: each norms for itself.
template <bool INT11> __device__ __forceinline__ void router_single(const RouterSingle& p) {
    WATCH();
    const u32 cols = p.x.cols, first = blockIdx.x * ROUTER_ROWS, warp = threadIdx.x / WARP, part = threadIdx.x / OF_ROW;
    float *x = smem, *norm = x + cols, *rows = norm + cols;
    // Threads without a row compute the first one, and do not store it.
    const u32 r = part < ROUTER_ROWS && first + part < p.rows ? first + part : 0;
    const bool of_norm = part == ROUTER_ROWS, of_gate = r >= p.experts;
    // By value: parameters that are looked at through a pointer come from memory.
    Matrix m = of_gate ? p.gate : p.router;
    if (of_norm) m.data = (const u8*)p.x.norm, m.kind = KIND_f32_f32, m.type = F32;
    widen_row(m, of_gate || of_norm ? 0 : r, cols, of_norm ? norm : rows + part * cols);
    STAMP(0, 0);
    begin();
    STAMP(0, 1);
    if (p.answer && blockIdx.x == 0 && threadIdx.x == 0) *p.answer = 0;
#pragma unroll 1
    for (u32 quad = threadIdx.x; quad < cols / 4; quad += 2 * ROUTE_THREADS) {
        // Both loads are issued before the first has arrived.
        const u32 other = min(quad + ROUTE_THREADS, cols / 4 - 1);
        const float *near = p.x.x + column_of(quad), *far = p.x.x + column_of(other);
        const float4 a = make_float4(__ldcg(near), __ldcg(near + 16), __ldcg(near + 32), __ldcg(near + 48));
        const float4 b = make_float4(__ldcg(far), __ldcg(far + 16), __ldcg(far + 32), __ldcg(far + 48));
        ((float4*)x)[quad] = a;
        ((float4*)x)[other] = b;
    }
    __syncthreads();
    STAMP(0, 2);
    // Each block's second warp encodes some groups.
    if (warp > 1 || warp == 1 && blockIdx.x >= cols / (INT11 ? 256 : 64)) return;
    const float inverse = inverse_rms_quads((const float4*)x, cols, p.x.eps);
    STAMP(0, 3);
    const u32 lane = threadIdx.x % 16;
    if (warp == 1) {
        if (INT11) encode_int11(p, x, norm, inverse);
        else encode_int8(p, x, norm, inverse);
        return;
    }
    const u32 row = threadIdx.x / 16;
    const float4 *of_row = (const float4*)(rows + row * cols) + lane, *of_x = (const float4*)x + lane, *of_weights = (const float4*)norm + lane;
    const float sum = normed_product(of_row, of_x, of_weights, cols, inverse);
    if (lane == 0 && first + row < p.rows) p.logits[first + row] = sum;
    STAMP(0, 5);
}

extern "C" __global__ void __launch_bounds__(384) moe_router_single(const __grid_constant__ RouterSingle p) { router_single<false>(p); }
extern "C" __global__ void __launch_bounds__(384) moe_router_single_int11(const __grid_constant__ RouterSingle p) { router_single<true>(p); }
