// A mixture of experts for one token, whose matrices are all on the device, or come there in time, or are multiplied by the host: three kernels. The router norms for
// itself, and leaves what it normed encoded; who multiplies gate and up chooses the experts for itself, in each block, waits for those that are not on the device, and
// leaves what is hidden encoded; who multiplies down sums the experts. As in rows_one.cu, what counts is the time between the kernels. Where loads shall be under way
// together, no branch may lie between them.
//
// Down chooses before its wait, from what the kernel before the one before it has written: that one has ended, since all blocks of the kernel before this one have
// seen its end before this one began. Such reads go past the first-level cache.
#pragma once
#include "choose.cu"
#include "route_one.cu"

static const u32 PROJECTIONS = 3;

struct ExpertsOne {
    // One token's, without groups of experts; nothing of it is written.
    Route route;
    // What was normed: quarters.
    const u8* x;
    // [projections, experts]
    const Matrix* table;
    // The expert that all tokens take; no data where there is none.
    Matrix shared[PROJECTIONS];
    // Before the sigmoid; null: 1.
    const float* gate;
    // [slots, intermediate] encoded, of experts in ascending order, the one that all take last: quarters, then a scale and a mean of each 32 columns.
    u8* hidden;
    // [cols]
    float* residual;
    // Where the host is told which experts were chosen, ascending, [MOST_SLOTS] in its memory, and answers behind them: 1, once each of them is on the device or computed
    // by the host, and twice the bits of the slots whose experts the host has computed. Null where all are on the device.
    u32* question;
    // [MOST_EXPERTS / WARP]: bits of the experts that are on the device to stay. Those of the token's wait for no answer; where all are there, none is given.
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

static const u32 GATE_UP_THREADS = 256, DOWN_THREADS = 256, DOWN_WARPS = DOWN_THREADS / WARP;
// Bits of the experts that are on the device to stay, a word a lane. The host changes them only while the device waits for an answer, or is idle: for what comes behind.
__device__ __forceinline__ u32 here_of(const ExpertsOne& p) { return __ldcg(p.here + threadIdx.x % (MOST_EXPERTS / WARP)); }

// The slots whose experts are not, by a whole warp.
__device__ __forceinline__ u32 absent_of(const ExpertsOne& p, const Taken& taken, u32 here) {
    const u32 lane = threadIdx.x % WARP, expert = taken.experts[min(lane, p.route.k - 1)], word = __shfl_sync(ALL, here, expert / WARP);
    return __ballot_sync(ALL, lane < p.route.k && !(word >> expert % WARP & 1));
}

// Beside an expert in a question: all are there, and nobody waits for an answer.
static const u32 GOES_ON = 1u << 31;

// Tells the host which experts the token takes, and waits until it has answered, if some are `absent`: the first block.
__device__ __forceinline__ void ask(const ExpertsOne& p, const Taken& taken, u32 absent) {
    volatile u32* question = p.question;
    if (absent && p.input) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += GATE_UP_THREADS) ((float4*)p.input)[i] = __ldcg((const float4*)p.normed + i);
        // It is there before the host sees that it is asked.
        __threadfence_system();
        __syncthreads();
    }
    if (threadIdx.x < p.route.k) question[threadIdx.x] = taken.experts[threadIdx.x] | (absent ? 0 : GOES_ON);
    __syncwarp();
    if (absent && threadIdx.x == 0) {
        u32 answer;
        while ((answer = question[MOST_SLOTS]) == 0) __nanosleep(20);
        __threadfence_system();
        *(volatile u32*)p.answer = answer;
        __threadfence();
    }
}

// Until the first block has the answer: whose experts the host has computed, by slots.
__device__ __forceinline__ u32 answered(const ExpertsOne& p) {
    u32 answer;
    while ((answer = *(volatile u32*)p.answer) == 0) __nanosleep(20);
    __threadfence();
    return answer >> 1;
}

