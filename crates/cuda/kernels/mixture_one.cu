// A mixture of experts for one token, whose matrices are all on the device: three kernels. The router norms and multiplies for itself; who multiplies gate and up
// chooses the experts for itself, in each block; who multiplies down sums them. As in rows_one.cu, what counts is the time between the kernels.
//
// A kernel here reads before its wait what the kernel before the one before it has written: that one has ended, since all blocks of the kernel before this one
// have seen its end before this one began. Such reads go past the first-level cache.
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
    u32 experts;
    // Experts, and the gate.
    u32 rows;
};

static const u32 ROUTE_THREADS = 128;
// Rows of a block, one for each half of its first warp.
static const u32 ROUTE_ROWS = 2;

// A row of a matrix as floats, by the whole block.
__device__ __forceinline__ void widen_row(const Matrix& m, u64 row, u32 cols, float* to) {
    if (m.kind == LANES_AFFINE && 32 % m.bits == 0) {
        const u32 in_word = 32 / m.bits, shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1;
        const u32* words = (const u32*)(m.data + row * m.row_bytes);
#pragma unroll 2
        for (u32 i = threadIdx.x; i < cols / in_word; i += ROUTE_THREADS) {
            u32 word = words[i], first = i * in_word;
            u64 g = row * m.groups + (first >> shift);
            float s = element(m.scales, m.type, g), b = element(m.biases, m.type, g);
            for (u32 k = 0; k < in_word; k++) to[first + k] = fma((float)(word >> k * m.bits & mask), s, b);
        }
        return;
    }
#pragma unroll 4
    for (u32 i = threadIdx.x; i < cols; i += ROUTE_THREADS) {
        to[i] = m.kind == LANES_AFFINE ? affine_weight(m, row, i) : element(m.data + row * m.row_bytes, m.type, i);
    }
}

// Shared memory: x and the norm's weights [cols] each, rows [ROUTE_ROWS, cols + 16].
extern "C" __global__ void __launch_bounds__(128) route_one(const __grid_constant__ RouteOne p) {
    __shared__ float inverse;
    const u32 cols = p.x.cols, first = blockIdx.x * ROUTE_ROWS;
    float *x = room, *norm = x + cols, *rows = norm + cols;
    for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) copy_later((float4*)norm + i, (const float4*)p.x.norm + i);
    for (u32 i = 0; i < ROUTE_ROWS; i++) {
        // A row that is not there is computed as the first, and not stored.
        u32 r = first + i < p.rows ? first + i : 0;
        const Matrix& m = r < p.experts ? p.router : p.gate;
        widen_row(m, r < p.experts ? r : 0, cols, rows + i * (cols + 16));
    }
    begin();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) ((float4*)x)[i] = __ldcg((const float4*)p.x.x + i);
    copied();
    __syncthreads();
    if (threadIdx.x < WARP) {
        float own = inverse_rms_256(x, cols, p.x.eps);
        if (threadIdx.x == 0) inverse = own;
    }
    __syncthreads();
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
    if (threadIdx.x >= WARP) return;
    const u32 lane = threadIdx.x % 16, row = threadIdx.x / 16;
    const float* own = rows + row * (cols + 16);
    float sum = 0.0f;
#pragma unroll 16
    for (u32 i = lane; i < cols; i += 16) sum = fma(own[i], x[i], sum);
    sum = lane_tree(sum);
    if (lane == 0 && first + row < p.rows) p.logits[first + row] = sum;
}

static const u32 PROJECTIONS = 3;

struct ExpertsOne {
    Row x;
    // One token's, without groups of experts; nothing of it is written.
    Route route;
    // [projections, experts]
    const Matrix* table;
    // The expert that all tokens take; no data where there is none.
    Matrix shared[PROJECTIONS];
    // Before the sigmoid; null: 1.
    const float* gate;
    // [slots, intermediate]: of experts in ascending order, the one that all take last.
    float* hidden;
    // [cols]
    float* residual;
    u32 intermediate;
    u32 slots;
    u32 type;
    u32 unused;
};

static const u32 EXPERT_THREADS = 256, EXPERT_WARPS = EXPERT_THREADS / WARP;
// Experts that a token has at most, the shared one included.
static const u32 MOST_SLOTS = 16;

// Which experts the token takes, ascending, and with what weight.
struct Taken {
    u32 experts[MOST_SLOTS];
    float weights[MOST_SLOTS];
};

