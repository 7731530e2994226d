// Weights and activations, as products of prompts by records take them (gemm/int11_records_wide.cu).
//
// Weights are records of 128 rows and 64 columns, those of the same rows side by side: integers as f16 in the order in which threads take them, [8 sets of 16 rows][4 products
// of 16 columns][32 lanes][4 words], behind them the scales of pieces, [pieces][128 rows], and their biases where they have them. Tokens are tiles as in format/int11.cuh,
// but with columns in their order, and behind each tile the sums of pieces, [pieces][128 tokens].
//
// Of a mixture records are made of one expert's matrix after the other, and tiles of tokens are those of its pairs (moe/pairs.cu).
#include "format/affine.cuh"
#include "format/block_integers.cuh"
#include "format/blocks.cuh"
#include "format/int11.cuh"
#include "gemm/int11_records.cuh"
#include "gemm/matmul.cuh"
#include "prim/pdl.cuh"

struct Records {
    Matmul parts[3];
    u8* to[3];
    // Whether products take weights in two slices.
    u32 sliced;
    // Of a mixture, the first expert of which records are made.
    u32 first;
};

// Numbers of a row, or the values that a table has for them, less the one that stands for 0, by pairs of neighbouring columns.
struct Pairs {
    u32 bits;
    u32 mask;
    bool looked_up;
    int zero;
    // A power of two.
    float unit;
    u32 values[4];

    __device__ __forceinline__ float value(u32 n) const {
        if (looked_up) {
            const u32 from = n & 8 ? __byte_perm(values[2], values[3], n & 7) : __byte_perm(values[0], values[1], n & 7);
            n = from & 0xff;
        }
        return mul((float)((int)n - zero), unit);
    }

    // Columns `i` and `i + 1` of a row, two f16.
    __device__ __forceinline__ u32 operator()(const u32* row, u32 i) const {
        const u32 bit = i * bits, word = bit / 32, shift = bit % 32;
        const u32 raw = __funnelshift_r(row[word], shift + 2 * bits > 32 ? row[word + 1] : 0, shift);
        return to_f16_pair(value(raw & mask), value(raw >> bits & mask));
    }
};

// A block makes a record, a warp a set; a lane has two rows.
template <bool AFFINE> __device__ __forceinline__ void make_record(const Records& p) {
    const Matmul& part = p.parts[blockIdx.y];
    begin();
    // An expert whose matrix has another format than this one is not on the device.
    const Matrix m = part.table ? part.table[p.first + blockIdx.z] : part.matrix;
    const u32 groups = part.cols / 64, tile = blockIdx.x / groups, g = blockIdx.x % groups, lane = threadIdx.x % WARP, set = threadIdx.x / WARP, row = lane / 4, t = lane % 4;
    const bool biased = AFFINE || is_biased(m.type);
    const u32 pieces = max(64 / m.group, 1), bytes = RECORD_INTEGERS + (biased ? 2 : 1) * pieces * RECORD_SCALES;
    if (tile * RECORD_ROWS >= part.rows || m.kind != part.matrix.kind) return;
    const u64 of_expert = (u64)((part.rows + RECORD_ROWS - 1) / RECORD_ROWS) * groups;
    u8* to = p.to[blockIdx.y] + (blockIdx.z * of_expert + blockIdx.x) * bytes;
    Pairs pair;
    pair.bits = m.bits, pair.mask = (1u << m.bits) - 1, pair.looked_up = !AFFINE && m.type >> 16, pair.zero = AFFINE ? 0 : (int)zero_of(m.type);
    // Integers that are sliced lie in the lowest bits.
    pair.unit = bits((127u - (p.sliced ? 24 : 20)) << 23);
#pragma unroll
    for (u32 i = 0; i < 4; i++) pair.values[i] = AFFINE ? 0 : values_of(m.type)[i];
    u32 w[4][2][2] = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 in_tile = set * 16 + row + 8 * h, r = tile * RECORD_ROWS + in_tile;
        float2 scale = make_float2(0.0f, 0.0f);
        if (r < part.rows) {
            const u64 own = part.in_matrix(r), at = own * m.row_bytes;
            const u32* numbers = (const u32*)(m.data + at);
#pragma unroll
            for (u32 s = 0; s < 4; s++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) w[s][e][h] = pair(numbers, g * 64 + 16 * s + 8 * e + 2 * t);
            if (AFFINE && t < pieces) {
                const u64 group = own * m.groups + (g * 64 + t * 32) / m.group;
                scale = make_float2(element(m.scales, m.type, group), element(m.biases, m.type, group));
            } else if (t < pieces) {
                scale = block_scale(code_of(m.scales + at, m.type, g * pieces + t), unit_of_column(m.biases + at, m.type, g * 64), m.type);
            }
        }
        if (t >= pieces) continue;
        float* scales = (float*)(to + RECORD_INTEGERS) + t * RECORD_ROWS + in_tile;
        scales[0] = scale.x;
        if (biased) scales[pieces * RECORD_ROWS] = scale.y;
    }