// Where a projection of the expert in a slot lies. CHANGES: that it may since the kernel began, so that it is read past the first-level cache.
template <bool CHANGES> __device__ __forceinline__ OnePart place_of(const ExpertsOne& p, const Taken& taken, u32 projection, u32 slot) {
    OnePart place = {p.shared[projection].data, p.shared[projection].scales, p.shared[projection].biases, nullptr};
    if (slot < p.route.k) {
        const Matrix& m = p.table[projection * p.route.experts + taken.experts[slot]];
        auto now = [](const u8* const& at) { return CHANGES ? (const u8*)__ldcg((const u64*)&at) : at; };
        place = {now(m.data), now(m.scales), now(m.biases), nullptr};
    }
    return place;
}

// Brings a row of a matrix nearer, from a byte on, by so many lanes, of which this is `lane`.
__device__ __forceinline__ void prefetch_row(const u8* row, u32 from, u32 row_bytes, u32 lane, u32 lanes) {
#pragma unroll 1
    for (u32 at = from + 128 * lane; at < row_bytes; at += 128 * lanes) prefetch(row + at);
}

// Lanes that a row of gate and one of up have side by side, whose groups are of chain `lane mod 4`: the first four have so many of a chain's groups, the other four
// those that follow.
static const u32 ROW_LANES = 8, ROW_UNITS = 4, ROW_GROUPS = ROW_LANES * ROW_UNITS;
// Columns of what is hidden that a warp takes together, and a block: a group of activations.
static const u32 HIDDEN_OF_WARP = WARP / ROW_LANES, HIDDEN = GATE_UP_THREADS / WARP * HIDDEN_OF_WARP;
static_assert(HIDDEN == 32);

// Encodes 32 columns of what is hidden, one a lane, as `encode_eight` does it.
__device__ __forceinline__ void encode_hidden(float v, u32 task, u32 groups, u8* hidden) {
    const u32 lane = threadIdx.x % WARP, eight = 4 * task + lane / 8, stride = groups + 1;
    const float a = bits(greatest_of_warp(bits(v) & 0x7fffffffu)), inv = div(127.0f, a), scale = div(a, 127.0f);
    const u32 keep = is_finite(inv) && is_finite(a) ? ALL : 0;
    const i8 q = (i8)(keep & bits(add(mul(v, inv), 12582912.0f)));
    hidden[16 * (eight / 2 % 4 * stride + eight / 8) + eight % 2 * 8 + lane % 8 / 2 + lane % 2 * 4] = (u8)q;
    const int sum = sum_of_warp(q);
    float* scales = (float*)(hidden + 64 * stride);
    if (lane == 0) {
        scales[task] = scale;
        scales[2 * groups + task] = mul(scale, (float)sum);
    }
}

