// The words that kernels are written in, for a compiler of the host: a block's threads take turns on one thread (`driver.cpp`).
#pragma once
#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __constant__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900
struct Dim3 { unsigned x, y, z; };
extern Dim3 threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
static inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static inline int __float2int_rn(float x) { return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? (-2147483647 - 1) : (int)lrintf(x); }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return (unsigned)(((unsigned long long)hi << 32 | lo) >> (s & 31)); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long all = (unsigned long long)b << 32 | a; unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(all >> ((s >> 4 * i & 7) * 8) & 255) << 8 * i;
    return r;
}
static inline int __dp4a(unsigned a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(uint8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i); return c; }
static inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i); return c; }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { for (int i = 0; i < 4; i++) c += (unsigned)(uint8_t)(a >> 8 * i) * (unsigned)(uint8_t)(b >> 8 * i); return c; }
static inline unsigned long long clock64() { return 0; }
static inline void __threadfence() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { sched_yield(); }
static inline unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
static inline unsigned atomicOr(unsigned* p, unsigned n) { unsigned old = *p; *p = old | n; return old; }
static inline unsigned atomicAdd(unsigned* p, unsigned n) { unsigned old = *p; *p = old + n; return old; }
static inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
// What each lane of the warp gave, [32]; those that have ended give 0.
const uint64_t* emu_exchange(uint64_t mine);
template <class T> static inline uint64_t emu_raw(T v) { uint64_t r = 0; memcpy(&r, &v, sizeof v); return r; }
template <class T> static inline T emu_as(uint64_t r) { T v; memcpy(&v, &r, sizeof v); return v; }
template <class T> static inline T __shfl_sync(unsigned, T v, int from, int width = 32) { unsigned l = threadIdx.x % 32; return emu_as<T>(emu_exchange(emu_raw(v))[(l & ~(width - 1)) + (from & (width - 1))]); }
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int x) { return emu_as<T>(emu_exchange(emu_raw(v))[(threadIdx.x % 32) ^ x]); }
template <class T> static inline T __shfl_up_sync(unsigned, T v, int d) { unsigned l = threadIdx.x % 32; return emu_as<T>(emu_exchange(emu_raw(v))[l < (unsigned)d ? l : l - d]); }
template <class T> static inline T __shfl_down_sync(unsigned, T v, int d) { unsigned l = threadIdx.x % 32, s = l + d; const uint64_t* all = emu_exchange(emu_raw(v)); return emu_as<T>(all[s < 32 ? s : l]); }
static inline unsigned __ballot_sync(unsigned, bool v) { const uint64_t* all = emu_exchange(v); unsigned r = 0; for (int i = 0; i < 32; i++) r |= (unsigned)(all[i] != 0) << i; return r; }
static inline unsigned __reduce_min_sync(unsigned, unsigned v) { const uint64_t* all = emu_exchange(v); unsigned r = v; for (int i = 0; i < 32; i++) r = min(r, (unsigned)all[i]); return r; }
static inline unsigned __reduce_max_sync(unsigned, unsigned v) { const uint64_t* all = emu_exchange(v); unsigned r = v; for (int i = 0; i < 32; i++) r = max(r, (unsigned)all[i]); return r; }
static inline int __reduce_add_sync(unsigned, int v) { const uint64_t* all = emu_exchange((unsigned)v); unsigned r = 0; for (int i = 0; i < 32; i++) r += (unsigned)all[i]; return (int)r; }
// Copies are made when they are waited for, and no earlier.
void emu_copy(void* to, const void* from, unsigned bytes);
void emu_commit();
void emu_wait(unsigned but);
void emu_wait_all();
static inline int emu_dp4a(unsigned a, unsigned b, int c) { return __dp4a(a, (int)b, c); }
static inline int emu_dp4a_signed(unsigned a, unsigned b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return sum;
}
static inline float emu_flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
static inline float emu_ftz(float a, float b, float c) {
    a = emu_flushed(a), b = emu_flushed(b), c = emu_flushed(c);
    return emu_flushed(__builtin_fmaf(a, b, c));
}
static inline void emu_load_rows(unsigned (&to)[4], const void* from) {
    const uint64_t* all = emu_exchange((uint64_t)from);
    for (int i = 0; i < 4; i++) to[i] = ((const unsigned*)all[8 * i + threadIdx.x % 32 / 4])[threadIdx.x % 4];
}
// sums = a b of a whole warp, in the layout of mma.sync.m16n8: k = 32 with `a` of the pointer's type and `b` of i8, or k = 16 with both of f16, summed in double precision.
void emu_products(const unsigned (&a)[4], unsigned b0, unsigned b1, const uint8_t*, int (&sums)[4]);
void emu_products(const unsigned (&a)[4], unsigned b0, unsigned b1, const int8_t*, int (&sums)[4]);
void emu_products(const unsigned (&a)[4], unsigned b0, unsigned b1, double (&sums)[4]);
template <class A> static inline void emu_mma_more(unsigned (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int sums[4];
    emu_products(a, b0, b1, (const A*)0, sums);
    for (int e = 0; e < 4; e++) d[e] += (unsigned)sums[e];
}
static inline void emu_mma(unsigned (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, unsigned init) {
    for (unsigned& sum : d) sum = init;
    emu_mma_more<uint8_t>(d, a, b0, b1);
}
static inline void emu_mma_f16(float (&d)[4], const unsigned* a, unsigned b0, unsigned b1) {
    double sums[4];
    emu_products({a[0], a[1], a[2], a[3]}, b0, b1, sums);
    for (int e = 0; e < 4; e++) d[e] = (float)(d[e] + sums[e]);
}
