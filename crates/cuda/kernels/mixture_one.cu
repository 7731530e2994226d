// A mixture of experts for one token, whose matrices are all on the device, or come there in time, or are multiplied by the host: three kernels. The router norms for
// itself, and leaves what it normed encoded; who multiplies gate and up chooses the experts for itself, in each block, waits for those that are not on the device, and
// leaves what is hidden encoded; who multiplies down sums the experts. As in rows_one.cu, what counts is the time between the kernels. Where loads shall be under way
// together, no branch may lie between them.
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
    // [cols]: the same as it is; null where nobody wants it.
    float* normed;
    // The host's answer, which is still to be given; null where it is not asked.
    u32* answer;
    u32 experts;
    // Experts, and the gate.
    u32 rows;
};

// Rows of a block, one for each half of its first warp.
static const u32 ROUTE_ROWS = 2;
// So many bring each of these, and the norm's weights.
static const u32 OF_ROW = 128, ROUTE_THREADS = (ROUTE_ROWS + 1) * OF_ROW;

// Where x lies that is encoded, from `at` on.
__device__ __forceinline__ Quarters quarters(void* at, u32 groups) {
    Quarters x;
    x.q = (uint4*)at;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    return x;
}

// Floats lie in shared memory as lanes of a lane sum take them: four of a lane's elements side by side, a quad, those of the sixteen lanes one behind the other. This is
// the first column of a quad; the others are sixteen, 32 and 48 further.
__device__ __forceinline__ u32 column_of(u32 quad) { return quad / 16 * 64 + quad % 16; }

// The elements of a quad as they were loaded, with the scale and the bias of affine ones.
struct Quad {
    u32 raw[4];
    u32 s;
    u32 b;
};

// A row's quads by OF_ROW threads, each of which asks for several before it computes the first.
template <class Ask, class Value> __device__ __forceinline__ void widen(u32 cols, float* to, Ask ask, Value value) {
    const int DEEP = 4;
    const u32 quads = cols / 4;
#pragma unroll 1
    for (u32 from = threadIdx.x % OF_ROW; from < quads; from += DEEP * OF_ROW) {
        Quad own[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) own[d] = ask(column_of(min(from + d * OF_ROW, quads - 1)));
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            // The last may be brought several times.
            const u32 quad = min(from + d * OF_ROW, quads - 1), i = column_of(quad);
            ((float4*)to)[quad] = make_float4(value(own[d], i, 0), value(own[d], i, 1), value(own[d], i, 2), value(own[d], i, 3));
        }
    }
}

// A row of a matrix as floats in quads, by OF_ROW threads. No branch lies between loads: each kind of matrix is a path of its own.
__device__ __forceinline__ void widen_row(const Matrix& m, u64 row, u32 cols, float* to) {
    const u8* data = m.data + row * m.row_bytes;
    if (m.kind == LANES_AFFINE && 32 % m.bits == 0 && m.group >= 64 && m.type != F32) {
        const u32 log = 31 - __clz(m.bits), shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1, type = m.type;
        const u16 *scales = (const u16*)m.scales + row * m.groups, *biases = (const u16*)m.biases + row * m.groups;
        widen(
            cols, to,
            [&](u32 i) {
                Quad own;
#pragma unroll
                for (u32 r = 0; r < 4; r++) own.raw[r] = ((const u32*)data)[(i + 16 * r << log) / 32];
                own.s = scales[i >> shift];
                own.b = biases[i >> shift];
                return own;
            },
            [&](const Quad& own, u32 i, u32 r) { return fma((float)(own.raw[r] >> ((i + 16 * r << log) & 31) & mask), half_value(own.s, type), half_value(own.b, type)); });
    } else if (m.kind == LANES_AFFINE) {
#pragma unroll 1
        for (u32 quad = threadIdx.x % OF_ROW; quad < cols / 4; quad += OF_ROW) {
            const u32 i = column_of(quad);
            ((float4*)to)[quad] = make_float4(affine_weight(m, row, i), affine_weight(m, row, i + 16), affine_weight(m, row, i + 32), affine_weight(m, row, i + 48));
        }
    } else if (m.type == F32) {
        widen(
            cols, to,
            [&](u32 i) {
                const u32* at = (const u32*)data + i;
                return Quad{{at[0], at[16], at[32], at[48]}, 0, 0};
            },
            [](const Quad& own, u32, u32 r) { return bits(own.raw[r]); });
    } else {
        const u32 type = m.type;
        widen(
            cols, to,
            [&](u32 i) {
                const u16* at = (const u16*)data + i;
                return Quad{{at[0], at[16], at[32], at[48]}, 0, 0};
            },
            [&](const Quad& own, u32, u32 r) { return half_value(own.raw[r], type); });
    }
}

