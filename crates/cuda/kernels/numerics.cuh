// The arithmetic of docs/numerics.md on one thread and across a warp. Everything else is built of this: nothing here or in a kernel may use an approximate
// instruction, fuse what is not written as fma, or sum in an order of its own.
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

// `a` where it is greater, else `b`: the CPU's maximum, which is `b` where either is NaN.
__device__ __forceinline__ float greater(float a, float b) { return a > b ? a : b; }

// ---- where a kernel's time goes, in modules for trying (`make.py stamped`): cycles of each block's first thread from stamp to stamp, and how many there were

#ifdef STAMPS

extern "C" __device__ u64 stamps[16][8][2] = {};
#define WATCH() u64 watched = clock64()
#define STAMP(kernel, n)                                  \
    if (threadIdx.x == 0) {                               \
        u64 stamped = clock64();                          \
        atomicAdd(&stamps[kernel][n][0], stamped - watched); \
        atomicAdd(&stamps[kernel][n][1], 1ull);           \
        watched = clock64();                              \
    }
#else
#define WATCH()
#define STAMP(kernel, n)
#endif

// ---- functions

// exp(x - n * ln(2)), for `n` the whole number next to x / ln(2).
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
    // A NaN converts to 0, and stays what it is.
    return mul(exp_of_rest(x, n), bits((u32)(__float2int_rn(n) + 127) << 23));
}

// `exp_` of what is not above zero: the same bits, by a sum that leaves the integer in the lowest bits. A NaN stays one.
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

// ---- order between kernels

// Until all that kernels before this one have written is there; then the one after it may begin, up to where it waits itself. What comes before this reads only
// what no kernel of a step writes. Every block of a kernel that is not through at once waits, so that a kernel that has ended has seen the end of all before it.
__device__ __forceinline__ void await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void begin() {
    await();
    release();
}

// Whether this block is the last of `count` to come here, where all their threads come; what the others have written is there then, past the first-level cache. `counter`: zero
// before, and behind it again.
__device__ __forceinline__ bool is_last(u32* counter, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, count - 1) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Has a number computed here, and not where it is used, which may be behind a wait or a branch.
__device__ __forceinline__ void computed(float& x) { asm volatile("// computed" : "+f"(x)); }
__device__ __forceinline__ void computed(u32& x) { asm volatile("// computed" : "+r"(x)); }

// Brings a line to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Sixteen bytes to shared memory; they are there after `copied`.
__device__ __forceinline__ void copy_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

__device__ __forceinline__ void copied() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copies of a thread go in groups: where one ends, and a wait for all but the last N of them.
__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void copied_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- element types

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

