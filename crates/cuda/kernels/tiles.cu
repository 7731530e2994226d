// Products of integer groups for many tokens, on integer tensor cores: a warp takes 32 rows and 16 tokens, a block 64 rows and 64 tokens, or 256 rows and 16 tokens
// where few share a matrix. The integer sum of each
// group of activations is a product of its own (m16n8k32), exact in any order; what follows it is the sequence of fmas that docs/numerics.md gives.
//
// Columns inside a group meet in the order in which they are packed: a lane of a row takes eight neighbouring ones, even columns before odd ones, which is how
// activations lie.
#pragma once
#include "matmul.cu"

static const u32 TILE_THREADS = 256, TILE_WARPS = TILE_THREADS / WARP;
// An integer sum of less than 2^22 added to these bits is the float 2^23 + 2^22 and that sum.
static const u32 MAGIC = 0x4b400000u;
static const float MAGIC_FLOAT = 12582912.0f;

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
#endif
}

__device__ __forceinline__ void copy_words_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#endif
}

template <int N> __device__ __forceinline__ void copied_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Bytes of shared memory: STAGES times packed rows, activations, and their scales.
template <int BITS, int OF, int ROW_WARPS> struct Stage {
    static const u32 ROWS = 32 * ROW_WARPS, TOKENS = 16 * (TILE_WARPS / ROW_WARPS);
    static const u32 PARTS = 4 * OF, COLUMNS = 32 * PARTS;
    static const u32 ROW = 4 * BITS * PARTS, ROW_STRIDE = ROW + 16;
    // So that four neighbouring tokens meet different banks.
    static const u32 TOKEN_STRIDE = COLUMNS + 32;
    static const u32 A = ROWS * ROW_STRIDE, B = TOKENS * TOKEN_STRIDE;
    // [PARTS][tokens] scales of activations and their sums, [4][rows] scale and bias of the weights' groups.
    static const u32 SX = PARTS * TOKENS * 4, S = 4 * ROWS * 8;
    static const u32 BYTES = A + B + 2 * SX + S;
    static const u32 STAGES = 2;
};

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

