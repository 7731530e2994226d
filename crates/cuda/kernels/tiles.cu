// Products of integer groups for several tokens, on integer tensor cores: a block has 64 rows and 32 tokens, or 16 where there are few; a warp has one of the
// four chains of 32 rows. The integer sum of each group of activations is a product of its own (m16n8k32), exact in any order; what follows it is the sequence of
// fmas that docs/numerics.md gives.
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

__device__ __forceinline__ void copy_two_words_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
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

// What is brought at once, and how it lies in shared memory: packed rows, activations, their scales and sums, scales and biases of the weights' groups. Strides
// are such that what a warp reads together meets different banks.
template <int BITS, int OF, int EIGHTS> struct Stage {
    static const u32 ROWS = 64, TOKENS = 8 * EIGHTS;
    // Groups of activations, and their columns.
    static const u32 PARTS = 4 * OF, COLUMNS = 32 * PARTS;
    static const u32 ROW = 4 * BITS * PARTS, ROW_STRIDE = ROW + 16;
    static const u32 TOKEN_STRIDE = COLUMNS + 32;
    // In bytes, as the next.
    static const u32 SCALES_STRIDE = 4 * (OF == 1 ? 4 : PARTS + 4);
    // Of each row the scales of four groups as they lie, and then the biases.
    static const u32 S_STRIDE = 16;
    static const u32 A = ROWS * ROW_STRIDE, B = TOKENS * TOKEN_STRIDE, SX = TOKENS * SCALES_STRIDE, S = ROWS * S_STRIDE;
    static const u32 BYTES = A + B + 2 * SX + 2 * S;
    // As many as let blocks share a multiprocessor: two, or three where there are few tokens.
    static const u32 BLOCKS = EIGHTS == 2 ? 3 : 2, FITTING = (EIGHTS == 2 ? 72 << 10 : 96 << 10) / BYTES;
    static const u32 STAGES = FITTING < 2 ? 2 : FITTING < 4 ? FITTING : 4;
    // Where chains meet: [chain][token][row].
    static const u32 MEET_STRIDE = ROWS + 4;
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

template <int BITS, int OF, int EIGHTS> __device__ __forceinline__ void tile_sums(const Matmul& p) {
    typedef Stage<BITS, OF, EIGHTS> G;
    u8* memory = (u8*)room;
    const u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const u32 parts = p.cols / 32, groups = parts / OF, stages = (groups + 3) / 4, first_row = blockIdx.x * G::ROWS;
    // Output rows of a tile, and their rows of x; what is not there is the last.
    __shared__ u32 outputs[G::TOKENS], inputs[G::TOKENS];
    if (first_row >= p.rows) {
        begin();
        return;
    }

    // 1. What is brought in: rows that are not there are the last. Where all of it lies in whole sixteens of bytes, each thread has places of its own in every
    // stage.
    const u32 PIECES = G::ROW / 16, A_PIECES = G::ROWS * PIECES, A_COPIES = (A_PIECES + TILE_THREADS - 1) / TILE_THREADS;
    const u32 B_PIECES = G::TOKENS * 2 * G::PARTS, B_COPIES = (B_PIECES + TILE_THREADS - 1) / TILE_THREADS;
    // Threads with scales of weights, and then those with scales of activations.
    const u32 S_THREADS = 2 * G::ROWS, X_THREADS = 2 * G::TOKENS * OF;
    const bool BOTH = X_THREADS > TILE_THREADS - S_THREADS;
    const u32 x_thread = thread - S_THREADS, x_token = x_thread / OF % G::TOKENS, x_sums = BOTH ? 0 : x_thread / (OF * G::TOKENS), x_piece = x_thread % OF;
    const bool has_scales = thread < S_THREADS, has_x = !has_scales && x_thread < X_THREADS;
    Matrix m = p.matrix;
    bool regular = false;
    const u8 *from_a[A_COPIES], *from_b[B_COPIES], *from_scales = 0;
    u32 scales_step = 0;
    auto a_piece = [&](u32 k) { return thread + k * TILE_THREADS; };
    auto find_weights = [&]() {
        regular = parts % 4 == 0 && groups % 4 == 0 && (((u64)m.data | (u64)m.scales | (u64)m.biases) & 15) == 0;
#pragma unroll
        for (u32 k = 0; k < A_COPIES; k++) {
            u64 row = p.in_matrix(min(first_row + a_piece(k) / PIECES % G::ROWS, p.rows - 1));
            from_a[k] = m.data + row * m.row_bytes + a_piece(k) % PIECES * 16;
        }
        if (has_scales) {
            u64 row = p.in_matrix(min(first_row + thread % G::ROWS, p.rows - 1));
            scales_step = m.type == F32 ? 16 : 8;
            from_scales = (thread < G::ROWS ? m.scales : m.biases) + row * groups / 4 * scales_step;
        }
    };
    auto find_inputs = [&]() {
#pragma unroll
        for (u32 k = 0; k < B_COPIES; k++) {
            u32 i = thread + k * TILE_THREADS;
            from_b[k] = (const u8*)p.x.q + (u64)inputs[i / (2 * G::PARTS) % G::TOKENS] * p.cols + i % (2 * G::PARTS) * 16;
        }
        if (has_x) {
            from_scales = (const u8*)((x_sums ? p.x.mx : p.x.sx) + (u64)inputs[x_token] * parts + x_piece * 4);
            scales_step = 4 * G::PARTS;
        }
    };
    // What is not regular, and what is less than a whole stage.
    auto bring_weights_slowly = [&](u32 stage, u8* to) {
        u32 here = min(parts - stage * G::PARTS, G::PARTS);
        const u32 PIECE = BITS % 4 == 0 ? 16 : 4, PER_ROW = G::ROW / PIECE;
#pragma unroll 1
        for (u32 i = thread; i < G::ROWS * PER_ROW; i += TILE_THREADS) {
            u32 r = i / PER_ROW, piece = i % PER_ROW;
            if (piece * PIECE >= here * 4 * BITS) continue;
            u64 row = p.in_matrix(min(first_row + r, p.rows - 1));
            const u8* from = m.data + row * m.row_bytes + stage * G::ROW + piece * PIECE;
            u8* at = to + r * G::ROW_STRIDE + piece * PIECE;
            if (PIECE == 16) copy_words_later(at, from);
            else copy_word_later(at, from);
        }
        if (!has_scales) return;
        u8* at = to + G::A + G::B + 2 * G::SX + thread * G::S_STRIDE;
        u64 first = p.in_matrix(min(first_row + thread % G::ROWS, p.rows - 1)) * groups + stage * 4;
        const u8* from = thread < G::ROWS ? m.scales : m.biases;
#pragma unroll 1
        for (u32 g = 0; g < 4 && stage * 4 + g < groups; g++) {
            if (m.type == F32) ((u32*)at)[g] = ((const u32*)from)[first + g];
            else ((u16*)at)[g] = ((const u16*)from)[first + g];
        }
    };
    auto bring_inputs_slowly = [&](u32 stage, u8* to) {
        u32 here = min(parts - stage * G::PARTS, G::PARTS);
#pragma unroll 1
        for (u32 i = thread; i < B_PIECES; i += TILE_THREADS) {
            u32 t = i / (2 * G::PARTS), piece = i % (2 * G::PARTS);
            const i8* from = p.x.q + (u64)inputs[t] * p.cols + stage * G::COLUMNS + piece * 16;
            if (piece < here * 2) copy_words_later(to + G::A + t * G::TOKEN_STRIDE + piece * 16, from);
        }
#pragma unroll 1
        for (u32 i = thread; i < G::TOKENS * G::PARTS; i += TILE_THREADS) {
            u32 t = i / G::PARTS, part = i % G::PARTS;
            u64 at = (u64)inputs[t] * parts + stage * G::PARTS + part;
            u8* own = to + G::A + G::B + t * G::SCALES_STRIDE + part * 4;
            if (part >= here) continue;
            copy_word_later(own, p.x.sx + at);
            copy_word_later(own + G::SX, p.x.mx + at);
        }
    };
    auto whole = [&](u32 stage) { return regular && (stage + 1) * G::PARTS <= parts; };
    auto bring_weights = [&](u32 stage, u8* to) {
        if (!whole(stage)) return bring_weights_slowly(stage, to);
#pragma unroll
        for (u32 k = 0; k < A_COPIES; k++) {
            if (A_PIECES % TILE_THREADS == 0 || a_piece(k) < A_PIECES) copy_words_later(to + a_piece(k) / PIECES * G::ROW_STRIDE + a_piece(k) % PIECES * 16, from_a[k]);
            from_a[k] += G::ROW;
        }
        if (has_scales) {
            u8* at = to + G::A + G::B + 2 * G::SX + thread * G::S_STRIDE;
            if (m.type == F32) copy_words_later(at, from_scales);
            else copy_two_words_later(at, from_scales);
            from_scales += scales_step;
        }
    };
    auto bring_inputs = [&](u32 stage, u8* to) {
        if (!whole(stage)) return bring_inputs_slowly(stage, to);
#pragma unroll
        for (u32 k = 0; k < B_COPIES; k++) {
            u32 i = thread + k * TILE_THREADS;
            if (B_PIECES % TILE_THREADS == 0 || i < B_PIECES) copy_words_later(to + G::A + i / (2 * G::PARTS) * G::TOKEN_STRIDE + i % (2 * G::PARTS) * 16, from_b[k]);
            from_b[k] += G::COLUMNS;
        }
        if (has_x) {
            u8* at = to + G::A + G::B + x_sums * G::SX + x_token * G::SCALES_STRIDE + x_piece * 16;
            copy_words_later(at, from_scales);
            if (BOTH) copy_words_later(at + G::SX, from_scales + ((const u8*)p.x.mx - (const u8*)p.x.sx));
            from_scales += scales_step;
        }
    };

    // 2. One matrix for all tokens: its first rows are under way before what they meet is there
    const u32 AHEAD = G::STAGES - 1;
    if (!p.tiles) {
        find_weights();
        for (u32 stage = 0; stage < min(AHEAD, stages); stage++) bring_weights(stage, memory + stage * G::BYTES);
    }
    begin();
    const u32 tiles = p.tiles ? p.tiles[0] : (p.outputs + G::TOKENS - 1) / G::TOKENS;
    const u32 row_in_tile = warp % 2 * 32 + lane / 4, chain = warp / 2, j = lane % 4;
    u32 slot = 0;
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        u32 first = tile * G::TOKENS, count = min(G::TOKENS, p.outputs - first);
        if (p.tiles) {
            uint4 own = ((const uint4*)p.tiles)[1 + tile];
            m = p.table[own.x];
            first = own.y;
            count = own.z;
            // Of an expert that is not there.
            if (m.kind != INTEGERS + (BITS == 8 ? 5 : BITS - 2)) continue;
        }
        const u32 eights = (count + 7) / 8;
        __syncthreads();
        if (thread < G::TOKENS) {
            u32 at = first + min(thread, count - 1);
            outputs[thread] = p.tiles ? p.order[at] : at;
            inputs[thread] = outputs[thread] / p.per_row;
        }
        bool early = !p.tiles && tile == blockIdx.y;
        if (!early) find_weights();
        __syncthreads();
        find_inputs();
        for (u32 stage = 0, to = slot; stage < AHEAD; stage++, to = to + 1 == G::STAGES ? 0 : to + 1) {
            if (stage < stages) {
                if (!early) bring_weights(stage, memory + to * G::BYTES);
                bring_inputs(stage, memory + to * G::BYTES);
            }
            copies_end();
        }

        // 3. Sums: [rows of sixteen][tokens of eight][element of the tile]
        float acc[2][EIGHTS][4];
#pragma unroll
        for (u32 i = 0; i < 8 * EIGHTS; i++) acc[i / (4 * EIGHTS)][i / 4 % EIGHTS][i % 4] = 0.0f;
        for (u32 stage = 0; stage < stages; stage++) {
            const u8* here = memory + slot * G::BYTES;
            copied_but<G::STAGES - 2>();
            // What this stage needs is there, and nobody reads any more what the one before it needed.
            __syncthreads();
            if (stage + AHEAD < stages) {
                u8* to = memory + (slot == 0 ? AHEAD : slot - 1) * G::BYTES;
                bring_weights(stage + AHEAD, to);
                bring_inputs(stage + AHEAD, to);
            }
            copies_end();
            slot = slot + 1 == G::STAGES ? 0 : slot + 1;
            if (stage * 4 + chain >= groups) continue;
            const u8* b = here + G::A + chain * OF * 32 + j * 8 + lane / 4 * G::TOKEN_STRIDE;
            const u8* sx = here + G::A + G::B + 2 * j * G::SCALES_STRIDE + chain * OF * 4;
            const u8* rows = here + row_in_tile * G::ROW_STRIDE + chain * OF * 4 * BITS;
            const u8* scales = here + G::A + G::B + 2 * G::SX + row_in_tile * G::S_STRIDE + chain * (m.type == F32 ? 4 : 2);
            u32 a[OF][2][4];
#pragma unroll
            for (u32 part = 0; part < OF; part++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u8* row = rows + 16 * i * G::ROW_STRIDE + part * 4 * BITS;
                    eight<BITS>(row, j, a[part][i][0], a[part][i][2]);
                    eight<BITS>(row + 8 * G::ROW_STRIDE, j, a[part][i][1], a[part][i][3]);
                }
            }
            // Scale and bias of the rows lane / 4 and on, eight apart.
            float scale[4], bias[4];
            if (m.type == F32) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    scale[i] = *(const float*)(scales + 8 * i * G::S_STRIDE);
                    bias[i] = *(const float*)(scales + 8 * i * G::S_STRIDE + G::S);
                }
            } else {
                const bool is_bf16 = m.type == BF16;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u16 s = *(const u16*)(scales + 8 * i * G::S_STRIDE), b = *(const u16*)(scales + 8 * i * G::S_STRIDE + G::S);
                    float s_half = from_f16(s), b_half = from_f16(b);
                    scale[i] = is_bf16 ? from_bf16(s) : s_half;
                    bias[i] = is_bf16 ? from_bf16(b) : b_half;
                }
            }
#pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) {
                if (n >= eights) break;
                float of[2][OF], mean[2];
#pragma unroll
                for (u32 t = 0; t < 2; t++) {
                    joined_scales<OF>((const float*)(sx + (8 * n + t) * G::SCALES_STRIDE + G::SX), of[t]);
                    mean[t] = of[t][0];
#pragma unroll
                    for (u32 part = 1; part < OF; part++) mean[t] = add(mean[t], of[t][part]);
                    joined_scales<OF>((const float*)(sx + (8 * n + t) * G::SCALES_STRIDE), of[t]);
                }
                float joined[2][4];
#pragma unroll
                for (u32 part = 0; part < OF; part++) {
                    uint2 q = *(const uint2*)(b + 8 * n * G::TOKEN_STRIDE + part * 32);
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        u32 d[4];
                        multiply_tile(d, a[part][i], q.x, q.y);
#pragma unroll
                        for (u32 e = 0; e < 4; e++) {
                            float sum = sub(bits(d[e]), MAGIC_FLOAT);
                            joined[i][e] = part == 0 ? mul(of[e % 2][part], sum) : fma(of[e % 2][part], sum, joined[i][e]);
                        }
                    }
                }
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    u32 e = i % 4, r = i / 4 * 2 + e / 2;
                    float y = fma(scale[r], joined[i / 4][e], acc[i / 4][n][e]);
                    acc[i / 4][n][e] = fma(bias[r], mean[e % 2], y);
                }
            }
        }

        // 4. Chains meet
        float* meet = (float*)memory;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 8 * EIGHTS; i++) {
            u32 e = i % 4, n = i / 4 % EIGHTS, r = row_in_tile + i / (4 * EIGHTS) * 16 + e / 2 * 8, t = 8 * n + 2 * j + e % 2;
            meet[(chain * G::TOKENS + t) * G::MEET_STRIDE + r] = acc[i / (4 * EIGHTS)][n][e];
        }
        __syncthreads();
        const u32 FAR = G::TOKENS * G::MEET_STRIDE;
        for (u32 i = thread; i < G::ROWS * count; i += TILE_THREADS) {
            const float* chains = meet + i / G::ROWS * G::MEET_STRIDE + i % G::ROWS;
            float y = add(add(chains[0], chains[2 * FAR]), add(chains[FAR], chains[3 * FAR]));
            u32 r = first_row + i % G::ROWS;
            if (r < p.rows) put(p, outputs[i / G::ROWS], r, y);
        }
    }
}

#define TILES(bits, of)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2) tiles_##bits##_##of(const __grid_constant__ Products p) {         \
        tile_sums<bits, of, 4>(p.parts[blockIdx.z]);                                                                       \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 3) tiles_few_##bits##_##of(const __grid_constant__ Products p) {     \
        tile_sums<bits, of, 2>(p.parts[blockIdx.z]);                                                                       \
    }

#define ALL_TILES(bits) TILES(bits, 1) TILES(bits, 2) TILES(bits, 4)

ALL_TILES(2)
ALL_TILES(3)
ALL_TILES(4)
ALL_TILES(5)
ALL_TILES(6)
ALL_TILES(8)
