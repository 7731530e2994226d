// A mixture of experts for one token, whose matrices are all on the device, or come there in time, or are multiplied by the host: three kernels, and one that waits for that. The router norms for itself, and leaves what it normed encoded; who
// multiplies gate and up chooses the experts for itself, in each block, and leaves what is hidden encoded; who multiplies down sums the experts. As in
// rows_one.cu, what counts is the time between the kernels. Where loads shall be under way together, no branch may lie between them.
//
// Down chooses before its wait, from what the kernel before the one before it has written: that one has ended, since all blocks of the kernel before this one have
// seen its end before this one began. Such reads go past the first-level cache.
#pragma once
#include "mixture.cu"
#include "rows_one.cu"

struct RouteOne {
    Row x;
    // [experts, cols]
    Matrix router;
    // [1, cols]: of the expert that all tokens take; no data where there is none.
    Matrix gate;
    // [rows]: the gate's comes last.
    float* logits;
    // What was normed, encoded as `Quarters` lie in shared memory.
    u8* encoded;
    // [cols] in the host's memory: the same for the host; null where it does not want it.
    float* input;
    u32 experts;
    // Experts, and the gate.
    u32 rows;
};

static const u32 ROUTE_THREADS = 128;
// Rows of a block, one for each half of its first warp.
static const u32 ROUTE_ROWS = 2;

// Where x lies that is encoded, from `at` on.
__device__ __forceinline__ Quarters quarters(void* at, u32 groups) {
    Quarters x;
    x.q = (uint4*)at;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    return x;
}

// Eight elements of an array, or eight q, whose loads are under way together for several eights.
struct Eight {
    uint4 low;
    uint4 high;
};

// A row of a matrix as floats, by the whole block. Rows are multiples of 256 columns.
__device__ __forceinline__ void widen_row(const Matrix& m, u64 row, u32 cols, float* to) {
    const int DEEP = 4;
    const u8* data = m.data + row * m.row_bytes;
    if (m.kind == LANES_AFFINE && 32 % m.bits == 0) {
        const u32 in_word = 32 / m.bits, shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1, words = cols / in_word;
#pragma unroll 1
        for (u32 from = threadIdx.x; from < words; from += DEEP * ROUTE_THREADS) {
            u32 word[DEEP];
            float s[DEEP], b[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                u32 i = min(from + d * ROUTE_THREADS, words - 1);
                u64 g = row * m.groups + (i * in_word >> shift);
                word[d] = ((const u32*)data)[i];
                s[d] = element(m.scales, m.type, g);
                b[d] = element(m.biases, m.type, g);
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                u32 i = from + d * ROUTE_THREADS;
                if (i >= words) continue;
                for (u32 k = 0; k < in_word; k++) to[i * in_word + k] = fma((float)(word[d] >> k * m.bits & mask), s[d], b[d]);
            }
        }
        return;
    }
    if (m.kind == LANES_AFFINE) {
#pragma unroll 4
        for (u32 i = threadIdx.x; i < cols; i += ROUTE_THREADS) to[i] = affine_weight(m, row, i);
        return;
    }
#pragma unroll 1
    for (u32 from = threadIdx.x; from < cols / 8; from += DEEP * ROUTE_THREADS) {
        Eight own[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = min(from + d * ROUTE_THREADS, cols / 8 - 1);
            own[d].low = ((const uint4*)data)[m.type == F32 ? 2 * i : i];
            own[d].high = m.type == F32 ? ((const uint4*)data)[2 * i + 1] : own[d].low;
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + d * ROUTE_THREADS;
            if (i >= cols / 8) continue;
            const uint4 low = own[d].low, high = own[d].high;
            const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u16 half = (u16)(words[k / 2] >> k % 2 * 16);
                to[8 * i + k] = m.type == F32 ? bits(words[k]) : m.type == F16 ? from_f16(half) : from_bf16(half);
            }
        }
    }
}