// As `vcvtneps2bf16` rounds: to nearest even, denormals to zero of their sign, NaN quieted.
__device__ __forceinline__ u16 to_bf16(float x) {
    u32 b = bits(x);
    if (is_nan(x)) return (u16)(b >> 16) | 0x40;
    if ((b & 0x7f800000u) == 0) return (u16)(b >> 16) & 0x8000;
    return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Element `i` of an array of floats, at any address that its type allows.
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

// ---- sums across threads

// The tree of a lane sum, lane i in thread i of each sixteen: i and i+8, i and i+4, i and i+2, 0 and 1. All threads have the sum.
__device__ __forceinline__ float lane_tree(float x) {
    for (u32 step = 8; step > 0; step /= 2) x = add(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

// The tree of a wide sum, lanes t and t+32 in thread t. All threads have the sum.
__device__ __forceinline__ float wide_tree(float low, float high) {
    float x = add(low, high);
    for (u32 step = 16; step > 0; step /= 2) x = add(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

// The wide sum of squares of `n` elements, by a whole warp.
__device__ __forceinline__ float squares(const float* x, u32 n) {
    u32 lane = threadIdx.x % WARP;
    float low = 0.0f, high = 0.0f;
#pragma unroll 4
    for (u32 i = lane; i < n; i += 64) {
        float a = x[i];
        low = fma(a, a, low);
        if (i + 32 < n) {
            float b = x[i + 32];
            high = fma(b, b, high);
        }
    }
    return wide_tree(low, high);
}

// `1 / sqrt(mean of squares + eps)` of `n` elements, by a whole warp.
__device__ __forceinline__ float inverse_rms(const float* x, u32 n, float eps) {
    return div(1.0f, __fsqrt_rn(add(div(squares(x, n), (float)n), eps)));
}

// `1 / sqrt(mean of squares + eps)` of `n` elements in shared memory, a multiple of 256: loads are on their way before the sums that need them.
__device__ __forceinline__ float inverse_rms_256(const float* x, u32 n, float eps) {
    float low = 0.0f, high = 0.0f, next[8];
    x += threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; i++) next[i] = x[32 * i];
#pragma unroll 1
    for (u32 from = 256; from <= n; from += 256) {
        float own[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            own[i] = next[i];
            if (from < n) next[i] = x[from + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            low = fma(own[i], own[i], low);
            high = fma(own[i + 1], own[i + 1], high);
        }
    }
    float sum = wide_tree(low, high), mean;
    // The quotient by a power of two is a product, exactly.
    if (n & (n - 1)) mean = div(sum, (float)n);
    else mean = mul(sum, bits((u32)(127 - 31 + __clz(n)) << 23));
    return div(1.0f, __fsqrt_rn(add(mean, eps)));
}

// The greatest of a warp.
__device__ __forceinline__ float warp_greatest(float x) {
    for (u32 step = 16; step > 0; step /= 2) x = greater(__shfl_xor_sync(ALL, x, step), x);
    return x;
}

__device__ __forceinline__ u32 warp_greatest(u32 x) {
    for (u32 step = 16; step > 0; step /= 2) x = max(__shfl_xor_sync(ALL, x, step), x);
    return x;
}

__device__ __forceinline__ int warp_sum(int x) {
    for (u32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// To the nearest integer, ties to even, within an i8; a NaN is 0.
__device__ __forceinline__ int to_i8(float x) { return min(max(__float2int_rn(x), -128), 127); }

// What a kernel was launched with of shared memory.
extern __shared__ float room[];

// ---- what kernels are given; the host's counterparts are in src/parameters.rs

// A row-major matrix of f32.
struct Tensor {
    float* at;
    // Elements from row to row.
    u64 stride;

    __device__ __forceinline__ float* row(u64 i) const { return at + i * stride; }
};

struct Norm {
    // Null: no norm.
    const float* weight;
    float eps;
    u32 unused;
};

// A weight matrix, from the first row that is used on; its bytes are those of the checkpoint.
struct Matrix {
    const u8* data;
    const u8* scales;
    const u8* biases;
    u64 row_bytes;
    // Scales of a row.
    u32 groups;
    // Which kernel multiplies with it.
    u32 kind;
    // Element type of scales and biases, or of the matrix where it has none.
    u32 type;
    // Columns of a group; 0 where there are none.
    u32 group;
    u32 bits;
    u32 unused;
};

static const u32 LANES_F32 = 0, LANES_F16 = 1, LANES_BF16 = 2, LANES_AFFINE = 3, PAIRS_BF16 = 4, PAIRS_AFFINE = 5, INTEGERS = 6;

// The q at column `i` of a row of an affine matrix: `bits` bits of a little-endian stream.
__device__ __forceinline__ u32 quantum(const u8* row, u32 bits, u32 i) {
    const u32* words = (const u32*)row;
    u32 bit = i * bits, word = bit / 32, shift = bit % 32;
    u32 q = words[word] >> shift;
    if (shift + bits > 32) q |= words[word + 1] << (32 - shift);
    return q & ((1u << bits) - 1);
}

// The weight at column `i` of row `r` of an affine matrix: `fma(q, s, b)`.
__device__ __forceinline__ float affine_weight(const Matrix& m, u64 r, u32 i) {
    // Groups have a power of two of columns, and a division takes as long as all the rest.
    u64 g = r * m.groups + (i >> (31 - __clz(m.group)));
    float q = (float)quantum(m.data + r * m.row_bytes, m.bits, i);
    return fma(q, element(m.scales, m.type, g), element(m.biases, m.type, g));
}

// Activations [rows, cols] in the encodings that were wanted; the others are null.
struct Encoded {
    float* f;
    u16* h;
    // In the order 0, 2, 4, 6, 1, 3, 5, 7 inside each eight columns, in which 4-bit weights come out of their words.
    i8* q;
    // Of each 32 columns.
    float* sx;
    float* mx;
};