// `1 / sqrt(mean of squares + eps)` of `n` elements in quads, a multiple of 256, by a whole warp: a thread has four of a wide sum's lanes.
__device__ __forceinline__ float inverse_rms_quads(const float4* x, u32 n, float eps) {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    x += threadIdx.x % 16;
#pragma unroll 2
    for (u32 from = 0; from < n / 4; from += 64) {
        float4 own[4];
#pragma unroll
        for (int i = 0; i < 4; i++) own[i] = x[from + 16 * i];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums.x = fma(own[i].x, own[i].x, sums.x);
            sums.y = fma(own[i].y, own[i].y, sums.y);
            sums.z = fma(own[i].z, own[i].z, sums.z);
            sums.w = fma(own[i].w, own[i].w, sums.w);
        }
    }
    float sum = lane_tree(add(add(sums.x, sums.z), add(sums.y, sums.w))), mean;
    // The quotient by a power of two is a product, exactly.
    if (n & (n - 1)) mean = div(sum, (float)n);
    else mean = mul(sum, bits((u32)(127 - 31 + __clz(n)) << 23));
    return div(1.0f, __fsqrt_rn(add(mean, eps)));
}

// The lane sum of a row and of x as it is normed, all of them in quads, by half a warp: each pointer is the lane's.
__device__ __forceinline__ float normed_product(const float4* of_row, const float4* of_x, const float4* of_weights, u32 cols, float inverse) {
    float sum = 0.0f;
    const int DEEP = 4;
#pragma unroll 2
    for (u32 from = 0; from < cols / 4; from += 16 * DEEP) {
        float4 a[DEEP], b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const float4 v = of_x[from + 16 * d], w = of_weights[from + 16 * d];
            a[d] = of_row[from + 16 * d];
            b[d] = make_float4(mul(mul(v.x, inverse), w.x), mul(mul(v.y, inverse), w.y), mul(mul(v.z, inverse), w.z), mul(mul(v.w, inverse), w.w));
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            sum = fma(a[d].x, b[d].x, sum);
            sum = fma(a[d].y, b[d].y, sum);
            sum = fma(a[d].z, b[d].z, sum);
            sum = fma(a[d].w, b[d].w, sum);
        }
    }
    return lane_tree(sum);
}

// Shared memory: x, the norm's weights and rows [ROUTE_ROWS], of [cols] in quads each. After its wait only the first two warps have something to do, and wait for
// nobody: each norms for itself.
extern "C" __global__ void __launch_bounds__(384) route_one(const __grid_constant__ RouteOne p) {
    WATCH();
    const u32 cols = p.x.cols, first = blockIdx.x * ROUTE_ROWS, warp = threadIdx.x / WARP, part = threadIdx.x / OF_ROW;
    float *x = room, *norm = x + cols, *rows = norm + cols;
    // A row that is not there is computed as the first, and not stored.
    const u32 r = part < ROUTE_ROWS && first + part < p.rows ? first + part : 0;
    const bool of_norm = part == ROUTE_ROWS, of_gate = r >= p.experts;
    // By value: parameters that are looked at through a pointer come from memory.
    Matrix m = of_gate ? p.gate : p.router;
    if (of_norm) m.data = (const u8*)p.x.norm, m.kind = LANES_F32, m.type = F32;
    widen_row(m, of_gate || of_norm ? 0 : r, cols, of_norm ? norm : rows + part * cols);
    STAMP(0, 0);
    begin();
    STAMP(0, 1);
    if (p.answer && blockIdx.x == 0 && threadIdx.x == 0) *p.answer = 0;
#pragma unroll 1
    for (u32 quad = threadIdx.x; quad < cols / 4; quad += 2 * ROUTE_THREADS) {
        // Both are asked for before the first is there.
        const u32 other = min(quad + ROUTE_THREADS, cols / 4 - 1);
        const float *near = p.x.x + column_of(quad), *far = p.x.x + column_of(other);
        const float4 a = make_float4(__ldcg(near), __ldcg(near + 16), __ldcg(near + 32), __ldcg(near + 48));
        const float4 b = make_float4(__ldcg(far), __ldcg(far + 16), __ldcg(far + 32), __ldcg(far + 48));
        ((float4*)x)[quad] = a;
        ((float4*)x)[other] = b;
    }
    __syncthreads();
    STAMP(0, 2);
    // Of the second warp each block's has some groups.
    if (warp > 1 || warp == 1 && blockIdx.x >= cols / 64) return;
    const float inverse = inverse_rms_quads((const float4*)x, cols, p.x.eps);
    STAMP(0, 3);
    const u32 lane = threadIdx.x % 16;
    if (warp == 1) {
        const Quarters to = quarters(p.encoded, cols / 64);
        const u32 thread = threadIdx.x % WARP;
        for (u32 g = blockIdx.x; g < cols / 64; g += gridDim.x) {
            float v[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 at = 64 * g + (thread % 2 * 8 + k) * 4 + thread / 2 % 4;
                v[k] = mul(mul(x[at], inverse), norm[at]);
            }
            if (p.normed && thread < 8) {
                float4* to = (float4*)p.normed + 2 * (8 * g + thread);
                to[0] = make_float4(v[0], v[1], v[2], v[3]);
                to[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
            encode_group(v, thread < 8, 8 * g + thread, to);
        }
        return;
    }
    const u32 row = threadIdx.x / 16;
    const float4 *of_row = (const float4*)(rows + row * cols) + lane, *of_x = (const float4*)x + lane, *of_weights = (const float4*)norm + lane;
    const float sum = normed_product(of_row, of_x, of_weights, cols, inverse);
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
// Experts that a token has at most, the shared one included.
static const u32 MOST_SLOTS = 16;

// Which experts the token takes, ascending, and with what weight.
struct Taken {
    u32 experts[MOST_SLOTS];
    float weights[MOST_SLOTS];
};

__device__ __forceinline__ u32 greatest_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    return warp_greatest(x);
#endif
}

__device__ __forceinline__ int sum_of_warp(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL, x);
#else
    return warp_sum(x);
#endif
}

// Bits that are ordered as numbers are, a NaN counting as the least; those of nothing are 0. Both zeros are one.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 b = bits(is_nan(x) ? bits(NEGATIVE_INFINITY) : add(x, 0.0f));
    return b >> 31 ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 ordered) { return bits(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered); }