// Shared memory: x and the norm's weights [cols] each, rows [ROUTE_ROWS, cols + 16].
extern "C" __global__ void __launch_bounds__(128) route_one(const __grid_constant__ RouteOne p) {
    WATCH();
    __shared__ float inverse;
    const u32 cols = p.x.cols, first = blockIdx.x * ROUTE_ROWS;
    float *x = room, *norm = x + cols, *rows = norm + cols;
    for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) copy_later((float4*)norm + i, (const float4*)p.x.norm + i);
    for (u32 i = 0; i < ROUTE_ROWS; i++) {
        // A row that is not there is computed as the first, and not stored.
        u32 r = first + i < p.rows ? first + i : 0;
        // By value: parameters that are looked at through a pointer come from memory.
        const Matrix m = r < p.experts ? p.router : p.gate;
        widen_row(m, r < p.experts ? r : 0, cols, rows + i * (cols + 16));
    }
    STAMP(0, 0);
    begin();
    STAMP(0, 1);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) ((float4*)x)[i] = __ldcg((const float4*)p.x.x + i);
    copied();
    __syncthreads();
    STAMP(0, 2);
    if (threadIdx.x < WARP) {
        float own = inverse_rms_256(x, cols, p.x.eps);
        if (threadIdx.x == 0) inverse = own;
    }
    __syncthreads();
    STAMP(0, 3);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) {
        float4 v = ((float4*)x)[i], w = ((float4*)norm)[i];
        v.x = mul(mul(v.x, inverse), w.x);
        v.y = mul(mul(v.y, inverse), w.y);
        v.z = mul(mul(v.z, inverse), w.z);
        v.w = mul(mul(v.w, inverse), w.w);
        ((float4*)x)[i] = v;
    }
    __syncthreads();
    STAMP(0, 4);
    const u32 warp = threadIdx.x / WARP;
    if (warp == 1) {
        // Each block some groups.
        const Quarters to = quarters(p.encoded, cols / 64);
        const u32 thread = threadIdx.x % WARP;
        for (u32 g = blockIdx.x; g < cols / 64; g += gridDim.x) {
            float v[8];
            load_eight(v, x, 8 * g + thread, thread < 8);
            if (p.input && thread < 8) {
                float4* for_host = (float4*)p.input + 2 * (8 * g + thread);
                for_host[0] = make_float4(v[0], v[1], v[2], v[3]);
                for_host[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
            encode_group(v, thread < 8, 8 * g + thread, to);
        }
    }
    if (warp > 0) return;
    const u32 lane = threadIdx.x % 16, row = threadIdx.x / 16;
    const float *own = rows + row * (cols + 16) + lane, *other = x + lane;
    float sum = 0.0f;
    const int DEEP = 16;
#pragma unroll 1
    for (u32 from = 0; from < cols; from += 16 * DEEP) {
        float a[DEEP], b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            a[d] = own[from + 16 * d];
            b[d] = other[from + 16 * d];
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) sum = fma(a[d], b[d], sum);
    }
    sum = lane_tree(sum);
    if (lane == 0 && first + row < p.rows) p.logits[first + row] = sum;
    STAMP(0, 5);
}

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
    // Which slots' experts the host has computed, a bit each, and what they give, [such slots, cols] in its memory; null where it computes none.
    const u32* by_host;
    const float* outputs;
    u32 cols;
    u32 intermediate;
    u32 slots;
    u32 type;
};

static const u32 GATE_UP_THREADS = 512, DOWN_THREADS = 256, DOWN_WARPS = DOWN_THREADS / WARP;
// Experts that a token has at most, the shared one included.
static const u32 MOST_SLOTS = 16;

// Which experts the token takes, ascending, and with what weight.
struct Taken {
    u32 experts[MOST_SLOTS];
    float weights[MOST_SLOTS];
};

__device__ __forceinline__ u32 least_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(ALL, x);
#else
    for (u32 step = 16; step > 0; step /= 2) x = min(x, __shfl_xor_sync(ALL, x, step));
    return x;
#endif
}

__device__ __forceinline__ u32 greatest_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    return warp_greatest(x);
#endif
}

// Chooses by a whole warp, of which each thread has up to HELD experts' scores, as `route` does it.
template <int HELD>
__device__ __noinline__ void choose_held(const float* logits, const float* bias, u32 experts, u32 k, u32 scoring, bool renormalise, float scale, Taken& taken) {
    const u32 NONE = 0xffffffffu, lane = threadIdx.x % WARP;
    __shared__ float weights[MOST_SLOTS];
    __shared__ u32 chosen[MOST_SLOTS];
    float s[HELD], offered[HELD];
    u32 keys[HELD];
    // 1. Scores
#pragma unroll
    for (int j = 0; j < HELD; j++) s[j] = lane + WARP * j < experts ? __ldcg(logits + lane + WARP * j) : 0.0f;
    if (scoring == SOFTMAX_TOP_K) {
        float m = bits(NEGATIVE_INFINITY), low = 0.0f, high = 0.0f;
#pragma unroll
        for (int j = 0; j < HELD; j++) m = lane + WARP * j < experts ? greater(s[j], m) : m;
        m = warp_greatest(m);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            s[j] = exp_(sub(s[j], m));
            float& sum = j % 2 ? high : low;
            sum = lane + WARP * j < experts ? add(sum, s[j]) : sum;
        }
        float sum = wide_tree(low, high);
#pragma unroll
        for (int j = 0; j < HELD; j++) s[j] = div(s[j], sum);
    } else if (scoring == SIGMOID) {
#pragma unroll
        for (int j = 0; j < HELD; j++) s[j] = sigmoid(s[j]);
    }
    // 2. What they are chosen by, a NaN counting as the least, in bits that are ordered as numbers are; 0: nobody, or no more
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        u32 i = lane + WARP * j;
        float o = s[j];
        if (bias && i < experts) o = add(o, bias[i]);
        offered[j] = is_nan(o) ? bits(NEGATIVE_INFINITY) : o;
        // Both zeros are one.
        u32 b = bits(add(offered[j], 0.0f));
        keys[j] = i < experts ? (b >> 31 ? ~b : b | 0x80000000u) : 0;
    }
    // 3. The best, best first; of those that are alike the first