template <int BITS, int OF, int ROW_WARPS> __device__ __forceinline__ void tile_sums(const Matmul& p) {
    typedef Stage<BITS, OF, ROW_WARPS> G;
    const u32 TILE_ROWS = G::ROWS, TILE_TOKENS = G::TOKENS, PASSES = TILE_ROWS / 64;
    u8* memory = (u8*)room;
    u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    u32 parts = p.cols / 32, groups = parts / OF, stages = (groups + 3) / 4;
    u32 first_row = blockIdx.x * TILE_ROWS;
    // Output rows of a tile, and their rows of x; what is not there is the last.
    __shared__ u32 outputs[TILE_TOKENS], inputs[TILE_TOKENS];
    if (first_row >= p.rows) return;
    const u32 tiles = p.tiles ? p.tiles[0] : (p.outputs + TILE_TOKENS - 1) / TILE_TOKENS;
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        Matrix m = p.matrix;
        u32 first = tile * TILE_TOKENS, count = min(TILE_TOKENS, p.outputs - first);
        if (p.tiles) {
            uint4 own = ((const uint4*)p.tiles)[1 + tile];
            m = p.table[own.x];
            first = own.y;
            count = own.z;
            // Of an expert that is not there.
            if (m.kind != INTEGERS + (BITS == 8 ? 5 : BITS - 2)) continue;
        }
        __syncthreads();
        if (thread < TILE_TOKENS) {
            u32 at = first + min(thread, count - 1);
            outputs[thread] = p.tiles ? p.order[at] : at;
            inputs[thread] = outputs[thread] / p.per_row;
        }
        __syncthreads();
        // 1. What is brought in: rows that are not there are the last.
        auto bring = [&](u32 stage, u8* to) {
            u32 from_part = stage * G::PARTS, here = min(G::PARTS, parts - from_part);
            const u32 PIECE = BITS % 4 == 0 ? 16 : 4, per_row = G::ROW / PIECE;
            for (u32 i = thread; i < TILE_ROWS * per_row; i += TILE_THREADS) {
                u32 r = i / per_row, piece = i % per_row;
                u64 row = p.in_matrix(min(first_row + r, p.rows - 1));
                if (piece * PIECE >= here * 4 * BITS) continue;
                const u8* from = m.data + row * m.row_bytes + from_part * 4 * BITS + piece * PIECE;
                u8* at = to + r * G::ROW_STRIDE + piece * PIECE;
                if (PIECE == 16) copy_words_later(at, from);
                else copy_word_later(at, from);
            }
            u8* b = to + G::A;
            const u32 per_token = G::COLUMNS / 16;
            for (u32 i = thread; i < TILE_TOKENS * per_token; i += TILE_THREADS) {
                u32 t = i / per_token, piece = i % per_token;
                if (piece * 16 >= here * 32) continue;
                u64 row = inputs[t];
                copy_words_later(b + t * G::TOKEN_STRIDE + piece * 16, p.x.q + row * p.cols + from_part * 32 + piece * 16);
            }
            float *sx = (float*)(b + G::B), *mx = (float*)(b + G::B + G::SX);
            for (u32 i = thread; i < TILE_TOKENS * G::PARTS; i += TILE_THREADS) {
                u32 t = i / G::PARTS, part = i % G::PARTS;
                u64 at = (u64)inputs[t] * parts + from_part + part;
                if (part >= here) continue;
                copy_word_later(sx + part * TILE_TOKENS + t, p.x.sx + at);
                copy_word_later(mx + part * TILE_TOKENS + t, p.x.mx + at);
            }
            copies_end();
        };
        // A thread has scale and bias of a group of some rows, on their way to shared memory.
        float2 scale_and_bias[PASSES];
        auto look_up = [&](u32 stage) {
            u32 group = stage * 4 + thread % 4;
            bool there = group < groups;
#pragma unroll
            for (u32 i = 0; i < PASSES; i++) {
                u64 at = p.in_matrix(min(first_row + 64 * i + thread / 4, p.rows - 1)) * groups + group;
                scale_and_bias[i] = make_float2(there ? element(m.scales, m.type, at) : 0.0f, there ? element(m.biases, m.type, at) : 0.0f);
            }
        };
        auto leave = [&](u8* to) {
#pragma unroll
            for (u32 i = 0; i < PASSES; i++) ((float2*)(to + G::A + G::B + 2 * G::SX))[thread % 4 * TILE_ROWS + 64 * i + thread / 4] = scale_and_bias[i];
        };
        // 2. Sums: [rows of sixteen][tokens of eight][chain][element of the tile]
        float acc[2][2][4][4];
#pragma unroll
        for (int i = 0; i < 64; i++) acc[i / 32][i / 16 % 2][i / 4 % 4][i % 4] = 0.0f;
        u32 row_in_tile = warp % ROW_WARPS * 32 + lane / 4, token_in_tile = warp / ROW_WARPS * 16, j = lane % 4;
        bring(0, memory);
        look_up(0);
        leave(memory);
        for (u32 stage = 0; stage < stages; stage++) {
            const u8* here = memory + stage % G::STAGES * G::BYTES;
            u8* next = memory + (stage + 1) % G::STAGES * G::BYTES;
            if (stage + 1 < stages) {
                bring(stage + 1, next);
                look_up(stage + 1);
                copied_but<1>();
            } else {
                copied_but<0>();
            }
            __syncthreads();
            const u8* b = here + G::A;
            const float *sx = (const float*)(b + G::B), *mx = (const float*)(b + G::B + G::SX);
            const float2* scales = (const float2*)(b + G::B + 2 * G::SX);
#pragma unroll
            for (u32 g = 0; g < 4; g++) {
                if (stage * 4 + g >= groups) break;
                float joined[2][2][4];
#pragma unroll
                for (u32 part = 0; part < OF; part++) {
                    u32 at = g * OF + part, a[2][4];
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        const u8* row = here + (row_in_tile + 16 * i) * G::ROW_STRIDE + at * 4 * BITS;
                        eight<BITS>(row, j, a[i][0], a[i][2]);
                        eight<BITS>(row + 8 * G::ROW_STRIDE, j, a[i][1], a[i][3]);
                    }
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        uint2 q = *(const uint2*)(b + (token_in_tile + 8 * n + lane / 4) * G::TOKEN_STRIDE + at * 32 + j * 8);
                        float2 scale = *(const float2*)(sx + at * TILE_TOKENS + token_in_tile + 8 * n + 2 * j);
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            u32 d[4];
                            multiply_tile(d, a[i], q.x, q.y);
#pragma unroll
                            for (u32 e = 0; e < 4; e++) {
                                float sum = sub(bits(d[e]), MAGIC_FLOAT), s = e % 2 ? scale.y : scale.x;
                                joined[i][n][e] = part == 0 ? mul(s, sum) : fma(s, sum, joined[i][n][e]);
                            }
                        }
                    }
                }
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float2 upper = scales[g * TILE_ROWS + row_in_tile + 16 * i], lower = scales[g * TILE_ROWS + row_in_tile + 16 * i + 8];
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        const float* of_token = mx + g * OF * TILE_TOKENS + token_in_tile + 8 * n + 2 * j;
                        float2 mean = *(const float2*)of_token;
#pragma unroll
                        for (u32 part = 1; part < OF; part++) {
                            float2 more = *(const float2*)(of_token + part * TILE_TOKENS);
                            mean = make_float2(add(mean.x, more.x), add(mean.y, more.y));
                        }
#pragma unroll
                        for (u32 e = 0; e < 4; e++) {
                            float2 weight = e < 2 ? upper : lower;
                            float y = fma(weight.x, joined[i][n][e], acc[i][n][g][e]);
                            acc[i][n][g][e] = fma(weight.y, e % 2 ? mean.y : mean.x, y);
                        }
                    }
                }
            }
            if (stage + 1 < stages) leave(next);
            __syncthreads();
        }
        // 3. Chains meet
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    float y = add(add(acc[i][n][0][e], acc[i][n][2][e]), add(acc[i][n][1][e], acc[i][n][3][e]));
                    u32 r = first_row + row_in_tile + 16 * i + e / 2 * 8, t = token_in_tile + 8 * n + 2 * j + e % 2;
                    if (r < p.rows && t < count) put(p, outputs[t], r, y);
                }
            }
        }
    }
}

#define TILES(bits, of)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 2) tiles_##bits##_##of(const __grid_constant__ Products p) {              \
        begin();                                                                                                             \
        tile_sums<bits, of, 2>(p.parts[blockIdx.z]);                                                                         \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 2) tiles_wide_##bits##_##of(const __grid_constant__ Products p) {         \
        begin();                                                                                                             \
        tile_sums<bits, of, 8>(p.parts[blockIdx.z]);                                                                         \
    }

#define ALL_TILES(bits) TILES(bits, 1) TILES(bits, 2) TILES(bits, 4)

ALL_TILES(2)
ALL_TILES(3)
ALL_TILES(4)
ALL_TILES(5)
ALL_TILES(6)
ALL_TILES(8)