// Eight lanes take a column's gate and up. Shared memory: quarters of x, with room for groups up to a multiple of ROW_GROUPS; behind each sixteen four are left out, so
// that those that a row's lanes read at once are in different banks. ASKS: for experts that may not be on the device; code that is only stepped over costs a token, too.
template <int BITS, bool ASKS> __device__ __forceinline__ void multiply_gate_up(const ExpertsOne& p) {
    WATCH();
    __shared__ Taken taken;
    // Of two tasks one behind the other.
    __shared__ float hidden[2][HIDDEN];
    // Slots whose experts are still to come, and those whose experts the host computes.
    __shared__ volatile u32 absent, by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = p.cols / 64, type = p.type;
    const u32 in_row = lane % ROW_LANES, of_warp = lane / ROW_LANES, sub = in_row / 4, first = 4 * ROW_UNITS * sub + in_row % 4;
    const u32 line = 128 * (blockIdx.x * GATE_UP_THREADS + threadIdx.x);
    if (line < PROJECTIONS * p.route.experts * sizeof(Matrix)) prefetch((const u8*)p.table + line);
    const u32 tasks = p.slots * p.intermediate / HIDDEN, all = p.slots * p.intermediate / 64, of_slot = p.intermediate / HIDDEN, row_bytes = groups * (8 * BITS);
    u32 task = blockIdx.x, slot = task / of_slot, turn = 0;
    computed(slot);
    Quarters x;
    x.q = (uint4*)room;
    x.stride = (groups + ROW_GROUPS - 1) / ROW_GROUPS * (ROW_GROUPS / 4 * 5);
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    const u32 here = ASKS ? here_of(p) : 0;
    STAMP(1, 0);
    begin();
    STAMP(1, 1);
    // By those first who do not choose.
#pragma unroll 1
    for (u32 i = GATE_UP_THREADS - 1 - threadIdx.x; i < 4 * groups + (3 * groups + 3) / 4; i += GATE_UP_THREADS) {
        const u32 quarter = i % 4, group = i / 4, behind = i - 4 * groups;
        if (group < groups) copy_later(x.q + quarter * x.stride + group + group / 16 * 4, (const uint4*)p.x + quarter * (groups + 1) + group);
        else copy_later((uint4*)x.sx + behind, (const uint4*)p.x + 4 * (groups + 1) + behind);
    }
    if (ASKS && threadIdx.x == GATE_UP_THREADS - 1) absent = by_host = 0;
    choose_one(p.route, GATE_UP_THREADS / WARP, false, taken);
    copied();
    __syncthreads();
    if (ASKS) {
        const u32 gone = absent_of(p, taken, here);
        if (blockIdx.x == 0) ask(p, taken, gone);
        if (threadIdx.x == 0) absent = gone;
        __syncthreads();
    }
    STAMP(1, 2);
    x.q += first + 4 * sub, x.sx += first, x.m += first;
#pragma unroll 1
    while (task < tasks) {
        if (ASKS && absent >> slot & 1) {
            __syncthreads();
            if (threadIdx.x == 0) absent = 0, by_host = answered(p);
            __syncthreads();
        }
        if (!ASKS || !(by_host >> slot & 1)) {
            // The lane's rows, from its first group on.
            const u64 column = (task - slot * of_slot) * HIDDEN + warp * HIDDEN_OF_WARP + of_warp;
            OnePart rows[2];
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                rows[e] = place_of<ASKS>(p, taken, e, slot);
                rows[e].data += column * row_bytes + first * (8 * BITS);
                rows[e].scales += 2 * (column * groups + first);
                rows[e].biases += 2 * (column * groups + first);
            }
            Quarters own = x;
            float y[2] = {0.0f, 0.0f};
#pragma unroll 1
            for (u32 from = 0; from < groups; from += ROW_GROUPS) {
                u32 words[2][ROW_UNITS][2 * BITS], s[2][ROW_UNITS], b[2][ROW_UNITS];
                auto load = [&](const bool whole) {
#pragma unroll
                    for (u32 d = 0; d < ROW_UNITS; d++) {
#pragma unroll
                        for (u32 e = 0; e < 2; e++) load_unit<BITS>(words[e][d], s[e][d], b[e][d], rows[e], 0, 0, 0, 4 * d, whole || from + first + 4 * d < groups);
                    }
                };
                if (from + ROW_GROUPS <= groups) load(true);
                else load(false);
                // The rest of the rows comes nearer.
                if (from == 0 && groups > ROW_GROUPS) {
                    prefetch_row(rows[0].data - first * (8 * BITS), ROW_GROUPS * (8 * BITS), row_bytes, in_row, ROW_LANES);
                    prefetch_row(rows[1].data - first * (8 * BITS), ROW_GROUPS * (8 * BITS), row_bytes, in_row, ROW_LANES);
                }
                float t[2][ROW_UNITS], m[ROW_UNITS], scales[2][ROW_UNITS], biases[2][ROW_UNITS];
#pragma unroll
                for (u32 d = 0; d < ROW_UNITS; d++) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        unit_sum<BITS>(words[e][d], own, 4 * d, t[e][d], m[d]);
                        scales[e][d] = half_value(s[e][d], type);
                        biases[e][d] = half_value(b[e][d], type);
                    }
                }
                STAMP(1, 3);
                // From those who have their beginning to those who have their end. What is not there is left out.
#pragma unroll
                for (u32 k = 0; k < ROW_LANES / 4; k++) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        float end = y[e];
#pragma unroll
                        for (u32 d = 0; d < ROW_UNITS; d++) {
                            const float next = fma(biases[e][d], m[d], fma(scales[e][d], t[e][d], end));
                            end = from + first + 4 * d < groups ? next : end;
                        }
                        y[e] = __shfl_sync(ALL, end, 4 * k + lane % 4, ROW_LANES);
                    }
                }
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    rows[e].data += ROW_GROUPS * (8 * BITS);
                    rows[e].scales += 2 * ROW_GROUPS;
                    rows[e].biases += 2 * ROW_GROUPS;
                }
                own.q += ROW_GROUPS / 4 * 5, own.sx += ROW_GROUPS, own.m += ROW_GROUPS;
            }
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                y[e] = add(y[e], __shfl_xor_sync(ALL, y[e], 2));
                y[e] = add(y[e], __shfl_xor_sync(ALL, y[e], 1));
            }
            if (in_row == 0) hidden[turn][warp * HIDDEN_OF_WARP + of_warp] = mul(silu(y[0]), y[1]);
            __syncthreads();
            STAMP(1, 4);
            if (warp == 0) encode_hidden(hidden[turn][lane], task, all, p.hidden);
            turn ^= 1;
        }
        task += gridDim.x;
        while (task >= (slot + 1) * of_slot) slot++;
    }
    STAMP(1, 5);
}