// The greatest of the scores, by a whole warp, which asks for so many at a time. It is only subtracted, whichever zero it is.
template <int DEEP> __device__ __forceinline__ float greatest_score(const float* logits, u32 experts) {
    u32 most = 0;
#pragma unroll 1
    for (u32 from = threadIdx.x % WARP; from < experts; from += DEEP * WARP) {
        float own[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) own[d] = __ldcg(logits + min(from + d * WARP, experts - 1));
#pragma unroll
        for (int d = 0; d < DEEP; d++) most = max(most, ordered(own[d]));
    }
    return number_of(greatest_of_warp(most));
}

// How many keys are greater, in several sums, so that they do not wait for each other.
struct Count {
    u32 of[4];

    __device__ __forceinline__ void add(uint4 keys, u32 than) {
        of[0] += keys.x > than;
        of[1] += keys.y > than;
        of[2] += keys.z > than;
        of[3] += keys.w > than;
    }

    __device__ __forceinline__ u32 all() const { return of[0] + of[1] + (of[2] + of[3]); }
};

static const u32 MOST_EXPERTS = 512;

// Chooses as `route` does it, by a block of so many warps; `taken` is there once they have met. An expert's rank is the number of those that come before it: a warp
// ranks 32 experts, a list, and then each list's best are ranked among all of them. Weights are computed only where they are asked for.
__device__ __forceinline__ void choose_one(const Route& p, u32 warps, bool weighed, Taken& taken) {
    const u32 NONE = 0xffffffffu;
    // What each list's experts are chosen by, sorted once they are ranked, and which they are in it.
    __shared__ __align__(16) u32 keys[MOST_EXPERTS];
    __shared__ u8 members[MOST_EXPERTS];
    // Exponentials, or scores.
    __shared__ float values[MOST_EXPERTS];
    // Best first.
    __shared__ __align__(16) u32 chosen[MOST_SLOTS];
    __shared__ float weights[MOST_SLOTS];
    // Lists by four: nobody is in the last ones.
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, experts = p.experts, k = p.k, scoring = p.scoring, lists = (experts + 4 * WARP - 1) / (4 * WARP) * 4;
    if (threadIdx.x < MOST_SLOTS) chosen[threadIdx.x] = NONE;
    // 1. Scores
    float sum = 0.0f;
    if (scoring == SOFTMAX_TOP_K) {
        if (warp < lists) {
            // Under way with those of which the greatest is sought.
            const float first = __ldcg(p.logits + min(threadIdx.x, experts - 1));
            const float m = experts <= 4 * WARP ? greatest_score<4>(p.logits, experts) : greatest_score<16>(p.logits, experts);
            values[threadIdx.x] = threadIdx.x < experts ? exp_(sub(first, m)) : 0.0f;
#pragma unroll 1
            for (u32 i = threadIdx.x + warps * WARP; i < lists * WARP; i += warps * WARP) values[i] = i < experts ? exp_(sub(__ldcg(p.logits + i), m)) : 0.0f;
        }
        __syncthreads();
        if (warp < lists) {
            float low = 0.0f, high = 0.0f;
#pragma unroll 1
            for (u32 i = lane; i < lists * WARP; i += 4 * WARP) {
                const float own[4] = {values[i], values[i + WARP], values[i + 2 * WARP], values[i + 3 * WARP]};
                low = add(add(low, own[0]), own[2]);
                high = add(add(high, own[1]), own[3]);
            }
            sum = wide_tree(low, high);
        }
    }
    // 2. Lists
#pragma unroll 1
    for (u32 list = warp; list < lists; list += warps) {
        const u32 i = list * WARP + lane;
        u32 key = 0;
        if (i < experts) {
            float s = scoring == SOFTMAX_TOP_K ? div(values[i], sum) : __ldcg(p.logits + i);
            const float bias = p.bias ? p.bias[i] : 0.0f;
            if (scoring == SIGMOID) values[i] = s = sigmoid(s);
            key = ordered(p.bias ? add(s, bias) : s);
        }
        u32* of_list = keys + list * WARP;
        of_list[lane] = key;
        __syncwarp();
        Count before = {};
        // Of those that are alike the first comes first. Its own four are looked at one by one.
#pragma unroll
        for (u32 q = 0; q < WARP / 4; q++) before.add(((const uint4*)of_list)[q], q == lane / 4 ? NONE : key - (q < lane / 4));
#pragma unroll
        for (u32 other = 1; other < 4; other++) before.of[other] += __shfl_xor_sync(ALL, key, other) > key - ((lane ^ other) < lane);
        const u32 rank = before.all();
        __syncwarp();
        if (key) {
            of_list[rank] = key;
            members[list * WARP + rank] = lane;
        }
    }
    __syncthreads();
    // 3. The best, best first
    const u32 log = 32 - __clz(k - 1);
#pragma unroll 1
    for (u32 c = threadIdx.x; c < lists << log; c += warps * WARP) {
        const u32 list = c >> log, n = c & ((1u << log) - 1), own = list * WARP + n, key = n < k ? keys[own] : 0;
        // Of its own list there are n. Of the others eight are looked at, and eight more, since they are sorted.
        Count before = {n};
#pragma unroll 1
        for (u32 from = 0; from < lists; from += 4) {
#pragma unroll 1
            for (u32 q = 0; q < k; q += 8) {
                uint4 others[4][2];
#pragma unroll
                for (u32 i = 0; i < 8; i++) others[i / 2][i % 2] = ((const uint4*)(keys + (from + i / 2) * WARP + q))[i % 2];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u32 of = from + i / 2;
                    before.add(others[i / 2][i % 2], of == list ? NONE : key - (of < list));
                }
            }
        }
        const u32 rank = before.all();
        if (key && rank < k) {
            const u32 expert = list * WARP + members[own];
            chosen[rank] = expert;
            weights[rank] = scoring == SIGMOID ? values[expert] : number_of(key);
        }
    }
    // Those of the first warp are for itself.
    if (lists << log > WARP) __syncthreads();
    if (warp > 0) return;
    __syncwarp();
    // 4. Their order, and their weights, both halves of the warp the same
    const u32 rank = threadIdx.x % 16, own = chosen[rank];
    const bool there = rank < k;
    u32 at = 0;
#pragma unroll
    for (u32 q = 0; q < MOST_SLOTS / 4; q++) {
        const uint4 others = ((const uint4*)chosen)[q];
        at += (others.x < own) + (others.y < own) + (others.z < own) + (others.w < own);
    }
    float weight = 0.0f;
    if (weighed) {
        weight = there ? weights[rank] : 0.0f;
        if (scoring == TOP_K_SOFTMAX) weight = exp_(sub(weight, weights[0]));
        if (scoring == TOP_K_SOFTMAX || p.renormalise) {
            float all = lane_tree(there ? add(0.0f, weight) : 0.0f);
            if (scoring == SIGMOID) all = add(all, 1e-20f);
            weight = div(weight, all);
        }
        if (scoring == SIGMOID) weight = mul(weight, p.scale);
    }
    if (threadIdx.x < k) {
        taken.experts[at] = own;
        taken.weights[at] = weight;
    }
}

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
