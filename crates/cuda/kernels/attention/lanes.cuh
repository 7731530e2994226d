// Dot products of queries with a cached key, by one thread: sixteen lanes, as docs/numerics.md has them.
#pragma once
#include "attention/cache.cuh"
#include "prim/numerics.cuh"

// Sixteen elements, aligned to their size.
template <u32 TYPE> struct Sixteen {
    static const u32 WORDS = TYPE == F32 ? 4 : TYPE == INT8 ? 1 : 2;
    uint4 words[WORDS];

    __device__ __forceinline__ void load(const u8* row, u32 d) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) words[i] = ((const uint4*)(row + d * size_of(TYPE)))[i];
    }

    __device__ __forceinline__ float at(u32 i) const {
        const u32 per_word = 16 / WORDS, word = i / per_word, part = i % per_word / (per_word / 4);
        u32 four[4] = {words[word].x, words[word].y, words[word].z, words[word].w};
        if (TYPE == F32) return bits(four[part]);
        if (TYPE == INT8) return (float)(i8)(four[part] >> i % 4 * 8);
        u16 half = (u16)(four[part] >> i % 2 * 16);
        return TYPE == F16 ? from_f16(half) : from_bf16(half);
    }
};

// Elements of a query in shared memory: a multiple of sixteen, padded with zeros.
__device__ __forceinline__ u32 padded(u32 dim) { return (dim + 15) / 16 * 16; }

// `acc[i] = fma(q[i], k[i], acc[i])` over sixteen lanes, for G heads.
template <int G, class K> __device__ __forceinline__ void multiply_lanes(const float* q, u32 pad, const K& k, float (&acc)[G][16]) {
#pragma unroll
    for (int g = 0; g < G; g++) {
        const float4* row = (const float4*)(q + g * pad);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 x = row[i];
            acc[g][4 * i] = fma(x.x, k.at(4 * i), acc[g][4 * i]);
            acc[g][4 * i + 1] = fma(x.y, k.at(4 * i + 1), acc[g][4 * i + 1]);
            acc[g][4 * i + 2] = fma(x.z, k.at(4 * i + 2), acc[g][4 * i + 2]);
            acc[g][4 * i + 3] = fma(x.w, k.at(4 * i + 3), acc[g][4 * i + 3]);
        }
    }
}

// The lanes of the dot products of a key with G queries.
template <int G, u32 TYPE, u32 DEEP>
__device__ __forceinline__ void dot_lanes(const u8* key, u32 dim, const float* q, u32 pad, float (&acc)[G][16]) {
    if (dim % 16 == 0 && (u64)key % 16 == 0) {
        // Several loads are issued before the first is used.
        for (u32 from = 0; from < dim; from += 16 * DEEP) {
            Sixteen<TYPE> k[DEEP];
#pragma unroll
            for (u32 i = 0; i < DEEP; i++) {
                if (from + 16 * i < dim) k[i].load(key, from + 16 * i);
            }
#pragma unroll
            for (u32 i = 0; i < DEEP; i++) {
                if (from + 16 * i < dim) multiply_lanes<G>(q + from + 16 * i, pad, k[i], acc);
            }
        }
        return;
    }
    struct Loose {
        float v[16];
        __device__ __forceinline__ float at(u32 i) const { return v[i]; }
    };
    for (u32 d = 0; d < dim; d += 16) {
        Loose k;
#pragma unroll
        for (u32 i = 0; i < 16; i++) k.v[i] = d + i < dim ? cached(key, TYPE, d + i) : 0.0f;
        multiply_lanes<G>(q + d, pad, k, acc);
    }
}
