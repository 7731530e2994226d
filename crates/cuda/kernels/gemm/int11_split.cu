// Weights that are floats of sixteen bits, as the integers that products of prompts take (gemm/int11_floats_wide.cu).
//
// They are records of 128 rows and 64 columns, those of the same rows side by side: integers as f16 (format/block_integers.cuh) in the order in which threads take them,
// [8 sets of 16 rows][4 products of 16 columns][32 lanes][4 words], and behind them what sums of pieces are multiplied with, [2 pieces][128 rows].
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "gemm/int11_split.cuh"
#include "prim/pdl.cuh"

struct Split {
    Matmul parts[3];
    u8* to[3];
};

// A block makes a record, a warp a set; a lane takes eight columns of two rows at a time.
template <class F> __device__ __forceinline__ void split(const Split& p) {
    const Matmul& part = p.parts[blockIdx.y];
    const u32 groups = part.cols / 64, tile = blockIdx.x / groups, g = blockIdx.x % groups, lane = threadIdx.x % WARP, set = threadIdx.x / WARP, j = lane % 8 / 2, a = lane % 2;
    begin();
    if (tile * RECORD_ROWS >= part.rows) return;
    u8* to = p.to[blockIdx.y] + (u64)blockIdx.x * RECORD_BYTES;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 w[2][4];
        const u32 row = 4 * i + lane / 8;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 in_tile = set * 16 + row + 8 * h, r = tile * RECORD_ROWS + in_tile;
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (r < part.rows) eight = __ldcs((const uint4*)(part.matrix.data + part.in_matrix(r) * part.matrix.row_bytes + g * 128) + lane % 8);
            // Lanes of a piece are two and four apart.
            u32 most = F::greatest(eight);
            most = max(most, __shfl_xor_sync(ALL, most, 2));
            most = max(most, __shfl_xor_sync(ALL, most, 4));
            const Piece piece = F::piece(most);
            F::round(eight, piece.before, w[h]);
            if (j == 0) ((float*)(to + RECORD_UNITS))[a * RECORD_ROWS + in_tile] = piece.unit;
        }
#pragma unroll
        for (u32 u = 0; u < 2; u++) ((uint4*)to)[(set * 4 + 2 * a + u) * WARP + row * 4 + j] = make_uint4(w[0][2 * u], w[1][2 * u], w[0][2 * u + 1], w[1][2 * u + 1]);
    }
}

#define SPLIT(name, F) \
    extern "C" __global__ void __launch_bounds__(256) int11_split_##name(const __grid_constant__ Split p) { split<F>(p); }

INT11_FLOAT_FORMATS(SPLIT)