// Experts that a warp has side by side, four lanes each.
static const u32 OCTET = 8;

// A warp takes a row of down of all the token's experts; what they give is summed by as many threads as there are rows. Shared memory: what is hidden, as it lies in
// memory. UNITS: of each slot a round takes four groups, and so many rounds of slots are under way; of three there are always all.
template <int BITS, int UNITS> __device__ __forceinline__ void multiply_down(const ExpertsOne& p) {
    WATCH();
    __shared__ Taken taken;
    __shared__ float outputs[MOST_SLOTS][DOWN_WARPS];
    // Read again where it is looked at: registers are few.
    __shared__ volatile u32 by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chain = lane & 3, inside = p.intermediate / 64, all = p.slots * inside, rounds = (inside + 3) / 4;
    const u32 units = (p.slots + OCTET - 1) / OCTET * rounds, type = p.type;
    u32 first = blockIdx.x * DOWN_WARPS;
    const u32 here = p.here ? here_of(p) : 0;
    // Who multiplies gate and up, before this, has waited for the router.
    if (threadIdx.x == DOWN_THREADS - 1) {
        by_host = 0;
        if (p.slots > p.route.k) taken.weights[p.route.k] = p.gate ? sigmoid(__ldcg(p.gate)) : 1.0f;
    }
    choose_one(p.route, DOWN_WARPS, true, taken);
    __syncthreads();
    if (p.here && absent_of(p, taken, here)) {
        // And for the host, once it has ended.
        await();
        if (threadIdx.x == 0) by_host = __ldcg(p.answer) >> 1;
        __syncthreads();
    }
    STAMP(2, 0);
    OnePart parts[MOST_SLOTS / OCTET];
#pragma unroll
    for (int i = 0; i < MOST_SLOTS / OCTET; i++) {
        const u32 slot = i * OCTET + lane / 4;
        parts[i] = place_of<false>(p, taken, 2, slot < p.slots ? slot : 0);
    }
    const u64 row_bytes = inside * (8 * BITS);
    const Quarters x = quarters(room, all);
    const float2* means = (const float2*)(x.sx + all);
    bool waits = true;
#pragma unroll 1
    while (true) {
        const u32 row = first + warp;
        float y = 0.0f, before = 0.0f;
        if (threadIdx.x < DOWN_WARPS) before = __ldcg(p.residual + first + threadIdx.x);
        u32 octet = 0, round = 0;
#pragma unroll 1
        for (u32 from = 0; from < units; from += UNITS) {
            u32 words[UNITS][2 * BITS], s[UNITS], b[UNITS], o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 group = r * 4 + chain;
                const bool there = o * OCTET + lane / 4 < p.slots && group < inside;
                // Field by field: an array that is indexed would not be registers.
                const OnePart part = {o ? parts[1].data : parts[0].data, o ? parts[1].scales : parts[0].scales, o ? parts[1].biases : parts[0].biases, nullptr};
                load_unit<BITS>(words[d], s[d], b[d], part, row, row_bytes, inside, group, there);
                if (++r == rounds) {
                    r = 0;
                    o++;
                }
            }
            if (from == 0 && by_host) {
                // What the host's experts give for the rows of the block, while the weights are under way.
                const u32 slot = threadIdx.x / DOWN_WARPS, own = threadIdx.x % DOWN_WARPS;
                if (slot < MOST_SLOTS && by_host >> slot & 1) {
                    const volatile float* of_slot = p.outputs + __popc(by_host & ((1u << slot) - 1)) * p.cols;
                    outputs[slot][own] = of_slot[first + own];
                }
            }
            if (waits) {
                STAMP(2, 1);
                begin();
                STAMP(2, 2);
                // By way of registers what they hold: loads that go straight to shared memory take longer.
                const u32 pieces = 4 * (all + 1) + all, i = threadIdx.x;
                const uint4* hidden = (const uint4*)p.hidden;
                uint4* to = (uint4*)room;
#pragma unroll 1
                for (u32 j = i + 2 * DOWN_THREADS; j < pieces; j += DOWN_THREADS) copy_later(to + j, hidden + j);
                const uint4 near = __ldcg(hidden + min(i, pieces - 1)), far = __ldcg(hidden + min(i + DOWN_THREADS, pieces - 1));
                to[min(i, pieces - 1)] = near;
                to[min(i + DOWN_THREADS, pieces - 1)] = far;
                copied();
                __syncthreads();
                waits = false;
                STAMP(2, 3);
            }
            float t[UNITS], m[UNITS];
            bool there[UNITS];
            o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 slot = o * OCTET + lane / 4, group = r * 4 + chain;
                there[d] = slot < p.slots && group < inside;
                const u32 g = there[d] ? slot * inside + group : 0;
                float unused;
                unit_sum<BITS>(words[d], x, g, t[d], unused);
                m[d] = add(means[g].x, means[g].y);
                if (++r == rounds) {
                    r = 0;
                    o++;
                }
            }
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                if (UNITS != 3 && from + d >= units) break;
                const float next = fma(half_value(b[d], type), m[d], fma(half_value(s[d], type), t[d], y));
                y = there[d] ? next : y;
                if (++round < rounds) continue;
                // All of an octet's groups are done: their chains meet.
                y = add(y, __shfl_xor_sync(ALL, y, 2));
                y = add(y, __shfl_xor_sync(ALL, y, 1));
                const u32 slot = octet * OCTET + lane / 4;
                if (chain == 0 && slot < p.slots && !(by_host >> slot & 1)) outputs[slot][warp] = y;
                y = 0.0f;
                round = 0;
                octet++;
            }
        }
        __syncthreads();
        if (threadIdx.x < DOWN_WARPS) {
            float sum = 0.0f;
#pragma unroll 8
            for (u32 slot = 0; slot < p.slots; slot++) sum = fma(taken.weights[slot], outputs[slot][threadIdx.x], sum);
            p.residual[first + threadIdx.x] = add(before, sum);
        }
        first += gridDim.x * DOWN_WARPS;
        if (first >= p.cols) break;
        __syncthreads();
    }
    STAMP(2, 4);
}

#define EXPERTS_ONE(bits, blocks)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, blocks) gate_up_one_##bits(const __grid_constant__ ExpertsOne p) { multiply_gate_up<bits, false>(p); }   \
    extern "C" __global__ void __launch_bounds__(256, blocks) gate_up_asking_##bits(const __grid_constant__ ExpertsOne p) { multiply_gate_up<bits, true>(p); } \
    extern "C" __global__ void __launch_bounds__(256, blocks + 1) down_one_##bits(const __grid_constant__ ExpertsOne p) {                              \
        if ((p.slots + OCTET - 1) / OCTET * ((p.intermediate / 64 + 3) / 4) % 3) multiply_down<bits, 4>(p);                                                     \
        else multiply_down<bits, 3>(p);                                                                                                                        \
    }

EXPERTS_ONE(2, 2)
EXPERTS_ONE(3, 2)
EXPERTS_ONE(4, 2)
EXPERTS_ONE(5, 1)
EXPERTS_ONE(6, 1)
EXPERTS_ONE(8, 1)
