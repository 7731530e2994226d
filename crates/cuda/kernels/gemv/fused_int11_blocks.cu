// Products of weights in blocks with integers of 11 bits for one token, as a layer's part: gemv/fused_int11.cu for groups of 32 and 16 columns.
//
// A lane takes 64 columns of a row at a time, two or four groups. What a row's chain needs of a turn goes to shared memory: of each group the sum of (q - zero) n and the
// scale, and where types have them the bias; of the token, the sum of n.
#include "format/block_scales.cuh"
#include "format/list.cuh"
#include "format/slices.cuh"
#include "gemv/one_turns.cuh"
#include "prim/cp_async.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// Sums of sixteen bytes' products.
__device__ __forceinline__ int sum_sixteen(const u32* q, uint4 x) { return dp4a(q[3], x.w, dp4a(q[2], x.z, dp4a(q[1], x.y, dp4a(q[0], x.x, 0)))); }

// The sum of the sixteen integers of a quarter.
__device__ __forceinline__ int sum_of(uint4 high, uint4 low) {
    const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    return 256 * sum_sixteen(ones, high) + sum_sixteen(ones, low);
}

// A row has LANES lanes.
template <class F, u32 LANES> __device__ __forceinline__ void gemv_one_blocks(const OneToken& p) {
    typedef typename F::Integers B;
    const u32 HALVES = B::HALVES, PIECES = 2 * HALVES, ROWS = WARPS * WARP / LANES, STRIDE = LANES * PIECES + 1, BUFFER = ROWS * STRIDE;
    const Matmul& first = p.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, in_row = lane % LANES, groups = first.cols / 64;
    const u32 type = first.matrix.type, row = warp * (ROWS / WARPS) + lane / LANES;
    const int zero = (int)zero_of(type);
    const bool biased = is_biased(type);
    u32 sets = 0;
    for (u32 k = 0; k < 3; k++) sets += (p.parts[k].rows + ROWS - 1) / ROWS;
    const Slices x = slices(smem, groups);
    // Of each piece of the token what is multiplied with its bias, or else subtracted from its sum; what chains need of two turns.
    u32* pieces = (u32*)behind(x, groups);
    float *sums = (float*)(pieces + 4 * groups), *scales = sums + 2 * BUFFER, *biases = scales + 2 * BUFFER;
    float* kept = p.keeps ? biases + (biased ? 2 * BUFFER : 0) : nullptr;
    Turn turn = {p.gated ? 2 * blockIdx.x : blockIdx.x, 0}, ahead = turn;
    if (turn.set >= sets) return;
    const bool multiplies = warp < WARPS;
    const typename B::Values values(type);

    typename B::Wide words[2];
    u32 codes[2], unit;
    // Where this lane's row begins; null: there is no such row.
    const u8* data;
    const u64 to_codes = first.matrix.scales - first.matrix.data, to_units = first.matrix.biases - first.matrix.data;
    auto load = [&] {
        if (ahead.from == 0) {
            u32 set = ahead.set;
            const Matmul& part = part_of<ROWS>(p, set);
            const bool there = multiplies && ahead.set < sets;
            const u32 r = set * ROWS + row;
            data = there && r < part.rows ? part.matrix.data + part.in_matrix(r) * part.matrix.row_bytes : nullptr;
        }
        const u32 g = ahead.from + in_row;
        const bool there = g < groups && data;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            words[k].load(data + (2 * g + k) * (4 * B::BITS), there);
            codes[k] = there ? B::codes(data + to_codes, type, 2 * g + k) : 0;
        }
        unit = there ? unit_of_column(data + to_units, type, g * 64) : 0;
        ahead.next(LANES, groups, p.gated);
    };
    load();
    float* weights = kept + first.cols;
    if (p.norm.weight) {
        for (u32 i = threadIdx.x; i < first.cols / 4; i += blockDim.x) cp_async_16((float4*)weights + i, (const float4*)p.norm.weight + i);
    }
    begin();
    const float of_token = encode_token<WARPS + 1>(p.x.row(0), p.norm, first.cols, kept, weights, [&](u32 i, const float (&v)[8], int e, float sum) { put_slices(x, i, v, e, sum); });
    __syncthreads();
    for (u32 i = threadIdx.x; i < PIECES * groups; i += blockDim.x) {
        const u32 g = i / PIECES, at = i % PIECES * (4 / PIECES) * x.stride + g;
        int n = sum_of(x.high[at], x.low[at]);
        if (HALVES == 1) n += sum_of(x.high[at + x.stride], x.low[at + x.stride]);
        pieces[i] = biased ? bits(mul((float)n, x.powers[g])) : (u32)(zero * n);
    }
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
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 near = 2 * half * x.stride + g, far = near + x.stride;
                const uint4 h0 = x.high[near], h1 = x.high[far], l0 = x.low[near], l1 = x.low[far];
                u32 q[8];
                B::unpack(words[half].words, q, values);
                const int near_sum = 256 * sum_sixteen(q, h0) + sum_sixteen(q, l0), far_sum = 256 * sum_sixteen(q + 4, h1) + sum_sixteen(q + 4, l1);
                const u32 at = buffer * BUFFER + row * STRIDE + in_row * PIECES + half * HALVES;
#pragma unroll
                for (u32 h = 0; h < HALVES; h++) {
                    const float2 scale = scale_and_bias<B>(B::code(codes[half], h), unit, type);
                    const int sum = HALVES == 1 ? near_sum + far_sum : h ? far_sum : near_sum;
                    sums[at + h] = mul((float)(biased ? sum : sum - (int)pieces[g * PIECES + half * HALVES + h]), by);
                    scales[at + h] = scale.x;
                    if (biased) biases[at + h] = scale.y;
                }
            }
        }
        load();
        if (!multiplies && there) {
            u32 set = before.set;
            const Matmul& part = part_of<ROWS>(p, set);
            const u32 at = (buffer ^ 1) * BUFFER + lane % ROWS * STRIDE, here = min(LANES, groups - before.from) * PIECES;
            if (biased) {
#pragma unroll 8
                for (u32 i = 0; i < here; i++) acc = fma(biases[at + i], bits(pieces[before.from * PIECES + i]), fma(scales[at + i], sums[at + i], acc));
            } else {
#pragma unroll 8
                for (u32 i = 0; i < here; i++) acc = fma(scales[at + i], sums[at + i], acc);
            }
            if (before.from + LANES >= groups) {
                const u32 r = set * ROWS + lane;
                end_chain(p, part, before.set, r, lane < ROWS && r < part.rows, mul(acc, of_token), gate);
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

// Lanes of a row, of which each has two groups or four.
#define GEMV_ONE(name, F) \
    extern "C" __global__ void __launch_bounds__(544, 2) gemv_one_##name(const __grid_constant__ OneToken p) { gemv_one_blocks<F, F::Integers::HALVES == 1 ? 32 : 16>(p); }

INT11_BLOCK_FORMATS(GEMV_ONE)
