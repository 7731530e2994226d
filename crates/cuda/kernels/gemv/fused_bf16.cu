// Products of bf16 pairs for one token, with what comes before the product and behind it (gemv/fused.cu says what that is). Half a warp takes a row, a lane two
// columns of each 32.
#include "gemv/fused.cuh"
#include "gemv/parts.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

// Steps of 32 columns in a piece of a row. Two pieces of a warp are under way.
static const u32 PIECE_STEPS = 16, PIECE_COLUMNS = 32 * PIECE_STEPS;

// x as floats, rounded to bf16, by the whole block; zeros behind it up to a whole piece. The norm's weights are on their way to `weights`.
template <int THREADS> __device__ __forceinline__ void stage_rounded(const NormedRow& p, float* to, const float* weights) {
    __shared__ float inverse;
    const u32 eights = p.cols / 8, padded = (p.cols + PIECE_COLUMNS - 1) / PIECE_COLUMNS * (PIECE_COLUMNS / 8);
    float v[8] = {}, inv = 1.0f;
    auto leave = [&](u32 i) {
        ((float4*)to)[2 * i] = make_float4(v[0], v[1], v[2], v[3]);
        ((float4*)to)[2 * i + 1] = make_float4(v[4], v[5], v[6], v[7]);
    };
    load_eight_written(v, p.x, threadIdx.x, threadIdx.x < eights);
    if (p.norm) {
        if (threadIdx.x < eights) leave(threadIdx.x);
#pragma unroll 1
        for (u32 i = 2 * THREADS + threadIdx.x; i < 2 * eights; i += THREADS) ((float4*)to)[i] = __ldcg((const float4*)p.x + i);
        cp_async_wait_all();
        __syncthreads();
        if (threadIdx.x < WARP) {
            float own = inverse_rms_256(to, p.cols, p.eps);
            if (threadIdx.x == 0) inverse = own;
        }
        __syncthreads();
        inv = inverse;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < padded; i += THREADS) {
        const bool inside = i < eights;
        if (i >= THREADS) {
            if (p.norm) load_eight(v, to, i, inside);
            else load_eight_written(v, p.x, i, inside);
        }
        if (p.norm) {
            float w[8];
            load_eight(w, weights, i, inside);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = mul(mul(v[k], inv), w[k]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = inside ? from_bf16(to_bf16(v[k])) : 0.0f;
        leave(i);
    }
    __syncthreads();
}

template <int THREADS> __device__ __forceinline__ void gemv_fused_bf16(const GemvFused& p) {
    // Of no weights: what is added to a sum is a zero that leaves its sign as it is.
    const u32 NOTHING = 0x80008000u;
    const u32 lane = threadIdx.x % 16, row_in_set = threadIdx.x % WARP / 16, steps = p.cols / 32, pieces = (steps + PIECE_STEPS - 1) / PIECE_STEPS;
    const u32 task = p.gated ? 2 : 1, warps = gridDim.x * (THREADS / WARP);
    float *x = smem, *weights = x + pieces * PIECE_COLUMNS;
    if (p.norm) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += THREADS) cp_async_16((float4*)weights + i, (const float4*)p.norm + i);
    }
    auto part_of = [&](u32 set) -> const FusedMatrix& { return p.parts[p.gated ? set & 1 : set < p.second ? 0 : set < p.third ? 1 : 2]; };
    auto row_of = [&](u32 set) { return 2 * (p.gated ? set >> 1 : set) + row_in_set; };
    auto advance = [&](u32& set, u32& piece) {
        if (++piece < pieces) return;
        piece = 0;
        set = set_after(set, 1, task, warps);
    };
    // 1. Neighbouring rows go to different multiprocessors. What is asked for next, and what is computed next.
    const u32 first = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * task;
    u32 asked = first, asked_piece = 0, set = first, piece = 0;
    u32 words[2][PIECE_STEPS];
    auto ask = [&](u32 (&to)[PIECE_STEPS]) {
        const u32* from = (const u32*)(part_of(asked).data + row_of(asked) * p.row_bytes) + asked_piece * (PIECE_STEPS * 16) + lane;
        const u32 there = asked < p.sets ? steps - asked_piece * PIECE_STEPS : 0;
#pragma unroll
        for (u32 s = 0; s < PIECE_STEPS; s++) to[s] = s < there ? __ldcs(from + 16 * s) : NOTHING;
        advance(asked, asked_piece);
    };
    ask(words[0]);
    ask(words[1]);
    // Of a long row the rest comes nearer.
    if (asked == first && first < p.sets) {
        const u8* row = part_of(first).data + row_of(first) * p.row_bytes;
#pragma unroll 1
        for (u32 at = 2 * 64 * PIECE_STEPS + lane * 128; at < 2 * p.cols; at += 16 * 128) prefetch(row + at);
    }
    begin();
    stage_rounded<THREADS>({p.x, p.norm, p.eps, p.cols}, x, weights);
    // 2. Products
    float acc = 0.0f, gate = 0.0f, before = 0.0f;
#pragma unroll 1
    while (set < p.sets) {
#pragma unroll
        for (int d = 0; d < 2; d++) {
            float* to = nullptr;
            if (lane == 0 && set < p.sets) to = result_of(p, set, row_of(set), 2);
            if (p.accumulate && piece == 0 && to) before = *to;
            const float2* own = (const float2*)(x + piece * PIECE_COLUMNS) + lane;
#pragma unroll
            for (u32 s = 0; s < PIECE_STEPS; s++) {
                float2 v = own[16 * s];
                acc = flushed_fma(bits(words[d][s] & 0xffff0000u), v.y, acc);
                acc = flushed_fma(bits(words[d][s] << 16), v.x, acc);
            }
            ask(words[d]);
            if (piece + 1 == pieces) {
                float y = lane_tree(acc);
                acc = 0.0f;
                if (p.gated && set % 2 == 0) gate = y;
                else if (to) *to = p.gated ? mul(silu(gate), y) : p.accumulate ? add(before, y) : y;
            }
            advance(set, piece);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 2) gemv_fused_bf16_bf16(const __grid_constant__ GemvFused p) { gemv_fused_bf16<512>(p); }
