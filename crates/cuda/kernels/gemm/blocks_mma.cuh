// Products of integer groups of 32 or 16 columns for several tokens, on integer tensor cores, with weights in blocks. A block of 64 rows takes 128 columns at a time:
// its threads unpack weights to bytes, and scales to floats, into one half of shared memory while the other is multiplied. A warp has sixteen rows and all four
// chains of its sums in registers, where they meet.
#pragma once
#include "format/block_scales.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// A warp has 8 EIGHTS tokens, a block SIDES warps side by side for each sixteen rows.
template <class F, int EIGHTS, int SIDES> struct BlocksTile {
    static const u32 ROWS = 64, TOKENS = 8 * EIGHTS * SIDES, THREADS = 2 * ROWS * SIDES, PARTS = 4, GROUPS = PARTS * F::HALVES;
    // Rows of 128 bytes, whose neighbours meet different banks.
    static const u32 STRIDE = 128 + 16;
    static const u32 B = ROWS * STRIDE, SCALES = B + TOKENS * STRIDE, SX = SCALES + 8 * GROUPS * ROWS, M = SX + 4 * PARTS * TOKENS, STAGE = M + 4 * GROUPS * TOKENS;
    // What a thread brings: 32 columns of some rows, sixteen columns of some tokens.
    static const u32 A_EACH = ROWS * PARTS / THREADS, PIECES = TOKENS * 2 * PARTS, B_EACH = (PIECES + THREADS - 1) / THREADS;
};

template <class F, int EIGHTS, int SIDES> __device__ __forceinline__ void gemm_blocks(const Matmul& p) {
    typedef BlocksTile<F, EIGHTS, SIDES> G;
    const int HALVES = F::HALVES;
    u8* const memory = (u8*)smem;
    const u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, band = warp / SIDES, side = warp % SIDES, quad = lane / 4, j = lane % 4;
    const u32 parts = p.cols / 32, stages = (parts + G::PARTS - 1) / G::PARTS, first_row = blockIdx.x * G::ROWS;
    // Output rows of a tile, and their rows of x; what is not there is the last.
    __shared__ u32 outputs[G::TOKENS], inputs[G::TOKENS];
    if (first_row >= p.rows) {
        begin();
        return;
    }
    Matrix m = p.matrix;
    // 1. What is under way
    typename F::Wide words[G::A_EACH];
    u32 codes[G::A_EACH], unit[G::A_EACH];
    uint4 x[G::B_EACH];
    float sx[G::B_EACH], mx[G::B_EACH];
    auto load_weights = [&](u32 stage) {
#pragma unroll
        for (u32 k = 0; k < G::A_EACH; k++) {
            const u32 i = thread + k * G::THREADS, part = min(stage * G::PARTS + i % G::PARTS, parts - 1);
            const u64 row = p.in_matrix(min(first_row + i / G::PARTS, p.rows - 1)) * m.row_bytes;
            words[k].load(m.data + row + (u64)part * (4 * F::BITS), true);
            codes[k] = F::codes(m.scales + row, m.type, part);
            unit[k] = unit_of_column(m.biases + row, m.type, part * 32);
        }
    };
    auto load_inputs = [&](u32 stage) {
#pragma unroll
        for (u32 k = 0; k < G::B_EACH; k++) {
            const u32 i = thread + k * G::THREADS, piece = i % (2 * G::PARTS), part = min(stage * G::PARTS + piece / 2, parts - 1);
            if (G::PIECES % G::THREADS != 0 && i >= G::PIECES) continue;
            const u64 token = inputs[i / (2 * G::PARTS)];
            x[k] = *(const uint4*)(p.x.q + token * p.cols + part * 32 + piece % 2 * 16);
            sx[k] = p.x.sx[token * parts + part];
            if (HALVES == 1) mx[k] = p.x.mx[token * parts + part];
        }
    };
    auto store_weights = [&](u8* to) {
        const typename F::Values values(m.type);
#pragma unroll
        for (u32 k = 0; k < G::A_EACH; k++) {
            const u32 i = thread + k * G::THREADS, r = i / G::PARTS, part = i % G::PARTS;
            u32 q[8];
            F::unpack(words[k].words, q, values);
            uint4* own = (uint4*)(to + r * G::STRIDE + part * 32);
            own[0] = make_uint4(q[0], q[1], q[2], q[3]);
            own[1] = make_uint4(q[4], q[5], q[6], q[7]);
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) ((float2*)(to + G::SCALES))[(part * HALVES + h) * G::ROWS + r] = scale_and_bias<F>(F::code(codes[k], h), unit[k], m.type);
        }
    };
    auto store_inputs = [&](u8* to) {
#pragma unroll
        for (u32 k = 0; k < G::B_EACH; k++) {
            const u32 i = thread + k * G::THREADS, t = i / (2 * G::PARTS), piece = i % (2 * G::PARTS), part = piece / 2;
            if (G::PIECES % G::THREADS != 0 && i >= G::PIECES) continue;
            *(uint4*)(to + G::B + t * G::STRIDE + piece * 16) = x[k];
            if (piece % 2 == 0) ((float*)(to + G::SX))[part * G::TOKENS + t] = sx[k];
            float* means = (float*)(to + G::M);
            if (HALVES == 2) {
                const u32 ONES = 0x01010101u;
                const int sum = dp4a(ONES, x[k].x, dp4a(ONES, x[k].y, dp4a(ONES, x[k].z, dp4a(ONES, x[k].w, 0))));
                means[piece * G::TOKENS + t] = mul(sx[k], (float)sum);
            } else if (piece % 2 == 0) {
                means[part * G::TOKENS + t] = mx[k];
            }
        }
    };
    if (!p.tiles) load_weights(0);
    begin();
    const u32 tiles = p.tiles ? p.tiles[0] : (p.outputs + G::TOKENS - 1) / G::TOKENS;
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        u32 first = tile * G::TOKENS, count = min(G::TOKENS, p.outputs - first);
        if (p.tiles) {
            const uint4 own = ((const uint4*)p.tiles)[1 + tile];
            m = p.table[own.x];
            first = own.y;
            count = own.z;
            // Skips an expert that is not on the device.
            if (m.kind != KIND_OF<F>) continue;
        }
        __syncthreads();
        if (thread < G::TOKENS) {
            const u32 at = first + min(thread, count - 1);
            outputs[thread] = p.tiles ? p.order[at] : at;
            inputs[thread] = outputs[thread] / p.per_row;
        }
        if (p.tiles || tile != blockIdx.y) load_weights(0);
        __syncthreads();
        load_inputs(0);
        store_weights(memory);
        store_inputs(memory);
        __syncthreads();
        // 2. Sums: [chain][tokens of eight][element of the tile]
        float acc[4][EIGHTS][4];