#pragma unroll
    for (u32 s = 0; s < 4; s++) ((uint4*)to)[(set * 4 + s) * WARP + lane] = make_uint4(w[s][0][0], w[s][0][1], w[s][1][0], w[s][1][1]);
}

extern "C" __global__ void __launch_bounds__(256) int11_records_blocks(const __grid_constant__ Records p) { make_record<false>(p); }
extern "C" __global__ void __launch_bounds__(256) int11_records_affine(const __grid_constant__ Records p) { make_record<true>(p); }

struct Arrange {
    Encoded x;
    u8* to;
    // Tiles of a mixture's pairs, and their order; null: tokens are taken as they come.
    const u32* tiles;
    const u32* order;
    u32 groups;
    // Columns of a piece.
    u32 piece;
    // Pairs of a token.
    u32 per_row;
    u32 unused;
};

// A block takes a tile, a thread sixteen columns of a token.
extern "C" __global__ void __launch_bounds__(512) int11_arrange(const Arrange p) {
    const u32 row = threadIdx.x / 4, j = threadIdx.x % 4;
    begin();
    u32 token = blockIdx.x / p.groups * TILE_ROWS + row;
    bool taken = true;
    if (p.tiles) {
        const u32 tile = blockIdx.x / p.groups;
        if (tile >= p.tiles[0]) return;
        const uint4 pairs = ((const uint4*)p.tiles)[1 + tile];
        taken = row < pairs.z;
        token = p.order[pairs.y + min(row, pairs.z - 1)] / p.per_row;
    }
    const u8* from = (const u8*)p.x.n + int11_row(token, blockIdx.x % p.groups, p.groups) + 4 * j;
    u8* to = p.to + (u64)blockIdx.x * (TOKEN_INTEGERS + TOKEN_SUMS);
    float sum = 0.0f;
#pragma unroll
    for (u32 a = 0; a < 2; a++) {
        u32 w[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            w[k] = *(const u32*)(from + (4 * a + k ^ token & 7) * 16);
            sum = add(sum, add(from_f16((u16)w[k]), from_f16((u16)(w[k] >> 16))));
        }
        const uint4 eight = make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
        if (taken) *(uint4*)(to + row * 128 + (2 * j + a ^ row & 7) * 16) = eight;
    }
    // Sums of integers below 2^20: exact.
    if (p.piece >= 32) sum = add(sum, __shfl_xor_sync(ALL, sum, 1));
    if (p.piece >= 64) sum = add(sum, __shfl_xor_sync(ALL, sum, 2));
    if (taken && 16 * j % p.piece == 0) ((float*)(to + TOKEN_INTEGERS))[16 * j / p.piece * RECORD_ROWS + row] = mul(sum, STEP);
}
