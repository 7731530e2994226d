// What a block of gemm/mma.cuh brings to shared memory at once, and where it lies there.
#pragma once
#include "prim/numerics.cuh"

// What is brought at once, and how it lies in shared memory. Strides are such that what a warp reads together meets different banks.
//
// [stages] of packed rows and activations; [stages] of scales as they lie in memory, brought one stage ahead of these; twice, since one is written while the other
// is read, scales as floats in the order in which lanes take them. ALL: kilobytes that all of it may take.
template <class F, int OF, int EIGHTS, int BANDS, int ALL> struct MmaStage {
    static const u32 ROWS = 32 * BANDS, TOKENS = 8 * EIGHTS, THREADS = 128 * BANDS;
    // Groups of activations, and their columns.
    static const u32 PARTS = 4 * OF, COLUMNS = 32 * PARTS;
    // In bytes, as all that follows.
    static const u32 ROW = 4 * F::BITS * PARTS, ROW_STRIDE = ROW + 16, TOKEN_STRIDE = COLUMNS + 32;
    static const u32 A = ROWS * ROW_STRIDE, TILE = A + TOKENS * TOKEN_STRIDE;
    // Of each row the scales of four groups, as large as their type is, and all the biases behind them; room for these is followed by the scales of each token's
    // groups, and all the sums behind them.
    static const u32 S = 32 * ROWS, SX = 4 * PARTS * TOKENS, RAW = S + 2 * SX;
    // Of each chain: scale and bias of each row; of each pair of tokens the scales of the groups that a weight group joins, beside one another; of four tokens, two
    // of an eight and two of the next, the sums of the joined groups.
    static const u32 SCALES_AT = 8 * ROWS, SUMS_AT = SCALES_AT + 4 * OF * TOKENS, CHAIN = SUMS_AT + 4 * TOKENS + 64, FLOATS = 4 * CHAIN;
    // Large tiles: the warps of one chain bring a whole stage, each chain every fourth, so that what it takes to begin is paid once for four times the pieces.
    static const u32 TURNS = EIGHTS == 2 ? 1 : 4, BRINGERS = THREADS / TURNS;
    // What a thread brings of a stage, in pieces of sixteen bytes.
    static const u32 PIECES = ROW / 16, A_PIECES = ROWS * PIECES, A_COPIES = (A_PIECES + BRINGERS - 1) / BRINGERS;
    static const u32 B_PIECES = TOKENS * 2 * PARTS, B_COPIES = (B_PIECES + BRINGERS - 1) / BRINGERS;
    // Threads with scales of weights, and those with scales of activations: without turns others, behind them.
    static const u32 S_THREADS = TURNS == 1 ? 2 * ROWS : BRINGERS, X_FROM = TURNS == 1 ? S_THREADS : 0, X_THREADS = BRINGERS - X_FROM;
    static const u32 S_COPIES = 2 * ROWS / S_THREADS, X_PIECES = 2 * TOKENS * OF, X_COPIES = (X_PIECES + X_THREADS - 1) / X_THREADS;
    static const u32 UNFOLDED = (4 * TOKENS + X_THREADS - 1) / X_THREADS;
    // Words that each of those who bring keeps, in shared memory where registers are all taken: offsets of its pieces of rows and of activations, addresses of its
    // scales, where the first pieces go in a stage, and where what it makes of scales goes.
    static const u32 KEPT_B = (A_COPIES + 3) / 4 * 4, KEPT_S = KEPT_B + (B_COPIES + 3) / 4 * 4, KEPT_X = KEPT_S + (TURNS == 1 ? 0 : 2 * S_COPIES);
    static const u32 KEPT_TO = KEPT_X + 2 * X_COPIES, KEPT_S_TO = KEPT_TO + 1, KEPT_X_TO = KEPT_S_TO + (TURNS == 1 ? 0 : 1), WORDS = (KEPT_X_TO + 1 + 3) / 4 * 4;
    static const u32 KEPT = TURNS == 1 ? 0 : 4 * BRINGERS * WORDS;
    static const u32 FITTING = ((ALL << 10) - 2 * FLOATS - KEPT - 16) / (TILE + RAW), STAGES = FITTING < 2 ? 2 : FITTING < 4 ? FITTING : 4;
    static const u32 KEPT_AT = STAGES * (TILE + RAW) + 2 * FLOATS;
    // Where chains meet: [chain][token][row].
    static const u32 MEET_STRIDE = ROWS + 4;
};

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