#pragma unroll 1
    for (u32 n = 0; n < k; n++) {
        u32 best = 0, id = NONE;
#pragma unroll
        for (int j = 0; j < HELD; j++) best = max(best, keys[j]);
        best = greatest_of_warp(best);
#pragma unroll
        for (int j = HELD - 1; j >= 0; j--) id = keys[j] == best ? lane + WARP * j : id;
        id = least_of_warp(id);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            if (lane + WARP * j == id) {
                keys[j] = 0;
                chosen[n] = id;
                weights[n] = scoring == SIGMOID ? s[j] : offered[j];
            }
        }
    }
    __syncwarp();
    // 4. Their weights, and their order
    weigh(scoring, renormalise, scale, weights, k);
    if (lane < k) {
        u32 own = chosen[lane], at = 0;
#pragma unroll
        for (u32 other = 0; other < MOST_SLOTS; other++) at += other < k && chosen[other] < own;
        taken.experts[at] = own;
        taken.weights[at] = weights[lane];
    }
    __syncwarp();
}

__device__ __forceinline__ void choose_one(const Route& p, Taken& taken) {
    if (p.experts <= 4 * WARP) choose_held<4>(p.logits, p.bias, p.experts, p.k, p.scoring, p.renormalise, p.scale, taken);
    else if (p.experts <= 8 * WARP) choose_held<8>(p.logits, p.bias, p.experts, p.k, p.scoring, p.renormalise, p.scale, taken);
    else choose_held<16>(p.logits, p.bias, p.experts, p.k, p.scoring, p.renormalise, p.scale, taken);
}

struct AskOne {
    Route route;
    // [MOST_SLOTS + 1] in the host's memory: the experts that were chosen, ascending; then the answer: 1, once each of them is on the device or computed by the host,
    // and twice the bits of those that the host has computed.
    u32* question;
    // Where these bits are kept.
    u32* by_host;
};

// Tells the host which experts the token takes, and waits until it has answered: one warp. What comes after it finds them.
extern "C" __global__ void __launch_bounds__(32) ask_one(const __grid_constant__ AskOne p) {
    begin();
    __shared__ Taken taken;
    choose_one(p.route, taken);
    volatile u32* question = p.question;
    // What was normed is there before the host sees that it is asked.
    __threadfence_system();
    if (threadIdx.x < p.route.k) question[threadIdx.x] = taken.experts[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0) {
        u32 answer;
        while ((answer = question[MOST_SLOTS]) == 0) __nanosleep(20);
        __threadfence_system();
        *p.by_host = answer >> 1;
    }
}

// Where a projection of the expert in a slot lies.
__device__ __forceinline__ OnePart place_of(const ExpertsOne& p, const Taken& taken, u32 projection, u32 slot) {
    OnePart place = {p.shared[projection].data, p.shared[projection].scales, p.shared[projection].biases, nullptr};
    if (slot < p.route.k) {
        const Matrix& m = p.table[projection * p.route.experts + taken.experts[slot]];
        place = {m.data, m.scales, m.biases, nullptr};
    }
    return place;
}

// Columns of what is hidden that a block takes together, a group of activations, and a warp.
static const u32 HIDDEN = 32, HIDDEN_OF_WARP = HIDDEN / (GATE_UP_THREADS / WARP);

