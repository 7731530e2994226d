// Products of integers of 11 bits for up to eight tokens, with 4-bit weights in groups of 64 or 128, on f16 tensor cores at the speed of memory.
//
// A block takes sixteen rows at a time, in turns of 32 groups of 64 columns. Eight warps multiply: four groups each, whose weights come to a ring of the warp's own,
// turns ahead. Sums go to shared memory, where other warps run the chains of the turn before: a thread (row, token).
//
// In a mixture (GROUPED) the tokens are a tile's pairs of one expert; blocks of one y share its rows.
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
// A warp's scales and biases of a turn, and floats of a block's: [32 groups][16 rows] each, of which the second begins in other banks.
static const u32 SCALE_BYTES = 2 * ROWS * OWN * 2, SCALES = TURN * ROWS + ROWS;

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
__device__ __forceinline__ u32 part_of(const Products& all, u32 count, u32& set) {
    u32 k = 0;
    for (; k + 1 < count && set * ROWS >= all.parts[k].rows; k++) set -= (all.parts[k].rows + ROWS - 1) / ROWS;
    return k;
}

template <int T, bool GROUPED, u32 KIND> __device__ __forceinline__ void gemm_few(const Products& all) {
    // The expert's matrices.
    __shared__ Matrix own[3];
    const Matmul& first = all.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, j = lane % 4, row = lane / 4, groups = first.cols / 64, t0 = GROUPED ? 0 : blockIdx.y * T;
    u32 count = 1, sets = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) sets += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rings of weights and of scales; what chains need of two turns: sums of products [32 groups][T][16 rows], scales, biases; sums of activations [groups][T];
    // tokens [groups][T][128 bytes].
    u8* ring = (u8*)smem + warp % WARPS * RING * RING_BYTES;
    u8* scale_ring = (u8*)smem + WARPS * RING * RING_BYTES + warp % WARPS * RING * SCALE_BYTES + lane * 8;
    float* sums = smem + WARPS * RING * (RING_BYTES + SCALE_BYTES) / 4;
    const u32 SUMS = TURN * T * ROWS + 2 * SCALES;
    u32 last = first.outputs - 1;
    const u32* order = nullptr;
    bool aligned = true;
    if (GROUPED) {
        begin();
        if (blockIdx.y >= first.tiles[0]) return;
        const uint4 pairs = ((const uint4*)first.tiles)[1 + blockIdx.y];
        order = first.order + pairs.y, last = pairs.z - 1;
        if (threadIdx.x < count) own[threadIdx.x] = all.parts[threadIdx.x].table[pairs.x];
        __syncthreads();
        for (u32 k = 0; k < count; k++) {
            const Matrix& m = own[k];
            // An expert that is not on the device is skipped.
            if (m.kind != KIND) return;
            aligned &= (((u64)m.data | m.row_bytes) & 15) == 0 && (((u64)m.scales | (u64)m.biases | 2 * m.groups) & (m.group == 128 ? 3 : 7)) == 0;
        }
    }
    auto matrix_of = [&](u32 k) -> const Matrix& { return GROUPED ? own[k] : all.parts[k].matrix; };
    const u32 log_wide = matrix_of(0).group == 128, type = matrix_of(0).type;
    auto token_of = [&](u32 t) { return GROUPED ? order[min(t, last)] / first.per_row : min(t0 + t, last); };
    float* of_x = sums + 2 * SUMS;
    u8* x = (u8*)(of_x + (groups * T + 3) / 4 * 4);
    Turn turn = {blockIdx.x, 0};
    if (turn.set >= sets) return;
    const bool multiplies = warp < WARPS;
    // Sixteen bytes are at their number xor twice the lowest two bits of the row's, and its third: eight lanes then meet all banks.
    auto place = [](u32 r, u32 c) { return r * 128 + (c ^ (r & 3) * 2 ^ (r >> 2 & 1)) * 16; };
    Turn ahead = {blockIdx.x, 0};
    u32 slot = 0;
    // Where this lane's pieces of four rows come from, and a row's scales, or biases.
    const u8 *rows[4], *scales_from = nullptr;
    const u32 chunk = lane % 8;
    auto load = [&] {
        if (ahead.set < sets) {
            if (ahead.from == 0) {
                u32 set = ahead.set;
                const u32 k = part_of(all, count, set);
                const Matmul& p = all.parts[k];
                const Matrix& m = matrix_of(k);
#pragma unroll
                for (u32 i = 0; i < 4; i++) rows[i] = m.data + p.in_matrix(min(set * ROWS + 4 * i + lane / 8, p.rows - 1)) * m.row_bytes + warp * OWN * 32 + chunk * 16;
                scales_from = (lane < ROWS ? m.scales : m.biases) + 2 * (p.in_matrix(min(set * ROWS + lane % ROWS, p.rows - 1)) * m.groups + (warp * OWN >> log_wide));
            }
            if (ahead.from + warp * OWN + chunk / 2 < groups) {
                u8* to = ring + slot * RING_BYTES;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u8* own_to = to + place(4 * i + lane / 8, chunk);
                    const u8* from = rows[i] + (u64)ahead.from * 32;
                    if (!GROUPED || aligned) cp_async_16_stream(own_to, from);
                    else copy_slowly(own_to, from, 8);
                }
            }
            if (ahead.from + warp * OWN < groups) {
                const u8* from = scales_from + (ahead.from >> log_wide) * 2;
                if (GROUPED && !aligned) copy_slowly(scale_ring + slot * SCALE_BYTES, from, min((groups - ahead.from - warp * OWN + log_wide) >> log_wide, OWN >> log_wide));
                else if (!log_wide) cp_async_8(scale_ring + slot * SCALE_BYTES, from);
                else cp_async_4(scale_ring + slot * SCALE_BYTES, from);
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
    if (!GROUPED) begin();
    // Tokens and their sums; a token that is not there is the last one again.
    for (u32 i = threadIdx.x; i < groups * T * 8; i += blockDim.x) {
        const u32 c = i % 8, t = i / 8 % T, g = i / 8 / T, token = token_of(t);
        cp_async_16(x + (u64)(g * T + t) * 128 + 16 * (c ^ (token ^ t) & 7), (const u8*)first.x.n + int11_row(token, g, groups) + 16 * c);
    }
    for (u32 i = threadIdx.x; i < groups * T; i += blockDim.x) of_x[i] = first.x.sn[(u64)(i / T) * first.x.padded + int11_place(token_of(i % T))];
    cp_async_wait_all();
    __syncthreads();
    float acc = 0.0f;
    Turn before = turn;
    bool there = false;
    u32 buffer = 0, now = 0;
    while (true) {
        const bool more = turn.set < sets;
        if (multiplies && more) {
            float* to = sums + buffer * SUMS;
            cp_async_wait<RING - 2>();
            __syncwarp();
            // What is loaded takes the place of the turn before, which the whole warp has left.
            load();
            const u8* here = ring + now * RING_BYTES;
            const uint2 raw = *(const uint2*)(scale_ring + now * SCALE_BYTES);
            now = now + 1 == RING ? 0 : now + 1;
            // All that comes from shared memory first, then four products of each group, side by side. Of eight rows of tokens each eighth of a warp points to one.
            const u32 t = lane % 8 % T, g0 = turn.from + warp * OWN;
            uint2 w[OWN][2];
            u32 x0[OWN][4], x1[OWN][4];
            float d[OWN][4];
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u8* tokens = x + (u64)(min(g0 + i, groups - 1) * T + t) * 128;
                w[i][0] = *(const uint2*)(here + place(row, 2 * i + j / 2) + j % 2 * 8);
                w[i][1] = *(const uint2*)(here + place(row + 8, 2 * i + j / 2) + j % 2 * 8);
                ldmatrix_x4(x0[i], tokens + 16 * (lane / 8 ^ t));
                ldmatrix_x4(x1[i], tokens + 16 * (4 + lane / 8 ^ t));
#pragma unroll
                for (u32 k = 0; k < 4; k++) d[i][k] = 0.0f;
            }
#pragma unroll
            for (u32 u = 0; u < 4; u++) {
#pragma unroll
                for (u32 i = 0; i < OWN; i++) {
                    u32 a[4];
                    unpack_int11_quarter(w[i][0], w[i][1], u, a);
                    const u32* of = u < 2 ? x0[i] : x1[i];
                    mma_f16(d[i], a, of[u % 2 * 2], of[u % 2 * 2 + 1]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 of = i >> log_wide, two = of / 2 ? raw.y : raw.x;
                to[TURN * T * ROWS + lane / ROWS * SCALES + (warp * OWN + i) * ROWS + lane % ROWS] = half_value(two >> of % 2 * 16 & 0xffff, type);
                float* at = to + (warp * OWN + i) * T * ROWS;
                if (2 * j < T) {
                    at[2 * j * ROWS + row] = d[i][0];
                    at[2 * j * ROWS + row + 8] = d[i][2];
                }
                if (2 * j + 1 < T) {
                    at[(2 * j + 1) * ROWS + row] = d[i][1];
                    at[(2 * j + 1) * ROWS + row + 8] = d[i][3];
                }
            }
        }
        if (chains && there) {
            u32 set = before.set;
            const Matmul& p = all.parts[part_of(all, count, set)];
            const float *turn_sums = sums + (buffer ^ 1) * SUMS, *d = turn_sums + chain_token * ROWS + chain_row, *scale = turn_sums + TURN * T * ROWS + chain_row;
            const float* m = of_x + before.from * T + chain_token;
            const u32 here = min(TURN, groups - before.from);
            u32 from = 0;
#pragma unroll 1
            for (; from + 8 <= here; from += 8) {
                float ss[8], bb[8], dd[8], mm[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    ss[i] = scale[(from + i) * ROWS];
                    bb[i] = scale[SCALES + (from + i) * ROWS];
                    dd[i] = d[(from + i) * T * ROWS];
                    mm[i] = m[(from + i) * T];
                }
#pragma unroll
                for (u32 i = 0; i < 8; i++) acc = fma(bb[i], mm[i], fma(ss[i], dd[i], acc));
            }
#pragma unroll 1
            for (; from < here; from++) acc = fma(scale[SCALES + from * ROWS], m[from * T], fma(scale[from * ROWS], d[from * T * ROWS], acc));
            if (before.from + TURN >= groups) {
                const u32 r = set * ROWS + chain_row, t = t0 + chain_token;
                if (r < p.rows && t <= last) put(p, GROUPED ? order[t] : t, r, mul(acc, first.x.tn[GROUPED ? token_of(t) : t]));
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
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_1(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<1, false, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(288, 2) gemm_few_##name##_2(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<2, false, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(320, 2) gemm_few_##name##_4(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<4, false, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_few_##name##_8(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<8, false, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(320, 1) gemm_few_##name##_4_grouped(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<4, true, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_few_##name##_8_grouped(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_few<8, true, KIND_OF<F>>(p);) }

INT11_TENSOR_FORMATS(GEMM_FEW)
