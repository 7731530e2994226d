// Values of bytes as tensor cores want them: across.
#pragma once
#include "attention/attention.cuh"
#include "prim/numerics.cuh"

// Turns a partition's values, rows of DIM bytes STRIDE apart, across, by THREADS threads: the word that `word_at(column, word)` points to gets a column of the four positions
// whose weights a thread of a warp that multiplies has in a word, 2q, 2q + 1, 8 + 2q and 9 + 2q of sixteen.
template <u32 DIM, u32 STRIDE, u32 THREADS, class Where> __device__ __forceinline__ void turn_across(const u8* values, const Where& word_at) {
    const u32 word = threadIdx.x % 8, from = word / 4 * 16 + word % 4 * 2, four = threadIdx.x / 8 % 4, rest = threadIdx.x % THREADS / WARP;
#pragma unroll 2
    for (u32 i = rest; i < PARTITION / 32 * DIM / 16; i += THREADS / WARP) {
        const u32 chunk = i % (PARTITION / 32), column = (i / (PARTITION / 32) * 4 + four) * 4;
        const u8* at = values + (chunk * 32 + from) * STRIDE + column;
        const u32 a = *(const u32*)at, b = *(const u32*)(at + STRIDE), c = *(const u32*)(at + 8 * STRIDE), d = *(const u32*)(at + 9 * STRIDE);
        const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140), ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
        *word_at(column, chunk * 8 + word) = __byte_perm(ab, cd, 0x5410);
        *word_at(column + 1, chunk * 8 + word) = __byte_perm(ab, cd, 0x7632);
        *word_at(column + 2, chunk * 8 + word) = __byte_perm(ab_high, cd_high, 0x5410);
        *word_at(column + 3, chunk * 8 + word) = __byte_perm(ab_high, cd_high, 0x7632);
    }
}
