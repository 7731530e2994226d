// Products of integer groups of 64 for up to some tens of tokens, on integer tensor cores, by sets of sixteen rows, be they of one matrix or of several. Four warps
// have a set, one of its four chains each. A block has some sets side by side and takes others in turn, so that all blocks of a launch are on the device at once. What
// it multiplies comes through a ring in shared memory, a chunk of columns at a time, without a pause from turn to turn; the first weights come before the wait.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

enum : u32 { SET_ROWS = 16, SET_THREADS = 128 };

// How a chunk lies in the ring. Of each set: its rows, and of each row its scales, then of each its biases. Of the tokens, behind all sets: their columns, their scales, and
// their sums. Strides are such that what a warp reads together meets different banks.
template <class F, int EIGHTS, int CHUNK> struct SetsChunk {
    enum : u32 {
        GROUPS = CHUNK / 64,
        STEPS = GROUPS / 4,
        TOKENS = 8 * EIGHTS,
        ROW_BYTES = CHUNK / 8 * F::BITS,
        ROW = ROW_BYTES + (F::BITS == 4 ? 16 : 32),
        SCALE_ROW = 2 * GROUPS,
        SCALES_AT = SET_ROWS * ROW,
        SET = SCALES_AT + 2 * SET_ROWS * SCALE_ROW,
        TOKEN = CHUNK + 32,
        OF_TOKEN = 8 * GROUPS + 16,
        SX_AT = TOKENS * TOKEN,
        MX_AT = SX_AT + TOKENS * OF_TOKEN,
        ALL_TOKENS = MX_AT + TOKENS * OF_TOKEN,
    };
};

__device__ __forceinline__ u32 sets_of(const Matmul& m) { return (m.rows + SET_ROWS - 1) / SET_ROWS; }

template <class F, int EIGHTS, int CHUNK, int STAGES, u32 TYPE> __device__ __forceinline__ void gemm_sets(const Products& all) {
    typedef SetsChunk<F, EIGHTS, CHUNK> Chunk;
    const u32 TOKENS = Chunk::TOKENS;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, sets = warps / 4, chain = warp % 4, quad = lane / 4, part = lane % 4;
    const u32 cols = all.parts[0].cols, groups = cols / 64, chunks = (cols + CHUNK - 1) / CHUNK;
    u8* const memory = (u8*)smem;
    const u32 tokens_at = sets * Chunk::SET, stage = tokens_at + Chunk::ALL_TOKENS;
    float(*const meet)[TOKENS][SET_ROWS + 1] = (float(*)[TOKENS][SET_ROWS + 1])(memory + STAGES * stage) + warp / 4 * 4;
    // 1. Sets are counted on from matrix to matrix. Rows that are not there are computed as the last; sets that are not there are left out
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) count += sets_of(all.parts[i]);
    const u32 of_turn = gridDim.x * sets, turns = (count - blockIdx.x * sets + of_turn - 1) / of_turn;
    auto find = [&](u32 set, u32& first_row) {
        u32 number = 0;
#pragma unroll 1
        while (number < 2 && set >= sets_of(all.parts[number]) && all.parts[number + 1].rows) set -= sets_of(all.parts[number++]);
        first_row = set * SET_ROWS;
        return number;
    };
    // 2. Weights. Each of a set's threads has pieces of one row, and scales or biases of four groups of a row
    const u32 thread = threadIdx.x % SET_THREADS, own_row = thread / 8, own_piece = thread % 8 * 16, SCALE_PIECES = Chunk::GROUPS / 4, own_groups = thread % SCALE_PIECES * 4;
    const bool has_scales = thread < 2 * SET_ROWS * SCALE_PIECES;
    u32 set_in = blockIdx.x * sets + warp / 4, chunk_in = 0, weights_in = 0;
    const u8* data;
    const u16* of_scales;
    auto take = [&]() {
        u32 first_row;
        const Matmul& p = all.parts[find(set_in, first_row)];
        data = p.matrix.data + p.in_matrix(min(first_row + own_row, p.rows - 1)) * p.matrix.row_bytes + own_piece;
        const u32 r = thread / SCALE_PIECES;
        of_scales = (const u16*)(r < SET_ROWS ? p.matrix.scales : p.matrix.biases) + p.in_matrix(min(first_row + r % SET_ROWS, p.rows - 1)) * groups + own_groups;
    };
    if (set_in < count) take();
    auto bring_weights = [&]() {
        if (set_in < count) {
            u8* const to = memory + weights_in + warp / 4 * Chunk::SET;
            const u32 row_left = cols / 8 * F::BITS - chunk_in * Chunk::ROW_BYTES, groups_left = groups - chunk_in * Chunk::GROUPS;
#pragma unroll
            for (u32 k = 0; k < Chunk::ROW_BYTES; k += 128) {
                if (cols % CHUNK == 0 || k + own_piece < row_left) cp_async_16_stream(to + own_row * Chunk::ROW + k + own_piece, data + k);
            }
            u8* const scales_to = to + Chunk::SCALES_AT + thread * 8;
            if (groups % 4 == 0) {
                if (has_scales && (cols % CHUNK == 0 || own_groups < groups_left)) cp_async_8(scales_to, of_scales);
            } else if (has_scales) {
                for (u32 i = 0; i < 4 && own_groups + i < groups_left; i++) ((u16*)scales_to)[i] = of_scales[i];
            }
            data += Chunk::ROW_BYTES;
            of_scales += Chunk::GROUPS;
        }
        weights_in = weights_in == (STAGES - 1) * stage ? 0 : weights_in + stage;
        if (++chunk_in < chunks) return;
        chunk_in = 0, set_in += of_turn;
        if (set_in < count) take();
    };
