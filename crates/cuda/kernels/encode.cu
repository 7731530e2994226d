// Rows of activations, normed or combined, in the encodings that matrix products take; rows of an embedding.
#pragma once
#include "numerics.cuh"

struct Encode {
    Tensor x;
    // Where it is not null, what is encoded is silu(x) * up.
    Tensor up;
    Norm norm;
    // Which rows of x are taken; null: all.
    const u32* taken;
    u32 rows;
    u32 cols;
    Encoded to;
};

// Columns of a row that are kept in shared memory while it is normed, at most.
static const u32 NORMED = 8192;

// The four columns of each lane, eight lanes a group: what `encode` writes of them.
__device__ __forceinline__ void encode_four(const Encode& p, u64 at, float4 v, bool inside) {
    if (p.to.f && inside) *(float4*)(p.to.f + at) = v;
    if (p.to.h && inside) {
        uint2 pairs = make_uint2(to_bf16(v.x) | (u32)to_bf16(v.y) << 16, to_bf16(v.z) | (u32)to_bf16(v.w) << 16);
        *(uint2*)(p.to.h + at) = pairs;
    }
    if (!p.to.q) return;
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
    // Of each eight columns the even ones are the first lane's to write, and the odd ones the second's.
    bool second = threadIdx.x % 2;
    u32 even = (q0 & 0xff) | (q2 & 0xff) << 8, odd = (q1 & 0xff) | (q3 & 0xff) << 8;
    u32 other = __shfl_xor_sync(ALL, second ? even : odd, 1);
    if (!inside) return;
    *(u32*)(p.to.q + at) = second ? other | odd << 16 : even | other << 16;
    if (threadIdx.x % 8 == 0) {
        float scale = div(a, 127.0f);
        p.to.sx[at / 32] = scale;
        p.to.mx[at / 32] = mul(scale, (float)sum);
    }
}

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

// A block takes a row at a time, or where nothing is normed a part of one: grid (rows, parts). Where there is a norm, the first warp sums squares.
extern "C" __global__ void __launch_bounds__(1024) encode(const Encode p) {
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
                encode_four(p, (u64)r * p.cols + 4 * i, v, inside);
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
                float a = bits(warp_greatest(bits(v) & 0x7fffffffu));
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

struct Embed {
    Matrix table;
    const u32* tokens;
    Tensor out;
    u32 rows;
    u32 cols;
};

extern "C" __global__ void embed(const Embed p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        u64 token = p.tokens[r];
        float* out = p.out.row(r);
        for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) {
            out[c] = p.table.group ? affine_weight(p.table, token, c)
                                   : element(p.table.data + token * p.table.row_bytes, p.table.type, c);
        }
    }
}

struct CopyRows {
    Tensor from;
    Tensor to;
    u32 rows;
    u32 cols;
};

extern "C" __global__ void copy_rows(const CopyRows p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) p.to.row(r)[c] = p.from.row(r)[c];
    }
}