#pragma unroll
        for (u32 i = 0; i < 16 * EIGHTS; i++) acc[i / (4 * EIGHTS)][i / 4 % EIGHTS][i % 4] = 0.0f;
#pragma unroll 1
        for (u32 stage = 0; stage < stages; stage++) {
            const u8* here = memory + stage % 2 * G::STAGE;
            if (stage + 1 < stages) {
                load_weights(stage + 1);
                load_inputs(stage + 1);
            }
#pragma unroll
            for (u32 part = 0; part < G::PARTS; part++) {
                if (stage * G::PARTS + part >= parts) break;
                u32 a[4];
                ldmatrix_x4(a, here + (band * 16 + lane % 16) * G::STRIDE + part * 32 + lane / 16 * 16);
                float2 of_row[HALVES][2];
#pragma unroll
                for (u32 h = 0; h < HALVES; h++) {
                    const float2* scales = (const float2*)(here + G::SCALES) + (part * HALVES + h) * G::ROWS + band * 16 + quad;
                    of_row[h][0] = scales[0], of_row[h][1] = scales[8];
                }
#pragma unroll
                for (u32 two = 0; two < EIGHTS; two += 2) {
                    // Of two times eight tokens the first and the last sixteen bytes.
                    u32 b[4];
                    const u32 token = (side * EIGHTS + two) * 8;
                    ldmatrix_x4(b, here + G::B + (token + lane / 16 * 8 + lane % 8) * G::STRIDE + part * 32 + lane / 8 % 2 * 16);
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        const u32 at = token + 8 * n + 2 * j;
                        const float2 scale = *(const float2*)((const float*)(here + G::SX) + part * G::TOKENS + at);
                        u32 d[HALVES][4];
                        if (HALVES == 1) {
                            mma_u8_i8(d[0], a, b[2 * n], b[2 * n + 1]);
                        } else {
                            mma_u8_i8_16(d[0], a[0], a[1], b[2 * n]);
                            mma_u8_i8_16(d[HALVES - 1], a[2], a[3], b[2 * n + 1]);
                        }
#pragma unroll
                        for (u32 h = 0; h < HALVES; h++) {
                            const u32 group = part * HALVES + h;
                            const float2 mean = *(const float2*)((const float*)(here + G::M) + group * G::TOKENS + at);
#pragma unroll
                            for (u32 e = 0; e < 4; e++) {
                                const float t = mul(e % 2 ? scale.y : scale.x, sub(bits(d[h][e]), MAGIC_FLOAT));
                                float& sum = acc[group % 4][two + n][e];
                                sum = fma(of_row[h][e / 2].y, e % 2 ? mean.y : mean.x, fma(of_row[h][e / 2].x, t, sum));
                            }
                        }
                    }
                }
            }
            if (stage + 1 < stages) {
                u8* next = memory + (stage + 1) % 2 * G::STAGE;
                store_weights(next);
                store_inputs(next);
            }
            __syncthreads();
        }
        // 3. Chains meet.
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const float y = add(add(acc[0][n][e], acc[2][n][e]), add(acc[1][n][e], acc[3][n][e]));
                const u32 t = (side * EIGHTS + n) * 8 + 2 * j + e % 2, r = first_row + band * 16 + quad + e / 2 * 8;
                if (t < count && r < p.rows) put(p, outputs[t], r, y);
            }
        }
    }
}
