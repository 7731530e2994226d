// Products of integers of 11 bits for one token, as a layer's part: each block norms and encodes the token for itself, and where the matrices are gate and up, what
// comes out is silu(gate) * up.
//
// The integers are split into two slices of eight bits (format/slices.cuh). A block takes 32 rows at a time, in turns of a row's groups of 64
// columns, one for each lane that the row has. What a row's chain needs of a turn goes to shared memory, where a warp of its own, a thread for each row, adds up the turn
// before. Of gate and up a block takes the same rows, one after the other, so that the thread that ends up's chain still has gate's.
#include "format/list.cuh"
#include "format/slices.cuh"
#include "gemv/one_turns.cuh"
#include "prim/cp_async.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 ROWS = 32;

// Encodes a token by the whole block.
__device__ __forceinline__ float stage(const float* x, const Norm& norm, u32 cols, const Slices& to, float* kept, const float* weights) {
    return encode_token<WARPS + 1>(x, norm, cols, kept, weights, [&](u32 i, const float (&v)[8], int e, float sum) { put_slices(to, i, v, e, sum); });
}

// A row has LANES lanes; a lane takes a group of OWN rows at a time. Another block of the multiprocessor multiplies while this one waits for weights.
template <class F, u32 LANES> __device__ __forceinline__ void gemv_one(const OneToken& p) {
    const u32 OWN = ROWS / WARPS * LANES / WARP, STRIDE = LANES + 1, BUFFER = ROWS * STRIDE;
    const Matmul& first = p.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, in_row = lane % LANES, groups = first.cols / 64;
    const u32 log_wide = first.matrix.group == 128, type = first.matrix.type, row = warp * (ROWS / WARPS) + lane / LANES * OWN;
    u32 sets = 0;
    for (u32 k = 0; k < 3; k++) sets += (p.parts[k].rows + ROWS - 1) / ROWS;
    const Slices x = slices(smem, groups);
    // What chains need of two turns: sums of products, and scales with biases.
    float* sums = behind(x, groups);
    u32* scales = (u32*)(sums + 2 * BUFFER);
    float* kept = p.keeps ? (float*)(scales + 2 * BUFFER) : nullptr;
    Turn turn = {p.gated ? 2 * blockIdx.x : blockIdx.x, 0}, ahead = turn;
    if (turn.set >= sets) return;
    const bool multiplies = warp < WARPS;

    typename F::Part words[OWN][2];
    u32 scale[OWN];
    // Where this lane's group of each of its rows begins, in the first turn of a set; null: there is no such row.
    const u8* data[OWN];
    const u16 *scales_of[OWN], *biases_of[OWN];
    auto load = [&] {
        if (ahead.from == 0) {
            u32 set = ahead.set;
            const Matmul& part = part_of<ROWS>(p, set);
            const bool there = multiplies && ahead.set < sets;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 r = set * ROWS + row + i;
                data[i] = nullptr;
                if (!there || r >= part.rows) continue;
                const u64 own = part.in_matrix(r), at = own * part.matrix.groups + (in_row >> log_wide);
                data[i] = part.matrix.data + own * part.matrix.row_bytes + in_row * (8 * F::BITS);
                scales_of[i] = (const u16*)part.matrix.scales + at;
                biases_of[i] = (const u16*)part.matrix.biases + at;
            }
        }
        const bool inside = ahead.from + in_row < groups;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const bool there = inside && data[i];
            const u8* from = data[i] + ahead.from * (8 * F::BITS);
            words[i][0].load(from, there);
            words[i][1].load(from + 4 * F::BITS, there);
            const u32 at = ahead.from >> log_wide;
            scale[i] = there ? __ldcs(scales_of[i] + at) | (u32)__ldcs(biases_of[i] + at) << 16 : 0;
        }
        ahead.next(LANES, groups, p.gated);
    };
    load();
    float* weights = kept + first.cols;
    if (p.norm.weight) {
        for (u32 i = threadIdx.x; i < first.cols / 4; i += blockDim.x) cp_async_16((float4*)weights + i, (const float4*)p.norm.weight + i);
    }
    begin();
    const float of_token = stage(p.x.row(0), p.norm, first.cols, x, kept, weights);
    __syncthreads();
    float acc = 0.0f, gate = 0.0f;
    Turn before = turn;
    bool there = false;
    u32 buffer = 0;
    while (true) {
        const bool more = turn.set < sets;
        if (multiplies && more) {
            const u32 g = min(turn.from + in_row, groups - 1);
            const float by = x.powers[g];
            float high[OWN], low[OWN];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint4 h0 = x.high[2 * half * x.stride + g], h1 = x.high[(2 * half + 1) * x.stride + g];
                const uint4 l0 = x.low[2 * half * x.stride + g], l1 = x.low[(2 * half + 1) * x.stride + g];
#pragma unroll
                for (u32 i = 0; i < OWN; i++) {
                    const float h = F::part_sum(words[i][half].words, h0, h1), l = F::part_sum(words[i][half].words, l0, l1);
                    high[i] = half ? add(high[i], h) : h;
                    low[i] = half ? add(low[i], l) : l;
                }
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 at = buffer * BUFFER + (row + i) * STRIDE + in_row;
                // Both sums are exact; up to four bits of weights, so is this one.
                sums[at] = mul(fma(256.0f, high[i], low[i]), by);
                scales[at] = scale[i];
            }
        }
        load();
        if (!multiplies && there) {
            u32 set = before.set;
            const Matmul& part = part_of<ROWS>(p, set);
            const float *of = sums + (buffer ^ 1) * BUFFER + lane * STRIDE, *m = x.sums + before.from;
            const u32 *pair = scales + (buffer ^ 1) * BUFFER + lane * STRIDE, here = min(LANES, groups - before.from);
            u32 from = 0;
#pragma unroll 1
            for (; from + 8 <= here; from += 8) {
                float ss[8], bb[8], dd[8], mm[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u32 raw = pair[from + i];
                    ss[i] = half_value(raw & 0xffff, type);
                    bb[i] = half_value(raw >> 16, type);
                    dd[i] = of[from + i];
                    mm[i] = m[from + i];
                }
#pragma unroll
                for (u32 i = 0; i < 8; i++) acc = fma(bb[i], mm[i], fma(ss[i], dd[i], acc));
            }
#pragma unroll 1
            for (; from < here; from++) {
                const u32 raw = pair[from];
                acc = fma(half_value(raw >> 16, type), m[from], fma(half_value(raw & 0xffff, type), of[from], acc));
            }
            if (before.from + LANES >= groups) {
                const u32 r = set * ROWS + lane;
                end_chain(p, part, before.set, r, r < part.rows, mul(acc, of_token), gate);
                acc = 0.0f;
            }
        }
        if (!more) return;
        before = turn;
        there = true;
        turn.next(LANES, groups, p.gated);
        buffer ^= 1;
        __syncthreads();
    }
}

#define GEMV_ONE(name, F) \
    extern "C" __global__ void __launch_bounds__(544, 2) gemv_one_##name(const __grid_constant__ OneToken p) { gemv_one<F, 32>(p); } \
    extern "C" __global__ void __launch_bounds__(544, 2) gemv_one_##name##_short(const __grid_constant__ OneToken p) { gemv_one<F, 16>(p); }

INT11_FORMATS(GEMV_ONE)
