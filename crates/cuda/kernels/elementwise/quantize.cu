// Rows of activations, normed or combined, in the encodings that matrix products take.
#include "format/activations.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// Columns of a row that are kept in shared memory while it is normed, at most.
static const u32 NORMED = 8192;

// A block takes a row at a time, or where nothing is normed a part of one: grid (rows, parts). Where there is a norm, the first warp sums squares.
extern "C" __global__ void __launch_bounds__(1024) quantize(const Quantize p) {
    __shared__ float inverse;
    __shared__ __align__(16) float kept[NORMED];
    u32 lane = threadIdx.x % WARP;
    const float* w = p.norm.weight;
    bool keeps = w && p.cols <= NORMED;
    u64 addresses = (u64)p.x.at | (u64)p.up.at | (u64)w | (u64)p.to.f | (u64)p.to.h | (u64)p.to.q;
    bool by_four = ((addresses | 4 * (p.x.stride | p.up.stride)) & 15) == 0 && p.cols % 4 == 0;
    // A thread's first weights of the norm are there before x is.
    const u32 own = blockIdx.y * blockDim.x + threadIdx.x;
    float4 first_by = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (w && by_four && own < p.cols / 4) first_by = ((const float4*)w)[own];
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        u64 from = p.taken ? p.taken[r] : r;
        const float* x = p.x.row(from);
        if (w) {
            __syncthreads();
            if (keeps && by_four) {
#pragma unroll 4
                for (u32 i = threadIdx.x; i < p.cols / 4; i += blockDim.x) ((float4*)kept)[i] = ((const float4*)x)[i];
            } else if (keeps) {
                for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) kept[c] = x[c];
            }
            __syncthreads();
            if (threadIdx.x < WARP) {
                const float eps = p.norm.eps;
                float inv = !keeps ? inverse_rms(x, p.cols, eps) : p.cols % 256 ? inverse_rms(kept, p.cols, eps) : inverse_rms_256(kept, p.cols, eps);
                if (lane == 0) inverse = inv;
            }
            __syncthreads();
        }
        // Whole groups of 32 stay in a warp.
        if (by_four) {
            const float4 *fours = (const float4*)(keeps ? kept : x), *ups = (const float4*)p.up.row(from);
#pragma unroll 2
            for (u32 i = own; i / WARP * WARP < p.cols / 4; i += gridDim.y * blockDim.x) {
                bool inside = i < p.cols / 4;
                float4 v = inside ? fours[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (w && inside) {
                    float4 by = i == own ? first_by : ((const float4*)w)[i];
                    v = make_float4(mul(mul(v.x, inverse), by.x), mul(mul(v.y, inverse), by.y), mul(mul(v.z, inverse), by.z), mul(mul(v.w, inverse), by.w));
                }
                if (p.up.at && inside) {
                    float4 by = ups[i];
                    v = make_float4(mul(silu(v.x), by.x), mul(silu(v.y), by.y), mul(silu(v.z), by.z), mul(silu(v.w), by.w));
                }
                quantize_four(p, (u64)r * p.cols + 4 * i, v, inside);
            }
            continue;
        }
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c / WARP * WARP < p.cols; c += gridDim.y * blockDim.x) {
            bool inside = c < p.cols;
            float v = inside ? x[c] : 0.0f;
            if (w) v = inside ? mul(mul(v, inverse), w[c]) : 0.0f;
            if (p.up.at) v = inside ? mul(silu(v), p.up.row(from)[c]) : 0.0f;
            u64 at = (u64)r * p.cols + c;
            if (p.to.f && inside) p.to.f[at] = v;
            if (p.to.h && inside) p.to.h[at] = to_bf16(v);
            if (p.to.q) {
                float a = bits(warp_max(bits(v) & 0x7fffffffu));
                float inv = div(127.0f, a);
                if (!is_finite(inv)) inv = 0.0f;
                int q = to_i8(mul(v, inv));
                int sum = warp_sum(q);
                u32 eighth = c % 8;
                u64 place = at - eighth + (eighth / 2 + (eighth % 2) * 4);
                p.to.q[place] = (i8)q;
                if (lane == 0) {
                    float scale = div(a, 127.0f);
                    p.to.sx[at / 32] = scale;
                    p.to.mx[at / 32] = mul(scale, (float)sum);
                }
            }
        }
    }
}
