// Products of integers of 11 bits for up to eight tokens with weights that are floats of sixteen bits, on f16 tensor cores at the speed of memory.
//
// A block takes sixteen rows at a time, in turns of 16 groups of 64 columns. Eight warps multiply: two groups each, whose weights come to a ring of the warp's own, turns
// ahead, and become integers on the way to the tensor cores. Products of pieces go to shared memory, where other warps add up those of the turn before: a thread (row, token).
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 ROWS = 16, WARPS = 8, OWN = 2, TURN = WARPS * OWN;
// Turns of a ring, and bytes of a warp's turn: 256 of each row.
static const u32 RING = 3, RING_BYTES = ROWS * OWN * 128, CHUNKS = OWN * 8, LOADS = ROWS * CHUNKS / WARP;

// The same place among consecutive turns of consecutive sets of rows: all threads of a block go through them together.
struct Turn {
    u32 set;
    u32 from;

    __device__ __forceinline__ void next(u32 groups) {
        from += TURN;
        if (from >= groups) {
            from = 0;
            set += gridDim.x;
        }
    }
};

// Which product a set of rows belongs to.
__device__ __forceinline__ const Matmul& part_of(const Products& all, u32 count, u32& set) {
    u32 k = 0;
    for (; k + 1 < count && set * ROWS >= all.parts[k].rows; k++) set -= (all.parts[k].rows + ROWS - 1) / ROWS;
    return all.parts[k];
}

