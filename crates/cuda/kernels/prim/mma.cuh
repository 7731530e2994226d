// Products of bytes: `dp4a`, and tiles on integer tensor cores.
#pragma once
#include "prim/numerics.cuh"

// `sum + a . b` of four u8 and four i8.
__device__ __forceinline__ int dp4a(u32 a, u32 b, int sum) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}

// Adding an integer sum below 2^22 to these bits gives the float 2^23 + 2^22 + sum.
static const u32 MAGIC = 0x4b400000u;

static const float MAGIC_FLOAT = 12582912.0f;

// Devices before compute capability 8.0 never launch kernels on tensor cores. Their kernels are empty there, so that the driver has less to compile.
#if __CUDA_ARCH__ >= 800
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...)
#endif

// d = c + a b: a [16, 32] u8, b [32, 8] i8.
__device__ __forceinline__ void mma_u8_i8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(MAGIC));
#endif
}

// d = c + a b: a [16, 16] u8, b [16, 8] i8.
__device__ __forceinline__ void mma_u8_i8_16(u32 (&d)[4], u32 a0, u32 a1, u32 b0) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(MAGIC));
#endif
}

// d += a b: a [16, 32] u8, b [32, 8] i8.
__device__ __forceinline__ void mma_u8_i8_add(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d += a b: a [16, 32] i8, b [32, 8] i8.
__device__ __forceinline__ void mma_i8_i8_add(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Loads four matrices of 8 rows of 16 bytes; each lane gives the address of a row and gets word `lane % 4` of rows lane / 4, 8 + lane / 4, 16 + lane / 4, 24 + lane / 4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&to)[4], const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
#endif
}
