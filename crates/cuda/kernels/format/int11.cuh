// Activations as integers of 11 bits (docs/numerics.md), on a GPU as f16: v = n 2^e below 2^15, where x = v tok. With weights q 2^-20 as f16 they give products
// whose sums of 64 are exact in f32, in any order: I 2^(e-20).
//
// They lie in tiles of 128 rows and 64 columns, 16 KiB each, tiles of the same rows side by side. A row of a tile has 128 bytes, sixteen bytes each at their number
// xor the lowest three bits of the row's. Of sixteen columns 16 j to 16 j + 15, which a thread unpacks, column 8 a + 4 i + 2 u + h is half-word i of word j of
// the sixteen bytes 4 a + 2 u + h: the order in which tensor cores want what a few shifts make of eight 4-bit weights.
#pragma once
#include "format/activations.cuh"
#include "prim/numerics.cuh"

static const u32 TILE_ROWS = 128, TILE_BYTES = 16384;

// Where row `r`'s 64 columns `g` begin.
__device__ __forceinline__ u64 int11_row(u64 r, u32 g, u32 groups) { return ((r / TILE_ROWS) * groups + g) * TILE_BYTES + r % TILE_ROWS * 128; }

// The place of row `r` in an array of sums: of sixteen rows, 2 j, 2 j + 1, 2 j + 8 and 2 j + 9 are neighbours.
__device__ __forceinline__ u32 int11_place(u32 r) { return (r & ~15u) + (r & 7) / 2 * 4 + (r >> 3 & 1) * 2 + (r & 1); }

// The least e with x < 2^e, for the bits of a normal number that is not negative.
__device__ __forceinline__ int exponent(u32 raw) { return (int)(raw >> 23) - 126; }

__device__ __forceinline__ float power(int e) { return bits((u32)(e + 127) << 23); }

// 2^-20, which makes of sums of q v what is added up.
static const float STEP = 9.5367431640625e-7f;

// A token's power of two, from the bits of its greatest size: what columns are multiplied with before they are encoded (0: the token is not finite), and results.
struct TokenScale {
    float before;
    float behind;
};

__device__ __forceinline__ TokenScale scale_of_token(u32 greatest) {
    const int e = max(exponent(greatest), -100);
    const bool finite = greatest < (122u + 127) << 23;
    return {finite ? power(15 - e) : 0.0f, finite ? power(e + 5) : bits(NOT_A_NUMBER)};
}

// Rounds eight columns of a token to v = n 2^e; eight neighbouring lanes have a group, and get its e and the sum of its v.
__device__ __forceinline__ int round_eight(const float (&x)[8], float scale, float (&v)[8], float& sum) {
    float u[8];
    u32 size = 0;
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        u[k] = scale == 0.0f ? 0.0f : mul(x[k], scale);
        size = max(size, bits(u[k]) & 0x7fffffffu);
    }
#pragma unroll
    for (u32 step = 4; step > 0; step /= 2) size = max(size, __shfl_xor_sync(ALL, size, step));
    const int e = max(exponent(size) - 14, -20), least = (e + 127) << 23;
    sum = 0.0f;
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        // The distance of integers of 11 bits around u, at least 2^e, as the bits of a float; to it u is rounded by an addition.
        const int distance = max((int)(bits(u[k]) & 0x7f800000u) - (10 << 23), least);
        const float magic = bits((u32)(distance + (23 << 23)) | 0x400000u);
        v[k] = sub(add(u[k], magic), magic);
        sum = add(sum, v[k]);
    }
#pragma unroll
    for (u32 step = 4; step > 0; step /= 2) sum = add(sum, __shfl_xor_sync(ALL, sum, step));
    return e;
}

// d += a b: a [16, 16] f16, b [16, 8] f16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32* a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Sixteen 4-bit weights of row h of two (row and row + 8) as q 2^-20 in f16, in the fragments of four products of sixteen columns.
__device__ __forceinline__ void unpack_int11(uint2 w, u32 (&a)[16], u32 h) {
    const u32 Q = 0x00f000f0u;
    a[h] = w.x << 4 & Q;
    a[2 + h] = w.x & Q;
    a[4 + h] = w.x >> 4 & Q;
    a[6 + h] = w.x >> 8 & Q;
    a[8 + h] = w.y << 4 & Q;
    a[10 + h] = w.y & Q;
    a[12 + h] = w.y >> 4 & Q;
    a[14 + h] = w.y >> 8 & Q;
}

// Those of product `u` of four, of both rows.
__device__ __forceinline__ void unpack_int11_quarter(uint2 first, uint2 second, u32 u, u32 (&a)[4]) {
    const u32 Q = 0x00f000f0u, v = u < 2 ? first.x : first.y, w = u < 2 ? second.x : second.y;
    a[0] = (u % 2 ? v >> 4 : v << 4) & Q;
    a[1] = (u % 2 ? w >> 4 : w << 4) & Q;
    a[2] = (u % 2 ? v >> 8 : v) & Q;
    a[3] = (u % 2 ? w >> 8 : w) & Q;
}
