// Products of integers of 11 bits for up to eight tokens, with 4-bit weights in groups of 64 or 128, on f16 tensor cores at the speed of memory.
//
// A block takes sixteen rows at a time, in turns of 32 groups of 64 columns. Eight warps multiply: four groups each, whose weights come to a ring of the warp's own,
// turns ahead. Sums go to shared memory, where other warps run the chains of the turn before: a thread (row, token).
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 ROWS = 16, WARPS = 8, OWN = 4, TURN = WARPS * OWN;
// Turns of a ring, and bytes of a warp's turn: 128 of each row.
static const u32 RING = 4, RING_BYTES = ROWS * OWN * 32;
// Scales and biases of a turn, each [16 rows][32], and one more turn of them: chains are a turn behind.
static const u32 SCALES = ROWS * TURN * 2, SCALE_RING = RING + 1;

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

template <int T> __device__ __forceinline__ void gemm_few(const Products& all) {
    const Matmul& first = all.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, j = lane % 4, row = lane / 4, groups = first.cols / 64, t0 = blockIdx.y * T;
    u32 count = 1, sets = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) sets += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rings of weights; sums of products [2 turns][32 groups][T][16 rows], of activations [groups][T]; tokens [groups][T][128 bytes].
    u8* ring = (u8*)smem + warp % WARPS * RING * RING_BYTES;
    u8* scale_ring = (u8*)smem + WARPS * RING * RING_BYTES;
    float* sums = (float*)(scale_ring + SCALE_RING * 2 * SCALES);
    const u32 wide = first.matrix.group / 64;
    float* of_x = sums + 2 * TURN * T * ROWS;
    u8* x = (u8*)(of_x + (groups * T + 3) / 4 * 4);
    Turn turn = {blockIdx.x, 0};
    if (turn.set >= sets) return;
    const bool multiplies = warp < WARPS;
    // Sixteen bytes are at their number xor twice the lowest two bits of the row's, and its third: eight lanes then meet all banks.
    auto place = [](u32 r, u32 c) { return r * 128 + (c ^ (r & 3) * 2 ^ (r >> 2 & 1)) * 16; };
    Turn ahead = {blockIdx.x, 0};
    u32 slot = 0, scale_slot = 0;
    // Where this lane's pieces of four rows come from, and a piece of scales: four of a row's scales, and of its biases, eight groups each.
    const u8 *rows[4], *scales_from = nullptr;
    const u32 chunk = lane % 8, scale_row = threadIdx.x / 8, piece = threadIdx.x % 4, is_bias = threadIdx.x / 4 % 2;
    auto load = [&] {
        if (ahead.set < sets) {
            if (ahead.from == 0) {
                u32 set = ahead.set;
                const Matmul& p = part_of(all, count, set);
#pragma unroll
                for (u32 i = 0; i < 4; i++) rows[i] = p.matrix.data + p.in_matrix(min(set * ROWS + 4 * i + lane / 8, p.rows - 1)) * p.matrix.row_bytes + warp * OWN * 32 + chunk * 16;
                scales_from = (is_bias ? p.matrix.biases : p.matrix.scales) + 2 * (p.in_matrix(min(set * ROWS + scale_row % ROWS, p.rows - 1)) * p.matrix.groups + 8 * piece);
            }
            if (ahead.from + warp * OWN + chunk / 2 < groups) {
                u8* to = ring + slot * RING_BYTES;
#pragma unroll
                for (u32 i = 0; i < 4; i++) cp_async_16_stream(to + place(4 * i + lane / 8, chunk), rows[i] + (u64)ahead.from * 32);
            }
            if (scale_row < ROWS && 8 * piece < TURN / wide && ahead.from / wide + 8 * piece < groups / wide) {
                cp_async_16(scale_ring + (scale_slot * 2 + is_bias) * SCALES + scale_row * TURN * 2 + 16 * piece, scales_from + ahead.from / wide * 2);
            }
            ahead.next(groups);
        }
        scale_slot = scale_slot + 1 == SCALE_RING ? 0 : scale_slot + 1;
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
    // Tokens and their sums; a token that is not there is the last one again.
    const u32 last = first.outputs - 1;
    for (u32 i = threadIdx.x; i < groups * T * 8; i += blockDim.x) {
        const u32 c = i % 8, t = i / 8 % T, g = i / 8 / T, token = min(t0 + t, last);
        cp_async_16(x + (u64)(g * T + t) * 128 + 16 * (c ^ (token ^ t) & 7), (const u8*)first.x.n + int11_row(token, g, groups) + 16 * c);
    }
    for (u32 i = threadIdx.x; i < groups * T; i += blockDim.x) of_x[i] = first.x.sn[(u64)(i / T) * first.x.padded + int11_place(min(t0 + i % T, last))];
    cp_async_wait_all();
    __syncthreads();
    float acc = 0.0f;
    Turn before = turn;
    bool there = false;
    u32 buffer = 0, now = 0, chained = 0;
    while (true) {
        const bool more = turn.set < sets;
        if (multiplies && more) {
            float* to = sums + buffer * TURN * T * ROWS;
            cp_async_wait<RING - 2>();
            __syncwarp();
            // What is loaded takes the place of the turn before, which the whole warp has left.
            load();
            const u8* here = ring + now * RING_BYTES;
            now = now + 1 == RING ? 0 : now + 1;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 g = turn.from + warp * OWN + i;
                u32 a[16];
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const u32 r = row + 8 * h;
                    unpack_int11(*(const uint2*)(here + place(r, 2 * i + j / 2) + j % 2 * 8), a, h);
                }
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                // Of eight rows of tokens each eighth of a warp points to one.
                const u32 t = lane % 8 % T;
                const u8* rows = x + (u64)(min(g, groups - 1) * T + t) * 128;
                u32 x0[4], x1[4];
                ldmatrix_x4(x0, rows + 16 * (lane / 8 ^ t));
                ldmatrix_x4(x1, rows + 16 * (4 + lane / 8 ^ t));
                mma_f16(d, a, x0[0], x0[1]);
                mma_f16(d, a + 4, x0[2], x0[3]);
                mma_f16(d, a + 8, x1[0], x1[1]);
                mma_f16(d, a + 12, x1[2], x1[3]);
                float* at = to + (warp * OWN + i) * T * ROWS;
                if (2 * j < T) {
                    at[2 * j * ROWS + row] = d[0];
                    at[2 * j * ROWS + row + 8] = d[2];
                }
                if (2 * j + 1 < T) {
                    at[(2 * j + 1) * ROWS + row] = d[1];
                    at[(2 * j + 1) * ROWS + row + 8] = d[3];
                }
            }
        }
        if (chains && there) {
            u32 set = before.set;
            const Matmul& p = part_of(all, count, set);
            const float *d = sums + (buffer ^ 1) * TURN * T * ROWS + chain_token * ROWS + chain_row, *m = of_x + before.from * T + chain_token;
            const u32 here = min(TURN, groups - before.from), type = p.matrix.type;
            const u8* scales = scale_ring + chained * 2 * SCALES + chain_row * TURN * 2;
            chained = chained + 1 == SCALE_RING ? 0 : chained + 1;
            // Eight groups of 64 columns.
            auto eight = [&](u32 from, u32 most) {
                const uint4 s = *(const uint4*)(scales + from / wide / 8 * 16), b = *(const uint4*)(scales + SCALES + from / wide / 8 * 16);
                float dd[8], mm[8], ss[8], bb[8];
                const u32 half = wide == 1 ? 0 : from / 8 % 2;
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u32 at = wide == 1 ? i : half * 4 + i / 2;
                    const u32 s2 = at < 2 ? s.x : at < 4 ? s.y : at < 6 ? s.z : s.w, b2 = at < 2 ? b.x : at < 4 ? b.y : at < 6 ? b.z : b.w;
                    ss[i] = half_value(s2 >> at % 2 * 16 & 0xffff, type);
                    bb[i] = half_value(b2 >> at % 2 * 16 & 0xffff, type);
                    dd[i] = i < most ? d[(from + i) * T * ROWS] : 0.0f;
                    mm[i] = i < most ? m[(from + i) * T] : 0.0f;
                }
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    if (i < most) acc = fma(bb[i], mm[i], fma(ss[i], dd[i], acc));
                }
            };
#pragma unroll 2
            for (u32 from = 0; from + 8 <= here; from += 8) eight(from, 8);
            if (here % 8) eight(here & ~7u, here % 8);
            if (before.from + TURN >= groups) {
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
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_1(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<1>(p);) } \
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_2(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<2>(p);) } \
    extern "C" __global__ void __launch_bounds__(320, 2) gemm_few_##name##_4(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<4>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_few_##name##_8(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<8>(p);) }

INT11_TENSOR_FORMATS(GEMM_FEW)
