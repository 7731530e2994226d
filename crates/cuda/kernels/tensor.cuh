// What kernels on integer tensor cores are made of: products of tiles, copies to shared memory that others wait for later, bytes of packed weights.
#pragma once
#include "matmul.cu"

// An integer sum of less than 2^22 added to these bits is the float 2^23 + 2^22 and that sum.
static const u32 MAGIC = 0x4b400000u;
static const float MAGIC_FLOAT = 12582912.0f;

// Cards before compute 8.0 never launch kernels that are these products and little else: for them such a kernel is empty, and their driver has less to compile.
#if __CUDA_ARCH__ >= 800
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...)
#endif

// d = c + a b: a [16, 32] u8, b [32, 8] i8.
__device__ __forceinline__ void multiply_tile(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(MAGIC));
#endif
}

__device__ __forceinline__ void copy_word_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
#else
    *(u32*)to = *(const u32*)from;
#endif
}

__device__ __forceinline__ void copy_two_words_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
#endif
}

// Of what a stream of weights brings, with what lies beside it in a line of the second-level cache's own: memory gives longer pieces more quickly.
__device__ __forceinline__ void copy_stream_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#endif
}

// Four matrices of 8 rows of 16 bytes, each lane with the address of a row: a lane has word `lane % 4` of rows lane / 4, 8 + lane / 4 and on.
__device__ __forceinline__ void load_rows(u32 (&to)[4], const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
#endif
}

// The eight columns of lane `j` of a part as two words of bytes, even columns and odd ones.
template <int BITS> __device__ __forceinline__ void eight(const u8* part, u32 j, u32& even, u32& odd) {
    if (BITS == 4) {
        u32 word = ((const u32*)part)[j];
        even = word & 0x0f0f0f0fu;
        odd = word >> 4 & 0x0f0f0f0fu;
    } else if (BITS == 8) {
        uint2 words = ((const uint2*)part)[j];
        even = __byte_perm(words.x, words.y, 0x6420);
        odd = __byte_perm(words.x, words.y, 0x7531);
    } else {
        const u32 mask = (1u << BITS) - 1;
        const u32* words = (const u32*)part;
        even = odd = 0;
        u32 bit = j * 8 * BITS, word = bit / 32, shift = bit % 32;
        u32 first = words[word], second = words[min(word + 1, (u32)BITS - 1)];
        // Eight of them are at most 48 bits, from a byte on.
        u32 low = __funnelshift_r(first, second, shift);
        u32 third = words[min(word + 2, (u32)BITS - 1)];
        u32 high = __funnelshift_r(second, third, shift);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = i * BITS;
            u32 q = (at < 32 ? __funnelshift_r(low, high, at % 32) : high >> (at - 32)) & mask;
            if (i % 2 == 0) even |= q << (i / 2 * 8);
            else odd |= q << (i / 2 * 8);
        }
    }
}

// The scales of a token's groups that a weight group joins.
template <int OF> __device__ __forceinline__ void joined_scales(const float* from, float (&to)[OF]) {
    if (OF == 1) {
        to[0] = from[0];
    } else if (OF == 2) {
        float2 v = *(const float2*)from;
        to[0] = v.x;
        to[1 % OF] = v.y;
    } else {
        float4 v = *(const float4*)from;
        to[0] = v.x;
        to[1 % OF] = v.y;
        to[2 % OF] = v.z;
        to[3 % OF] = v.w;
    }
}
