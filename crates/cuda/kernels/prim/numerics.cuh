// The arithmetic of docs/numerics.md on one thread. All kernels are built of it: no kernel may use an approximate instruction, fuse what is not written as fma,
// or sum in an order of its own.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
static const u32 ALL = 0xffffffffu;
static const u32 WARP = 32;
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float bits(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ u32 bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ bool is_nan(float x) { return (bits(x) & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_finite(float x) { return (bits(x) & 0x7f800000u) != 0x7f800000u; }
static const u32 NEGATIVE_INFINITY = 0xff800000u, NOT_A_NUMBER = 0x7fc00000u;

// The CPU's maximum: `a` if it is greater, else `b`; so `b` if either is NaN.
__device__ __forceinline__ float greater(float a, float b) { return a > b ? a : b; }

// exp(x - n * ln(2)), where `n` is the integer nearest to x / ln(2).
__device__ __forceinline__ float exp_of_rest(float x, float n) {
    float r = fma(n, -bits(0x3f317218u), x);
    r = fma(n, 1.9046543e-9f, r);
    float p = 0.001381454f;
    p = fma(p, r, 0.008368745f);
    p = fma(p, r, 0.04166839f);
    p = fma(p, r, 0.16666521f);
    p = fma(p, r, 0.49999994f);
    return fma(fma(p, r, 1.0f), r, 1.0f);
}

__device__ __forceinline__ float exp_(float x) {
    x = -87.0f > x ? -87.0f : x;
    x = 88.0f < x ? 88.0f : x;
    float n = rintf(mul(x, 1.44269504088896340736f));
    // A NaN converts to 0 here, and the product is NaN again.
    return mul(exp_of_rest(x, n), bits((u32)(__float2int_rn(n) + 127) << 23));
}

// `exp_` for x <= 0, with the same bits: the addition leaves the integer in the lowest bits. NaN stays NaN.
__device__ __forceinline__ float exp_below(float x) {
    x = -87.0f > x ? -87.0f : x;
    float t = add(mul(x, 1.44269504088896340736f), 12582912.0f);
    return mul(exp_of_rest(x, sub(t, 12582912.0f)), bits((bits(t) + 127) << 23));
}

__device__ __forceinline__ float sigmoid(float x) { return div(1.0f, add(1.0f, exp_(sub(0.0f, x)))); }
__device__ __forceinline__ float silu(float x) { return mul(x, sigmoid(x)); }

__device__ __forceinline__ float softplus(float x) {
    float negative = sub(0.0f, x);
    float y = exp_(negative < x ? negative : x);
    float s = div(y, add(2.0f, y));
    float z = mul(s, s);
    float q = 0.28011993f;
    q = fma(q, z, 0.28001803f);
    q = fma(q, z, 0.40021527f);
    q = fma(q, z, 0.6666642f);
    float log = fma(mul(s, z), q, add(s, s));
    return add(0.0f > x ? 0.0f : x, log);
}

__device__ __forceinline__ float tanh_(float x) {
    float a = greater(sub(0.0f, x), x);
    if (a < 0.625f) {
        float z = mul(x, x);
        float t = -0.005704985f;
        t = fma(t, z, 0.020639086f);
        t = fma(t, z, -0.053739715f);
        t = fma(t, z, 0.13331442f);
        t = fma(t, z, -0.3333328f);
        return fma(mul(x, z), t, x);
    }
    float big = sub(1.0f, div(2.0f, add(exp_(add(a, a)), 1.0f)));
    return x < 0.0f ? sub(0.0f, big) : big;
}

// Makes the compiler compute a number here, not where it is used, which may be after a wait or a branch.
__device__ __forceinline__ void materialize(float& x) { asm volatile("// computed" : "+f"(x)); }

__device__ __forceinline__ void materialize(u32& x) { asm volatile("// computed" : "+r"(x)); }
static const u32 F32 = 0, F16 = 1, BF16 = 2;
__device__ __forceinline__ float from_bf16(u16 x) { return bits((u32)x << 16); }

__device__ __forceinline__ float from_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u16 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Rounds as `vcvtneps2bf16` does: to nearest even, denormals to zero of their sign, NaN quieted.
__device__ __forceinline__ u16 to_bf16(float x) {
    u32 b = bits(x);
    if (is_nan(x)) return (u16)(b >> 16) | 0x40;
    if ((b & 0x7f800000u) == 0) return (u16)(b >> 16) & 0x8000;
    return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Element `i` of an array of floats of a type.
__device__ __forceinline__ float element(const u8* p, u32 type, u64 i) {
    if (type == F32) return ((const float*)p)[i];
    u16 half = ((const u16*)p)[i];
    return type == F16 ? from_f16(half) : from_bf16(half);
}

// One half of `vdpbf16ps`: denormal inputs are zero of their sign, and so is a result that is tiny after rounding.
__device__ __forceinline__ float flushed_fma(float a, float b, float c) {
    float d;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// The nearest integer, ties to even, clamped to an i8; NaN gives 0.
__device__ __forceinline__ int to_i8(float x) { return min(max(__float2int_rn(x), -128), 127); }
