// Products of integers of 11 bits for one token with weights that are floats of sixteen bits, as a layer's part: each block norms and encodes the token for itself, and
// where the matrices are gate and up, what comes out is silu(gate) * up.
//
// A warp takes two rows, 256 columns of each at a time, a lane eight. Weights become integers by an addition, and are multiplied as such. Lanes whose number has the same
// second bit add up one of the rows.
#include "format/list.cuh"
#include "gemv/one_turns.cuh"
#include "prim/cp_async.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 ROWS = 2, STEP_COLUMNS = 8 * WARP;
// What adding 1.5 2^23 makes of 0.
static const u32 ZERO = 0x4b400000u;
static const float TO_INTEGER = 12582912.0f;

// Eight weights times eight integers.
template <class F> __device__ __forceinline__ u32 eight_products(uint4 w, float by, const u32 (&n)[8], u32 sum) {
    const u32 two[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        sum += bits(fma(F::low(two[k]), by, TO_INTEGER)) * n[2 * k];
        sum += bits(fma(F::high(two[k]), by, TO_INTEGER)) * n[2 * k + 1];
    }
    return sum;
}

template <class F> __device__ __forceinline__ void gemv_one(const OneToken& p) {
    const u32 lane = threadIdx.x % WARP, cols = p.parts[0].cols, groups = cols / 64, steps = (cols + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const u32 task = p.gated ? 2 : 1, warps = gridDim.x * WARPS;
    u32 sets = 0;
    for (u32 k = 0; k < 3; k++) sets += (p.parts[k].rows + ROWS - 1) / ROWS;
    // The token: integers, in whose place floats are at first; for each eight what makes up for what additions leave; 2^(e-24) of each group. The norm's weights.
    u32* n = (u32*)smem;
    u32* less = n + steps * STEP_COLUMNS;
    float* powers = (float*)(less + steps * WARP);
    float* weights = powers + steps * 4;
    // Neighbouring rows go to different multiprocessors.
    const u32 first = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * task;
    u32 asked = first, asked_step = 0, set = first, step = 0;
    const u8* from[ROWS];
    uint4 words[2][ROWS];
    auto ask = [&](uint4 (&to)[ROWS]) {
        if (asked_step == 0 && asked < sets) {
            u32 own = asked;
            const Matmul& part = part_of<ROWS>(p, own);
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) from[i] = part.matrix.data + part.in_matrix(min(own * ROWS + i, part.rows - 1)) * part.matrix.row_bytes + lane * 16;
        }
        const bool there = asked < sets && asked_step * STEP_COLUMNS + lane * 8 < cols;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            to[i] = make_uint4(0, 0, 0, 0);
            if (there) to[i] = __ldcs((const uint4*)(from[i] + asked_step * (2 * STEP_COLUMNS)));
        }
        if (++asked_step == steps) {
            asked_step = 0;
            asked = set_after(asked, 1, task, warps);
        }
    };
    ask(words[0]);
    ask(words[1]);
    if (p.norm.weight) {
        for (u32 i = threadIdx.x; i < cols / 4; i += blockDim.x) cp_async_16((float4*)weights + i, (const float4*)p.norm.weight + i);
    }
    begin();
    // Columns beyond the last are zeros.
    for (u32 i = cols / 8 + threadIdx.x; i < steps * WARP; i += blockDim.x) {
        ((uint4*)n)[2 * i] = ((uint4*)n)[2 * i + 1] = make_uint4(0, 0, 0, 0);
        less[i] = 0;
        if (i % 8 == 0) powers[i / 8] = 0.0f;
    }
    const float of_token = encode_token<WARPS>(p.x.row(0), p.norm, cols, (float*)n, weights, [&](u32 i, const float (&v)[8], int e, float) {
        const float by = power(-e);
        u32 own[8], sum = 0;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            own[k] = bits(fma(v[k], by, TO_INTEGER)) - ZERO;
            sum -= own[k];
        }
        ((uint4*)n)[2 * i] = make_uint4(own[0], own[1], own[2], own[3]);
        ((uint4*)n)[2 * i + 1] = make_uint4(own[4], own[5], own[6], own[7]);
        less[i] = sum * ZERO;
        if (i % 8 == 0) powers[i / 8] = power(e - 24);
    });
    __syncthreads();
    const bool second = lane & 2;
    float acc = 0.0f, gate = 0.0f;
#pragma unroll 1
    while (set < sets) {
#pragma unroll
        for (u32 d = 0; d < 2; d++) {
            const u32 at = step * WARP + lane;
            const uint4 a = ((const uint4*)n)[2 * at], b = ((const uint4*)n)[2 * at + 1];
            const u32 own[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, without = less[at];
            // 1. The piece's greatest of both rows
            u32 most = F::greatest(words[d][0]) | F::greatest(words[d][1]) << 16;
            most = max_pair(most, __shfl_xor_sync(ALL, most, 2));
            most = max_pair(most, __shfl_xor_sync(ALL, most, 4));
            const Piece pieces[ROWS] = {F::piece(most & 0xffff), F::piece(most >> 16)};
            u32 sums[ROWS];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) sums[i] = eight_products<F>(words[d][i], mul(pieces[i].before, 16777216.0f), own, without);
            ask(words[d]);
            // 2. Half of the lanes get one row's sum of the piece, half the other's.
            u32 sum = second ? sums[1] : sums[0];
            sum += __shfl_xor_sync(ALL, second ? sums[0] : sums[1], 2);
            sum += __shfl_xor_sync(ALL, sum, 4);
            const float product = mul(mul((float)(int)sum, powers[step * 4 + lane / 8]), second ? pieces[1].unit : pieces[0].unit);
            // 3. Pieces in order. Those beyond the last are zeros.
#pragma unroll
            for (u32 of = 0; of < 8; of++) acc = add(acc, __shfl_sync(ALL, product, of / 2 * 8 + (lane & 2) + of % 2));
            if (++step < steps) continue;
            step = 0;
            if (set < sets) {
                u32 own_set = set;
                const Matmul& part = part_of<ROWS>(p, own_set);
                const u32 r = own_set * ROWS + second;
                const float y = mul(acc, of_token);
                acc = 0.0f;
                if (p.gated && set % 2 == 0) gate = y;
                else if ((lane == 0 || lane == 2) && r < part.rows) {
                    if (p.gated) p.parts[0].out.row(0)[r] = mul(silu(gate), y);
                    else put(part, 0, r, y);
                }
            }
            set = set_after(set, 1, task, warps);
        }
    }
}

#define GEMV_ONE(name, F) \
    extern "C" __global__ void __launch_bounds__(512, 2) gemv_one_##name(const __grid_constant__ OneToken p) { gemv_one<F>(p); }

INT11_FLOAT_FORMATS(GEMV_ONE)