// Chooses by the whole block: each warp the best of its part of the experts, and then the best of those. `room`: [2, experts]. What is taken is there for all.
__device__ __forceinline__ void choose_one(const Route& p, float* room, Taken& taken) {
    const u32 NONE = 0xffffffffu;
    __shared__ float best[EXPERT_WARPS * MOST_SLOTS], weights[MOST_SLOTS];
    __shared__ u32 ids[EXPERT_WARPS * MOST_SLOTS], chosen[MOST_SLOTS];
    float *score = room, *offered = room + p.experts;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // 1. Scores
    for (u32 i = threadIdx.x; i < p.experts; i += EXPERT_THREADS) {
        float s = __ldcg(p.logits + i);
        score[i] = p.scoring == SIGMOID ? sigmoid(s) : s;
    }
    for (u32 i = threadIdx.x; i < EXPERT_WARPS * MOST_SLOTS; i += EXPERT_THREADS) {
        best[i] = bits(NEGATIVE_INFINITY);
        ids[i] = NONE;
    }
    __syncthreads();
    if (p.scoring == SOFTMAX_TOP_K) {
        if (warp == 0) softmax(score, p.experts);
        __syncthreads();
    }
    // 2. What they are chosen by; a NaN counts as the least.
    const u32 part = (p.experts + EXPERT_WARPS - 1) / EXPERT_WARPS, from = min(warp * part, p.experts), to = min(from + part, p.experts);
    for (u32 i = from + lane; i < to; i += WARP) {
        float s = p.bias ? add(score[i], p.bias[i]) : score[i];
        offered[i] = is_nan(s) ? bits(NEGATIVE_INFINITY) : s;
    }
    __syncwarp();
    // 3. How many of a warp's come before each, and then how many of all warps'
    for (u32 i = from + lane; i < to; i += WARP) {
        float own = offered[i];
        u32 ahead = 0;
#pragma unroll 4
        for (u32 other = from; other < to; other++) ahead += before(offered[other], other, own, i);
        if (ahead < p.k) {
            best[warp * p.k + ahead] = own;
            ids[warp * p.k + ahead] = i;
        }
    }
    __syncthreads();
    if (threadIdx.x < EXPERT_WARPS * p.k && ids[threadIdx.x] != NONE) {
        float own = best[threadIdx.x];
        u32 id = ids[threadIdx.x], ahead = 0;
#pragma unroll 4
        for (u32 other = 0; other < EXPERT_WARPS * p.k; other++) ahead += before(best[other], ids[other], own, id);
        if (ahead < p.k) {
            weights[ahead] = own;
            chosen[ahead] = id;
        }
    }
    __syncthreads();
    // 4. Their weights, and their order
    if (warp == 0) {
        weigh(p, score, chosen, weights);
        if (lane < p.k) {
            u32 at = 0;
            for (u32 other = 0; other < p.k; other++) at += chosen[other] < chosen[lane];
            taken.experts[at] = chosen[lane];
            taken.weights[at] = weights[lane];
        }
    }
    __syncthreads();
}

// Where a projection of the expert in a slot lies.
__device__ __forceinline__ const Matrix& matrix_of(const ExpertsOne& p, const Taken& taken, u32 projection, u32 slot) {
    return slot < p.route.k ? p.table[projection * p.route.experts + taken.experts[slot]] : p.shared[projection];
}

__device__ __forceinline__ Quarters quarters(u32 groups) {
    Quarters x;
    x.q = (uint4*)room;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    return x;
}

// Floats behind the quarters of so many groups.
__device__ __forceinline__ float* behind_quarters(u32 groups) { return room + 16 * (groups + 1) + (3 * groups + 3) / 4 * 4; }

