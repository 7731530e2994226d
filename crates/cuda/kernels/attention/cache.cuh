// The cache of keys and values: where a slot is, and how a row is rotated, rounded and stored.
#pragma once
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

// A layer's keys and values in a pool of blocks. The host computes the offsets (src/attention.rs).
struct Cache {
    u8* pool;
    u64 block_bytes;
    // Bytes from the start of a block to K, V and their scales.
    u64 k;
    u64 v;
    u64 k_scales;
    u64 v_scales;
    u32 block_tokens;
    u32 k_dim;
    u32 v_dim;
    u32 type;
    // Elements of a key before those that are its value, where values are the ends of keys; 0: values are rows of their own.
    u32 before_value;
    u32 unused;
};

static const u32 INT8 = 3, INT16 = 4;
__device__ __forceinline__ u32 size_of(u32 type) { return type == F32 ? 4 : type == INT8 ? 1 : 2; }
__device__ __forceinline__ bool has_scales(u32 type) { return type == INT8 || type == INT16; }

struct Place {
    u8* row;
    u8* scale;
};

// The scale of a row of integers; its address need not be aligned.
__device__ __forceinline__ float read_scale(const u8* p) {
    if ((u64)p % 4 == 0) return *(const float*)p;
    return bits((u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24);
}

__device__ __forceinline__ void write_scale(u8* p, float scale) {
    for (u32 i = 0; i < 4; i++) p[i] = (u8)(bits(scale) >> 8 * i);
}

// A head's key or value in a block.
__device__ __forceinline__ Place place(const Cache& c, u64 rows, u64 scales, u32 dim, u64 block, u32 offset, u32 kv_head) {
    u8* at = c.pool + block * c.block_bytes;
    u64 row = (u64)kv_head * c.block_tokens + offset;
    return {at + rows + row * dim * size_of(c.type), at + scales + row * 4};
}

// The value at the end of a key. Of sixteen bits, the low bytes of keys lie behind all high ones.
__device__ __forceinline__ Place value_in(const Cache& c, Place key) {
    return {key.row + c.before_value * (c.type == INT16 ? 1 : size_of(c.type)), key.scale};
}

__device__ __forceinline__ float cached(const u8* row, u32 type, u32 i) {
    if (type == INT8) return (float)((const i8*)row)[i];
    return element(row, type, i);
}

// To bf16, denormals kept.
__device__ __forceinline__ u16 round_bf16(float x) {
    u32 b = bits(x);
    return is_nan(x) ? (u16)(b >> 16) | 0x40 : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// How a row is quantized to integers: the factor before rounding, and the scale.
struct Rounding {
    float inv;
    float scale;
};

// The greatest integers of rows. Those of sixteen bits are 256 times a high byte, with a sign, and a low one, with a sign too.
static const float TOP_INT8 = 127.0f, TOP_INT16 = 32639.0f;
__device__ __forceinline__ float top_of(u32 type) { return type == INT8 ? TOP_INT8 : TOP_INT16; }
// Sums of products of sixteen bits lack their lowest eight.
__device__ __forceinline__ float byte_factor(u32 type) { return type == INT8 ? 1.0f : 256.0f; }

// Rounds to the nearest integer, ties to even; a NaN becomes 0.
__device__ __forceinline__ int round_int(float x) { return __float2int_rn(x); }
__device__ __forceinline__ i8 high_byte(int n) { return (i8)(n + 128 >> 8); }
__device__ __forceinline__ i8 low_byte(int n) { return (i8)n; }

// By a warp. A row with NaN or infinity becomes zeros with a scale of NaN.
__device__ __forceinline__ Rounding rounding_of(const float* x, u32 dim, float most) {
    u32 greatest = 0;
    for (u32 i = threadIdx.x % WARP; i < dim; i += WARP) greatest = max(greatest, bits(x[i]) & 0x7fffffffu);
    float a = bits(warp_max(greatest)), inv = div(most, a);
    bool finite = is_finite(a);
    return {finite && is_finite(inv) ? inv : 0.0f, finite ? div(a, most) : bits(0x7fc00000u)};
}

// Stores a row of `dim` elements, by a warp.
__device__ void store(const float* x, u32 dim, u32 type, Place to) {
    u32 lane = threadIdx.x % WARP;
    float inv = 0.0f;
    if (has_scales(type)) {
        Rounding rounding = rounding_of(x, dim, top_of(type));
        inv = rounding.inv;
        if (lane == 0) write_scale(to.scale, rounding.scale);
    }
    for (u32 i = lane; i < dim; i += WARP) {
        float v = x[i];
        if (type == F32) ((float*)to.row)[i] = v;
        else if (type == F16) ((u16*)to.row)[i] = to_f16(v);
        else if (type == BF16) ((u16*)to.row)[i] = round_bf16(v);
        else if (type == INT16) {
            const int n = round_int(mul(v, inv));
            ((i8*)to.row)[i] = high_byte(n);
            ((i8*)to.row)[dim + i] = low_byte(n);
        }
        else ((i8*)to.row)[i] = (i8)to_i8(mul(v, inv));
    }
}

// Transforms each run of `run` elements of a head, a power of two that divides `dim`, by butterflies of neighbours first (docs/numerics.md). By a warp; 1: nothing.
__device__ __forceinline__ void hadamard(float* head, u32 dim, u32 run) {
    for (u32 apart = 1; apart < run; apart *= 2) {
        for (u32 i = threadIdx.x % WARP; i < dim / 2; i += WARP) {
            const u32 within = i & apart - 1, at = 2 * (i - within) + within;
            const float a = head[at], b = head[at + apart];
            head[at] = add(a, b);
            head[at + apart] = sub(a, b);
        }
        __syncwarp();
    }
}

// Norms and rotates a head from `x` to shared memory, by a warp, and transforms runs of it.
__device__ void turn(const float* x, float* head, u32 dim, const Norm& norm, const float* angles, u32 half, u32 run) {
    u32 lane = threadIdx.x % WARP;
    for (u32 i = lane; i < dim; i += WARP) head[i] = x[i];
    __syncwarp();
    if (norm.weight) {
        float inv = inverse_rms(head, dim, norm.eps);
        for (u32 i = lane; i < dim; i += WARP) head[i] = mul(mul(head[i], inv), norm.weight[i]);
        __syncwarp();
    }
    for (u32 i = lane; i < half; i += WARP) {
        float a = head[i], b = head[half + i], cos = angles[i], sin = angles[half + i];
        head[i] = fma(b, sub(0.0f, sin), mul(a, cos));
        head[half + i] = fma(a, sin, mul(b, cos));
    }
    __syncwarp();
    hadamard(head, dim, run);
}
