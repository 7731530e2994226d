// Activations in the encodings that matrix products take, and how rows are quantized.
#pragma once
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

// Activations [rows, cols] in the encodings that matrices need; the others are null.
struct Encoded {
    float* f;
    u16* h;
    // Each eight columns are stored in the order 0, 2, 4, 6, 1, 3, 5, 7, in which 4-bit weights are unpacked.
    i8* q;
    // For each 32 columns: scale, and scale times the sum of their q.
    float* sx;
    float* mx;
    // For integers of 11 bits (int11.cuh): f16 in tiles of 128 rows and 64 columns.
    u16* n;
    // [groups of 64 columns, `padded`]: sums of n.
    float* sn;
    // [rows]: what a result is multiplied with.
    float* tn;
    // Rows of whole tiles.
    u32 padded;
    u32 unused;
};

struct Quantize {
    Tensor x;
    // If not null, silu(x) * up is encoded instead of x.
    Tensor up;
    Norm norm;
    // [rows]: which rows of x are taken; null: all.
    const u32* taken;
    u32 rows;
    u32 cols;
    Encoded to;
};

// Quantizes four columns a lane; eight lanes have a group of 32.
__device__ __forceinline__ void quantize_four(const Quantize& p, u64 at, float4 v, bool inside) {
    if (p.to.f && inside) *(float4*)(p.to.f + at) = v;
    if (p.to.h && inside) {
        uint2 pairs = make_uint2(to_bf16(v.x) | (u32)to_bf16(v.y) << 16, to_bf16(v.z) | (u32)to_bf16(v.w) << 16);
        *(uint2*)(p.to.h + at) = pairs;
    }
    if (!p.to.q) return;
    // Absolute values compare as integers; NaN is the greatest.
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
    // Of two lanes with eight columns, the first writes the even columns and the second the odd ones.
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

// Quantizes 32 columns, one a lane, with the bits of `quantize`. `at`: the first column's place in `to`.
__device__ __forceinline__ void quantize_lanes(float v, u64 at, const Encoded& to) {
    const u32 lane = threadIdx.x % WARP, eighth = lane % 8;
    const float a = bits(warp_max(bits(v) & 0x7fffffffu));
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

// Activations in shared memory, in groups of 64. Each quarter of a group has an array of its own, so that neighbours meet different banks. A group has two scales
// and the sum of both means.
struct Quarters {
    uint4* q;
    // From one quarter's array to the next.
    u32 stride;
    float2* sx;
    float* m;
};

// The arrays of quantized activations in memory that begins at `at`.
__device__ __forceinline__ Quarters quarters(void* at, u32 groups) {
    Quarters x;
    x.q = (uint4*)at;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    return x;
}

// Quantizes eight columns a thread, of 32 that four neighbouring threads have, and gives the greatest size of these.
__device__ __forceinline__ float quantized_eight(const float (&v)[8], u32& even, u32& odd) {
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) most = max(most, bits(v[k]) & 0x7fffffffu);
    most = max(most, __shfl_xor_sync(ALL, most, 1));
    most = max(most, __shfl_xor_sync(ALL, most, 2));
    float a = bits(most), inv = div(127.0f, a);
    // In a group of zeros, or with a NaN or an infinity, every q is 0.
    u32 keep = is_finite(inv) && is_finite(a) ? ALL : 0;
    // Values are at most 127, so this addition rounds to the nearest integer, ties to even, and leaves it in the lowest byte.
    u32 q[8];
#pragma unroll
    for (int k = 0; k < 8; k++) q[k] = bits(add(mul(v[k], inv), 12582912.0f));
    even = keep & __byte_perm(__byte_perm(q[0], q[2], 0x0040), __byte_perm(q[4], q[6], 0x0040), 0x5410);
    odd = keep & __byte_perm(__byte_perm(q[1], q[3], 0x0040), __byte_perm(q[5], q[7], 0x0040), 0x5410);
    return a;
}

// The same; the four threads get their scale and mean. `i`: which eight columns.
__device__ __forceinline__ float2 quantize_eight(const float (&v)[8], bool inside, u32 i, uint4* quarters, u32 stride) {
    u32 even, odd;
    const float a = quantized_eight(v, even, odd);
    if (inside) *(uint2*)((u8*)(quarters + i / 2 % 4 * stride + i / 8) + i % 2 * 8) = make_uint2(even, odd);
    int sum = __dp4a((int)even, 0x01010101, __dp4a((int)odd, 0x01010101, 0));
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    float scale = div(a, 127.0f);
    return make_float2(scale, mul(scale, (float)sum));
}

// The same where eight neighbouring threads have a weight group of 64.
__device__ __forceinline__ void quantize_group(const float (&v)[8], bool inside, u32 i, const Quarters& to) {
    float2 own = quantize_eight(v, inside, i, to.q, to.stride);
    float2 next = make_float2(__shfl_down_sync(ALL, own.x, 4), __shfl_down_sync(ALL, own.y, 4));
    if (inside && i % 8 == 0) {
        to.sx[i / 8] = make_float2(own.x, next.x);
        to.m[i / 8] = add(own.y, next.y);
    }
}