// A warp takes gate and up of two columns of what is hidden, each lane a group. Shared memory: quarters of x; x, the norm's weights [cols] each; [2, experts].
template <int BITS> __device__ __forceinline__ void multiply_gate_up(const ExpertsOne& p) {
    const int UNITS = 4;
    __shared__ Taken taken;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, cols = p.x.cols, groups = cols / 64;
    const Quarters x = quarters(groups);
    float *loose = behind_quarters(groups), *weights = loose + cols;
    for (u32 i = threadIdx.x; i < cols / 4; i += EXPERT_THREADS) copy_later((float4*)weights + i, (const float4*)p.x.norm + i);
    const u32 line = 128 * (blockIdx.x * EXPERT_THREADS + threadIdx.x);
    if (line < PROJECTIONS * p.route.experts * sizeof(Matrix)) prefetch((const u8*)p.table + line);
    // The router, before this, has waited for x.
    stage_one<EXPERT_THREADS>(p.x, x, loose, weights);
    begin();
    choose_one(p.route, weights + cols, taken);
    const u32 tasks = p.slots * p.intermediate / 2;
    for (u32 task = warp * gridDim.x + blockIdx.x; task < tasks; task += gridDim.x * EXPERT_WARPS) {
        const u32 slot = 2 * task / p.intermediate, column = 2 * task - slot * p.intermediate;
        const Matrix &gate = matrix_of(p, taken, 0, slot), &up = matrix_of(p, taken, 1, slot);
        const OnePart parts[2] = {{gate.data, gate.scales, gate.biases, nullptr}, {up.data, up.scales, up.biases, nullptr}};
        const u64 row_bytes = groups * (8 * BITS);
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
            float t[UNITS], m[UNITS];
#pragma unroll
            for (int d = 0; d < UNITS; d++) unit_sum<BITS>(words[d], x, min(group, groups - 1), t[d], m[d]);
            // The chains wander through the lanes.
#pragma unroll 1
            for (u32 k = 0; k < 8; k++) {
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    float next = fma(half_value(b[d], p.type), m[d], fma(half_value(s[d], p.type), t[d], y[d]));
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
        if (lane < 2) p.hidden[2 * task + lane] = lane ? mul(silu(y[2]), y[3]) : mul(silu(y[0]), y[1]);
    }
}

// Experts that a warp has side by side, four lanes each.
static const u32 OCTET = 8;

// A warp takes a row of down of all the token's experts, and sums what they give. Shared memory: quarters of what is hidden, and that [slots, intermediate]; [2, experts].
template <int BITS> __device__ __forceinline__ void multiply_down(const ExpertsOne& p) {
    // Of each slot a round takes four groups; so many are under way.
    const int UNITS = 4;
    __shared__ Taken taken;
    const u32 lane = threadIdx.x % WARP, chain = lane & 3, inside = p.intermediate / 64, all = p.slots * inside, rounds = (inside + 3) / 4;
    const u32 units = (p.slots + OCTET - 1) / OCTET * rounds;
    const Quarters x = quarters(all);
    float* loose = behind_quarters(all);
    // Who multiplies gate and up, before this, has waited for the router.
    choose_one(p.route, loose + all * 64, taken);
    OnePart parts[MOST_SLOTS / OCTET];
#pragma unroll
    for (int i = 0; i < MOST_SLOTS / OCTET; i++) {
        const u32 slot = i * OCTET + lane / 4;
        const Matrix& m = matrix_of(p, taken, 2, slot < p.slots ? slot : 0);
        parts[i] = {m.data, m.scales, m.biases, nullptr};
    }
    const u64 row_bytes = inside * (8 * BITS);
    u32 row = blockIdx.x * EXPERT_WARPS + threadIdx.x / WARP;
    bool waits = true;
    float before = 0.0f, gate = 1.0f;
#pragma unroll 1
    while (true) {
        float sum = 0.0f, y = 0.0f;
        if (row < p.x.cols) before = __ldcg(p.residual + row);
        u32 octet = 0, round = 0;
#pragma unroll 1
        for (u32 from = 0; from < units; from += UNITS) {
            u32 words[UNITS][2 * BITS], s[UNITS], b[UNITS], o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 group = r * 4 + chain;
                const bool there = row < p.x.cols && o * OCTET + lane / 4 < p.slots && group < inside;
                load_unit<BITS>(words[d], s[d], b[d], o ? parts[1] : parts[0], row, row_bytes, inside, group, there);
                if (++r == rounds) {
                    r = 0;
                    o++;
                }
            }
            if (waits) {
                begin();
                if (p.gate) gate = sigmoid(__ldcg(p.gate));
                stage_one<EXPERT_THREADS>({p.hidden, nullptr, 0.0f, all * 64}, x, loose, nullptr);
                __syncthreads();
                waits = false;
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
#pragma unroll
                for (u32 i = 0; i < OCTET; i++) {
                    float own = __shfl_sync(ALL, y, 4 * i);
                    u32 of = octet * OCTET + i;
                    if (of < p.slots) sum = fma(of < p.route.k ? taken.weights[of] : gate, own, sum);
                }
                y = 0.0f;
                round = 0;
                octet++;
            }
        }
        if (lane == 0 && row < p.x.cols) p.residual[row] = add(before, sum);
        row += gridDim.x * EXPERT_WARPS;
        if (row >= p.x.cols) break;
    }
}

#define EXPERTS_ONE(bits)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 3) gate_up_one_##bits(const __grid_constant__ ExpertsOne p) { multiply_gate_up<bits>(p); }      \
    extern "C" __global__ void __launch_bounds__(256, 3) down_one_##bits(const __grid_constant__ ExpertsOne p) { multiply_down<bits>(p); }

EXPERTS_ONE(2)
EXPERTS_ONE(3)
EXPERTS_ONE(4)
EXPERTS_ONE(5)
EXPERTS_ONE(6)
EXPERTS_ONE(8)