// A warp takes rows of gate and up, each lane a group. Shared memory: quarters of x.
template <int BITS> __device__ __forceinline__ void multiply_gate_up(const ExpertsOne& p) {
    const int UNITS = 2 * HIDDEN_OF_WARP;
    WATCH();
    __shared__ Taken taken;
    __shared__ __align__(16) float hidden[HIDDEN];
    __shared__ volatile u32 by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = p.cols / 64;
    const Quarters x = quarters(room, groups);
    const u32 line = 128 * (blockIdx.x * GATE_UP_THREADS + threadIdx.x);
    if (line < PROJECTIONS * p.route.experts * sizeof(Matrix)) prefetch((const u8*)p.table + line);
    STAMP(1, 0);
    begin();
    STAMP(1, 1);
    for (u32 i = threadIdx.x; i < 4 * (groups + 1) + (3 * groups + 3) / 4; i += GATE_UP_THREADS) copy_later((uint4*)room + i, (const uint4*)p.x + i);
    if (threadIdx.x == WARP) by_host = p.by_host ? __ldcg(p.by_host) : 0;
    if (warp == 0) choose_one(p.route, taken);
    copied();
    __syncthreads();
    STAMP(1, 2);
    const u32 tasks = p.slots * p.intermediate / HIDDEN, all = p.slots * p.intermediate / 64;
    const u64 row_bytes = groups * (8 * BITS);
#pragma unroll 1
    for (u32 task = blockIdx.x; task < tasks; task += gridDim.x) {
        const u32 slot = task * HIDDEN / p.intermediate, column = task * HIDDEN - slot * p.intermediate + warp * HIDDEN_OF_WARP;
        if (by_host >> slot & 1) continue;
        const OnePart parts[2] = {place_of(p, taken, 0, slot), place_of(p, taken, 1, slot)};
        float y[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) y[d] = 0.0f;
#pragma unroll 1
        for (u32 from = 0; from < groups; from += WARP) {
            const u32 group = from + lane;
            const bool there = group < groups;
            u32 words[UNITS][2 * BITS], s[UNITS], b[UNITS];
#pragma unroll
            for (int d = 0; d < UNITS; d++) load_unit<BITS>(words[d], s[d], b[d], parts[d % 2], column + d / 2, row_bytes, groups, group, there);
            float t[UNITS], m;
#pragma unroll
            for (int d = 0; d < UNITS; d++) unit_sum<BITS>(words[d], x, min(group, groups - 1), t[d], m);
            STAMP(1, 3);
            // The chains wander through the lanes.
#pragma unroll 1
            for (u32 k = 0; k < 8; k++) {
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    float next = fma(half_value(b[d], p.type), m, fma(half_value(s[d], p.type), t[d], y[d]));
                    if (lane >> 2 == k && there) y[d] = next;
                    y[d] = __shfl_sync(ALL, y[d], (k << 2) + (lane & 3));
                }
            }
        }
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 2));
            y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 1));
        }
        if (lane < HIDDEN_OF_WARP) hidden[warp * HIDDEN_OF_WARP + lane] = lane ? mul(silu(y[2]), y[3]) : mul(silu(y[0]), y[1]);
        __syncthreads();
        STAMP(1, 4);
        if (warp == 0) {
            float v[8];
            load_eight(v, hidden, lane, lane < 4);
            float2 own = encode_eight(v, lane < 4, 4 * task + lane, (uint4*)p.hidden, all + 1);
            float* scales = (float*)((uint4*)p.hidden + 4 * (all + 1));
            if (lane == 0) {
                scales[task] = own.x;
                scales[2 * all + task] = own.y;
            }
        }
        if (task + gridDim.x < tasks) __syncthreads();
    }
    STAMP(1, 5);
}

// Experts that a warp has side by side, four lanes each.
static const u32 OCTET = 8;

