// A mixture of experts for one token, whose matrices are all on the device, come there in time, or are multiplied by the host. Three kernels: the router norms
// for itself and leaves what it normed encoded (moe/router_single.cu); gate and up choose the experts in each block for themselves, wait for those that are not
// on the device, and leave the hidden row encoded; down sums the experts. As in gemv/fused.cu, the time between the kernels is what counts. Where loads must be
// under way together, no branch may lie between them.
//
// Down chooses before its wait, from what the kernel before the previous one has written. That kernel has ended, since all blocks of the previous kernel saw
// its end before this one began. Such reads go past the first-level cache.
#pragma once
#include "format/matrix.cuh"
#include "gemv/parts.cuh"
#include "moe/route.cuh"
#include "moe/topk.cuh"
#include "prim/numerics.cuh"

static const u32 PROJECTIONS = 3;

struct SingleToken {
    // One token's, without groups of experts. Nothing of it is written.
    Route route;
    // The normed row, in quarters.
    const u8* x;
    // [projections, experts]
    const Matrix* table;
    // The expert that all tokens take; no data where there is none.
    Matrix shared[PROJECTIONS];
    // The shared expert's gate before the sigmoid; null: its weight is 1.
    const float* gate;
    // [slots, intermediate] encoded, of experts in ascending order, the one that all take last: quarters, then a scale and a mean of each 32 columns.
    u8* hidden;
    // [cols]
    float* residual;
    // Where the host is told which experts were chosen, ascending, [MOST_SLOTS] in its memory, and answers behind them: 1, once each of them is on the device or computed
    // by the host, and twice the bits of the slots whose experts the host has computed. Null where all are on the device.
    u32* question;
    // [MAX_EXPERTS / WARP]: bits of the experts that are on the device to stay. Those of the token's wait for no answer; where all are there, none is given.
    const u32* here;
    // The answer as the first block has it.
    u32* answer;
    // [cols]: what was normed, and where the host wants it that computes experts; and what these give, [such slots, cols] in its memory.
    const float* normed;
    float* input;
    const float* outputs;
    u32 cols;
    u32 intermediate;
    u32 slots;
    u32 type;
};

// Bits of the experts that are on the device to stay, a word a lane. The host changes them only while the device waits for an answer, or is idle: for what comes behind.
__device__ __forceinline__ u32 here_of(const SingleToken& p) { return __ldcg(p.here + threadIdx.x % (MAX_EXPERTS / WARP)); }

// The slots whose experts are not there, by a whole warp.
__device__ __forceinline__ u32 absent_of(const SingleToken& p, const Taken& taken, u32 here) {
    const u32 lane = threadIdx.x % WARP, expert = taken.experts[min(lane, p.route.k - 1)], word = __shfl_sync(ALL, here, expert / WARP);
    return __ballot_sync(ALL, lane < p.route.k && !(word >> expert % WARP & 1));
}

// Where a projection of the expert in a slot lies. CHANGES: that it may since the kernel began, so that it is read past the first-level cache.
template <bool CHANGES> __device__ __forceinline__ FusedMatrix matrix_of(const SingleToken& p, const Taken& taken, u32 projection, u32 slot) {
    FusedMatrix place = {p.shared[projection].data, p.shared[projection].scales, p.shared[projection].biases, nullptr};
    if (slot < p.route.k) {
        const Matrix& m = p.table[projection * p.route.experts + taken.experts[slot]];
        auto now = [](const u8* const& at) { return CHANGES ? (const u8*)__ldcg((const u64*)&at) : at; };
        place = {now(m.data), now(m.scales), now(m.biases), nullptr};
    }
    return place;
}