template <class F, int T> __device__ __forceinline__ void gemm_few(const Products& all) {
    const Matmul& first = all.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, j = lane % 4, row = lane / 4, groups = first.cols / 64, t0 = blockIdx.y * T;
    u32 count = 1, sets = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) sets += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rings of weights; products of two turns: [32 pieces][T][16 rows]; tokens [groups][T][128 bytes].
    const u32 PRODUCTS = 2 * TURN * T * ROWS;
    u8* ring = (u8*)smem + warp % WARPS * RING * RING_BYTES;
    float* products = smem + WARPS * RING * RING_BYTES / 4;
    u8* x = (u8*)(products + 2 * PRODUCTS);
    Turn turn = {blockIdx.x, 0}, ahead = turn;
    if (turn.set >= sets) return;
    const bool multiplies = warp < WARPS;
    // Sixteen bytes are at their number xor the lowest bit of the row's: eight lanes then meet all banks.
    auto place = [](u32 r, u32 c) { return r * (CHUNKS * 16) + (c ^ r & 1) * 16; };
    u32 slot = 0;
    // Where this lane's pieces of its rows come from.
    const u8* rows[LOADS];
    const u32 chunk = lane % CHUNKS, lane_row = lane / CHUNKS;
    auto load = [&] {
        if (ahead.set < sets) {
            if (ahead.from == 0) {
                u32 set = ahead.set;
                const Matmul& p = part_of(all, count, set);
#pragma unroll
                for (u32 i = 0; i < LOADS; i++) rows[i] = p.matrix.data + p.in_matrix(min(set * ROWS + WARP / CHUNKS * i + lane_row, p.rows - 1)) * p.matrix.row_bytes + warp * OWN * 128 + chunk * 16;
            }
            if (ahead.from + warp * OWN + chunk / 8 < groups) {
                u8* to = ring + slot * RING_BYTES;
#pragma unroll
                for (u32 i = 0; i < LOADS; i++) cp_async_16_stream(to + place(WARP / CHUNKS * i + lane_row, chunk), rows[i] + (u64)ahead.from * 128);
            }
            ahead.next(groups);
        }
        slot = slot + 1 == RING ? 0 : slot + 1;
        cp_async_commit();
    };
    const u32 chain = threadIdx.x - WARPS * WARP, chain_row = chain % ROWS, chain_token = chain / ROWS;
    const bool chains = !multiplies && chain_token < T;
    if (multiplies) {
#pragma unroll 1
        for (u32 i = 0; i + 1 < RING; i++) load();
    }
    begin();
    // A token that is not there is the last one again.
    const u32 last = first.outputs - 1;
    for (u32 i = threadIdx.x; i < groups * T * 8; i += blockDim.x) {
        const u32 c = i % 8, t = i / 8 % T, g = i / 8 / T, token = min(t0 + t, last);
        cp_async_16(x + (u64)(g * T + t) * 128 + 16 * (c ^ (token ^ t) & 7), (const u8*)first.x.n + int11_row(token, g, groups) + 16 * c);
    }
    cp_async_wait_all();
    __syncthreads();
    float acc = 0.0f;
    Turn before = turn;
    bool there = false;
    u32 buffer = 0, now = 0;
    while (true) {
        const bool more = turn.set < sets;
        if (multiplies && more) {
            float* to = products + buffer * PRODUCTS;
            cp_async_wait<RING - 2>();
            __syncwarp();
            // What is loaded takes the place of the turn before, which the whole warp has left.
            load();
            const u8* here = ring + now * RING_BYTES;
            now = now + 1 == RING ? 0 : now + 1;
            // Of eight rows of tokens each eighth of a warp points to one.
            const u32 t = lane % 8 % T, g0 = turn.from + warp * OWN;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u8* tokens = x + (u64)(min(g0 + i, groups - 1) * T + t) * 128;
                u32 of_x[2][4], w[2][2][4];
                float unit[2][2];
                ldmatrix_x4(of_x[0], tokens + 16 * (lane / 8 ^ t));
                ldmatrix_x4(of_x[1], tokens + 16 * (4 + lane / 8 ^ t));
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const uint4 even = *(const uint4*)(here + place(row + 8 * h, 8 * i + 2 * j)), odd = *(const uint4*)(here + place(row + 8 * h, 8 * i + 2 * j + 1));
                    u32 most = F::greatest(even) | F::greatest(odd) << 16;
                    most = max_pair(most, __shfl_xor_sync(ALL, most, 1));
                    most = max_pair(most, __shfl_xor_sync(ALL, most, 2));
                    const Piece first_piece = F::piece(most & 0xffff), second_piece = F::piece(most >> 16);
                    F::round(even, first_piece.before, w[h][0]);
                    F::round(odd, second_piece.before, w[h][1]);
                    unit[h][0] = first_piece.unit;
                    unit[h][1] = second_piece.unit;
                }
#pragma unroll
                for (u32 a = 0; a < 2; a++) {
                    float high[4] = {}, low[4] = {};
#pragma unroll
                    for (u32 u = 0; u < 2; u++) {
                        u32 of_high[4], of_low[4];
#pragma unroll
                        for (u32 k = 0; k < 4; k++) slice_pair(w[k % 2][a][2 * u + k / 2], of_high[k], of_low[k]);
                        mma_f16(high, of_high, of_x[a][2 * u], of_x[a][2 * u + 1]);
                        mma_f16(low, of_low, of_x[a][2 * u], of_x[a][2 * u + 1]);
                    }
                    float* at = to + ((warp * OWN + i) * 2 + a) * T * ROWS + row;
#pragma unroll
                    for (u32 k = 0; k < 4; k++) {
                        if (2 * j + k % 2 < T) at[(2 * j + k % 2) * ROWS + k / 2 * 8] = mul(unit[k / 2][a], add(high[k], low[k]));
                    }
                }
            }
        }
        if (chains && there) {
            const float* d = products + (buffer ^ 1) * PRODUCTS + chain_token * ROWS + chain_row;
            const u32 here = 2 * min(TURN, groups - before.from);
            u32 from = 0;
#pragma unroll 1
            for (; from + 8 <= here; from += 8) {
                float dd[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) dd[i] = d[(from + i) * T * ROWS];
#pragma unroll
                for (u32 i = 0; i < 8; i++) acc = add(acc, dd[i]);
            }
#pragma unroll 1
            for (; from < here; from++) acc = add(acc, d[from * T * ROWS]);
            if (before.from + TURN >= groups) {
                u32 set = before.set;
                const Matmul& p = part_of(all, count, set);
                const u32 r = set * ROWS + chain_row, t = t0 + chain_token;
                if (r < p.rows && t <= last) put(p, t, r, mul(acc, first.x.tn[t]));
                acc = 0.0f;
            }
        }
        if (!more) break;
        before = turn;
        there = true;
        turn.next(groups);
        buffer ^= 1;
        __syncthreads();
    }
}

#define GEMM_FEW(name, F) \
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_1(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<F, 1>(p);) } \
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_2(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<F, 2>(p);) } \
    extern "C" __global__ void __launch_bounds__(320, 2) gemm_few_##name##_4(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<F, 4>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_few_##name##_8(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<F, 8>(p);) }

INT11_FLOAT_FORMATS(GEMM_FEW)