// A warp takes a row of down of all the token's experts, and sums what they give. Shared memory: quarters of what is hidden.
template <int BITS> __device__ __forceinline__ void multiply_down(const ExpertsOne& p) {
    // Of each slot a round takes four groups; so many are under way.
    const int UNITS = 4;
    WATCH();
    __shared__ Taken taken;
    __shared__ float hosts[MOST_SLOTS][DOWN_WARPS];
    // Read again where it is looked at: registers are few.
    __shared__ volatile u32 by_host;
    const u32 lane = threadIdx.x % WARP, chain = lane & 3, inside = p.intermediate / 64, all = p.slots * inside, rounds = (inside + 3) / 4;
    const u32 units = (p.slots + OCTET - 1) / OCTET * rounds;
    const Quarters x = quarters(room, all);
    // Who multiplies gate and up, before this, has waited for the router, and for the host.
    if (threadIdx.x == WARP) by_host = p.by_host ? __ldcg(p.by_host) : 0;
    if (threadIdx.x < WARP) choose_one(p.route, taken);
    __syncthreads();
    STAMP(2, 0);
    OnePart parts[MOST_SLOTS / OCTET];
#pragma unroll
    for (int i = 0; i < MOST_SLOTS / OCTET; i++) {
        const u32 slot = i * OCTET + lane / 4;
        parts[i] = place_of(p, taken, 2, slot < p.slots ? slot : 0);
    }
    const u64 row_bytes = inside * (8 * BITS);
    u32 row = blockIdx.x * DOWN_WARPS + threadIdx.x / WARP;
    bool waits = true;
    float before = 0.0f, gate = 1.0f;
#pragma unroll 1
    while (true) {
        float sum = 0.0f, y = 0.0f;
        if (row < p.cols) before = __ldcg(p.residual + row);
        u32 octet = 0, round = 0;
#pragma unroll 1
        for (u32 from = 0; from < units; from += UNITS) {
            u32 words[UNITS][2 * BITS], s[UNITS], b[UNITS], o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 group = r * 4 + chain;
                const bool there = row < p.cols && o * OCTET + lane / 4 < p.slots && group < inside;
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
                const u32 of_thread = threadIdx.x / DOWN_WARPS, of_row = row - threadIdx.x / WARP + threadIdx.x % DOWN_WARPS;
                if (!waits) __syncthreads();
                if (of_thread < MOST_SLOTS && by_host >> of_thread & 1 && of_row < p.cols) {
                    const volatile float* of_slot = p.outputs + __popc(by_host & ((1u << of_thread) - 1)) * p.cols;
                    hosts[of_thread][threadIdx.x % DOWN_WARPS] = of_slot[of_row];
                }
            }
            if (waits) {
                if (p.gate) gate = sigmoid(__ldcg(p.gate));
                STAMP(2, 1);
                begin();
                STAMP(2, 2);
                for (u32 i = threadIdx.x; i < 4 * (all + 1); i += DOWN_THREADS) copy_later((uint4*)room + i, (const uint4*)p.hidden + i);
                const float2 *scales = (const float2*)((const uint4*)p.hidden + 4 * (all + 1)), *means = scales + all;
                for (u32 i = threadIdx.x; i < all; i += DOWN_THREADS) {
                    float2 mean = __ldcg(means + i);
                    x.sx[i] = __ldcg(scales + i);
                    x.m[i] = add(mean.x, mean.y);
                }
                copied();
                __syncthreads();
                waits = false;
                STAMP(2, 3);
            }
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 slot = octet * OCTET + lane / 4, group = round * 4 + chain;
                const bool there = slot < p.slots && group < inside;
                float t, m;
                unit_sum<BITS>(words[d], x, there ? slot * inside + group : 0, t, m);
                if (there) y = fma(half_value(b[d], p.type), m, fma(half_value(s[d], p.type), t, y));
                if (++round < rounds) continue;
                // All of an octet's groups are done: their chains meet, and are summed one behind the other.
                y = add(y, __shfl_xor_sync(ALL, y, 2));
                y = add(y, __shfl_xor_sync(ALL, y, 1));
                const u32 replaced = by_host;
                if (replaced) __syncthreads();
#pragma unroll
                for (u32 i = 0; i < OCTET; i++) {
                    float own = __shfl_sync(ALL, y, 4 * i);
                    u32 of = octet * OCTET + i;
                    if (replaced >> of & 1) own = hosts[of][threadIdx.x / WARP];
                    if (of < p.slots) sum = fma(of < p.route.k ? taken.weights[of] : gate, own, sum);
                }
                y = 0.0f;
                round = 0;
                octet++;
            }
        }
        if (lane == 0 && row < p.cols) p.residual[row] = add(before, sum);
        row += gridDim.x * DOWN_WARPS;
        if (row >= p.cols) break;
    }
    STAMP(2, 4);
}

#define EXPERTS_ONE(bits, blocks)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(512, blocks) gate_up_one_##bits(const __grid_constant__ ExpertsOne p) { multiply_gate_up<bits>(p); }         \
    extern "C" __global__ void __launch_bounds__(256, blocks + 1) down_one_##bits(const __grid_constant__ ExpertsOne p) { multiply_down<bits>(p); }

EXPERTS_ONE(2, 2)
EXPERTS_ONE(3, 2)
EXPERTS_ONE(4, 2)
EXPERTS_ONE(5, 1)
EXPERTS_ONE(6, 1)
EXPERTS_ONE(8, 1)