#pragma unroll 1
    for (u32 i = 0; i + 1 < STAGES; i++) bring_weights();
    // 3. Activations of this block's eights of tokens. In the last eight, tokens that are not there are neither brought nor stored
    begin();
    const u32 last_token = all.parts[0].outputs - 1, all_eights = last_token / 8 + 1, of_block = (all_eights + gridDim.y - 1) / gridDim.y, first = blockIdx.y * of_block * 8;
    const u32 eights = min(of_block, all_eights - blockIdx.y * of_block), tokens = min(eights * 8, last_token + 1 - first);
    const Encoded& x = all.parts[0].x;
    u32 tokens_in = tokens_at, column_in = 0, chunks_left = turns * chunks;
    auto bring_tokens = [&]() {
        if (chunks_left > 0) {
            const u32 SCALE_PIECES_OF_TOKEN = Chunk::GROUPS / 2, scales_of = lane % SCALE_PIECES_OF_TOKEN;
            const bool sums = lane / SCALE_PIECES_OF_TOKEN % 2;
            const u8* const of_columns = (const u8*)x.q + column_in + lane * 16;
            const float* const of_scales = (sums ? x.mx : x.sx) + column_in / 32 + scales_of * 4;
#pragma unroll 1
            for (u32 t = warp; t < tokens; t += warps) {
                const u32 token = first + t;
                u8* const to = memory + tokens_in + t * Chunk::TOKEN + lane * 16;
#pragma unroll
                for (u32 k = 0; k < CHUNK; k += 16 * WARP) {
                    if (cols % CHUNK == 0 || column_in + k + lane * 16 < cols) cp_async_16(to + k, of_columns + token * cols + k);
                }
                if (lane < 2 * SCALE_PIECES_OF_TOKEN && (cols % CHUNK == 0 || column_in + scales_of * 128 < cols))
                    cp_async_16(memory + tokens_in + (sums ? Chunk::MX_AT : Chunk::SX_AT) + t * Chunk::OF_TOKEN + scales_of * 16, of_scales + token * (cols / 32));
            }
            chunks_left--;
            tokens_in = tokens_in == tokens_at + (STAGES - 1) * stage ? tokens_at : tokens_in + stage;
            column_in = column_in + CHUNK < cols ? column_in + CHUNK : 0;
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (u32 i = 0; i + 1 < STAGES; i++) bring_tokens();
    // 4. Turns. Where a lane begins in a stage: its weights, their scales, its columns of tokens, and their scales. Kept, since the compiler does again at each step what is plain
    // arithmetic
    u32 own_weights = warp / 4 * Chunk::SET + (F::BITS == 4 ? lane % 16 * Chunk::ROW + lane / 16 * 16 : quad * Chunk::ROW) + chain * (8 * F::BITS);
    u32 own_scales = warp / 4 * Chunk::SET + Chunk::SCALES_AT + quad * Chunk::SCALE_ROW + 2 * chain;
    u32 own_columns = tokens_at + quad * Chunk::TOKEN + part * 8 + 64 * chain, own_sx = tokens_at + Chunk::SX_AT + 2 * part * Chunk::OF_TOKEN + 8 * chain;
    u32* const kept[] = {&own_weights, &own_scales, &own_columns, &own_sx};
#pragma unroll
    for (u32 i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) *kept[i] = __shfl_sync(ALL, *kept[i], lane);
    u32 set = blockIdx.x * sets + warp / 4, slot = 0, chunk = 0;
    float acc[EIGHTS][4];
#pragma unroll
    for (u32 e = 0; e < EIGHTS; e++) acc[e][0] = acc[e][1] = acc[e][2] = acc[e][3] = 0.0f;
    float* to[EIGHTS];
    float before[EIGHTS], bias = 0.0f;
    bool has_bias = false, accumulates = false, has_met = false;
    auto store = [&]() {
#pragma unroll
        for (u32 e = 0; e < EIGHTS; e++) {
            if (!to[e]) continue;
            const u32 t = 8 * e + thread / SET_ROWS, r = thread % SET_ROWS;
            float y = add(add(meet[0][t][r], meet[2][t][r]), add(meet[1][t][r], meet[3][t][r]));
            if (has_bias) y = add(y, bias);
            *to[e] = accumulates ? add(before[e], y) : y;
        }
    };
#pragma unroll 1
    for (u32 n = turns * chunks; n > 0; n--) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        bring_weights();
        bring_tokens();
        if (has_met) store();
        has_met = false;
        // Where a turn is one chunk, chains meet again before the next wait.
        if (chunks == 1) __syncthreads();
        const u8 *const weights = memory + own_weights + slot, *const scales = memory + own_scales + slot, *const columns = memory + own_columns + slot, *const of_tokens = memory + own_sx + slot;
        slot = slot == (STAGES - 1) * stage ? 0 : slot + stage;
        if (set >= count) continue;
        const u32 steps = cols % CHUNK == 0 ? Chunk::STEPS : min(Chunk::STEPS, (groups - chunk * Chunk::GROUPS + 3 - chain) / 4);
#pragma unroll
        for (u32 step = 0; step < Chunk::STEPS; step++) {
            if (step >= steps) break;
            u32 a[2][4];
            if (F::BITS == 4) {
                u32 words[4];
                ldmatrix_x4(words, weights + step * 128);
                F::unpack_matrix(words, a);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) F::unpack_lane(weights + i % 2 * 8 * Chunk::ROW + step * (32 * F::BITS) + i / 2 * 4 * F::BITS, part, a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
            }
            float s[2], b[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                s[r] = half_value(*(const u16*)(scales + r * 8 * Chunk::SCALE_ROW + 8 * step), TYPE);
                b[r] = half_value(*(const u16*)(scales + (8 * r + SET_ROWS) * Chunk::SCALE_ROW + 8 * step), TYPE);
            }
#pragma unroll
            for (u32 e = 0; e < EIGHTS; e++) {
                if (e >= eights) break;
                const u8* const from = columns + e * 8 * Chunk::TOKEN + 256 * step;
                const uint2 low = *(const uint2*)from, high = *(const uint2*)(from + 32);
                u32 sums[2][4];
                mma_u8_i8(sums[0], a[0], low.x, low.y);
                mma_u8_i8(sums[1], a[1], high.x, high.y);
                float2 sx[2];
                float mean[2];
#pragma unroll
                for (u32 t = 0; t < 2; t++) {
                    const u8* const of = of_tokens + (8 * e + t) * Chunk::OF_TOKEN + 32 * step;
                    const float2 mx = *(const float2*)(of + (Chunk::MX_AT - Chunk::SX_AT));
                    sx[t] = *(const float2*)of;
                    mean[t] = add(mx.x, mx.y);
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float t = mul(sx[i % 2].x, sub(bits(sums[0][i]), MAGIC_FLOAT));
                    t = fma(sx[i % 2].y, sub(bits(sums[1][i]), MAGIC_FLOAT), t);
                    acc[e][i] = fma(b[i / 2], mean[i % 2], fma(s[i / 2], t, acc[e][i]));
                }
            }
        }
        if (++chunk < chunks) continue;
        // Chains meet, and are stored behind the next wait
        chunk = 0, has_met = true;
        u32 row;
        const Matmul& p = all.parts[find(set, row)];
        set += of_turn;
        row += thread % SET_ROWS;
        has_bias = p.bias != nullptr, accumulates = p.accumulate;
        if (has_bias) bias = p.bias[min(row, p.rows - 1)];
#pragma unroll
        for (u32 e = 0; e < EIGHTS; e++) {
            const u32 token = first + 8 * e + thread / SET_ROWS;
            to[e] = e < eights && token <= last_token && row < p.rows ? p.out.row(token) + p.in_output(row) : nullptr;
            before[e] = accumulates && to[e] ? __ldcg(to[e]) : 0.0f;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                meet[chain][8 * e + 2 * part + i % 2][quad + i / 2 * 8] = acc[e][i];
                acc[e][i] = 0.0f;
            }
        }
    }
    __syncthreads();
    if (has_met) store();
}

template <class F, int EIGHTS, int CHUNK, int STAGES> __device__ __forceinline__ void gemm_sets(const Products& p) {
    if (p.parts[0].matrix.type == BF16) gemm_sets<F, EIGHTS, CHUNK, STAGES, BF16>(p);
    else gemm_sets<F, EIGHTS, CHUNK, STAGES, F16>(p);
}

#define GEMM_SETS_OF(name, F, tokens, stages) \
    extern "C" __global__ void __launch_bounds__(512, 1) gemm_sets_##name##_##tokens(const __grid_constant__ Products p) { ON_TENSOR_CORES((gemm_sets<F, tokens / 8, 4096 / F::BITS, stages>(p));) }
#define GEMM_SETS(name, F) GEMM_SETS_OF(name, F, 8, 3) GEMM_SETS_OF(name, F, 16, 3) GEMM_SETS_OF(name, F, 24, 2) GEMM_SETS_OF(name, F, 32, 2)

BYTE_FORMATS(GEMM_SETS)
