// Products of integer groups of 64, and of bf16 pairs, for one token, as a layer's part (rows.cu says what that is). What counts here is the time from the end of the kernel before to the
// end of this one: what does not hang on that kernel comes before the wait (weights, scales, the norm's weights), and there is little code, since each
// instruction is fetched for a few executions.
//
// A lane takes a whole weight group at a time, so that its two integer sums meet in registers; a row has 2^lanes lanes side by side, group w in lane w mod 2^lanes, and
// its four chains wander through them, chain w mod 4 in lanes that are alike mod 4. A unit is what a lane takes at a time; UNITS are under way, of as many rows where a
// row is one unit, or of one row.
#pragma once
#include "rows.cu"

// A matrix; addresses are those that row 0 of the launch would have, whose rows are counted on from matrix to matrix.
struct OnePart {
    const u8* data;
    const u8* scales;
    const u8* biases;
    float* out;
};

// Where the rows of a matrix go in which heads are interleaved: each `period` of them has up to four runs, which begin at `starts`, and of which the next head's goes
// `columns` behind this one's. What is not there begins nowhere.
struct Interleaved {
    float* outs[4];
    u32 starts[4];
    u32 columns[4];
    u32 period;
    u32 unused;
};

struct One {
    OnePart parts[3];
    // Of each part, where any are.
    Interleaved heads[3];
    const float* x;
    // Null: no norm.
    const float* norm;
    u64 row_bytes;
    float eps;
    u32 cols;
    // Rows that a warp takes together, in all matrices; of gate and up these alternate.
    u32 sets;
    // From which on they are the second and the third matrix's.
    u32 second;
    u32 third;
    u32 log_lanes;
    u32 gated;
    u32 accumulate;
    u32 type;
    u32 interleaved;
};

// Where a row's result goes. Rows are counted on from matrix to matrix, and come in sets.
__device__ __forceinline__ float* result_of(const One& p, u32 set, u32 row, u32 rows_of_set) {
    const u32 part = p.gated || set < p.second ? 0 : set < p.third ? 1 : 2;
    if (!p.interleaved) return p.parts[part].out + row;
    const Interleaved& heads = p.heads[part];
    const u32 own = row - rows_of_set * (part == 0 ? 0 : part == 1 ? p.second : p.third), head = own / heads.period, at = own - head * heads.period;
    u32 run = 0;
#pragma unroll
    for (u32 i = 1; i < 4; i++) run += at >= heads.starts[i];
    return heads.outs[run] + (u64)head * heads.columns[run] + (at - heads.starts[run]);
}

// Activations in shared memory: the four quarters of each group in arrays of their own so that neighbours meet no bank twice; both scales, and the sum of both means.
struct Quarters {
    uint4* q;
    // From quarter to quarter.
    u32 stride;
    float2* sx;
    float* m;
};

// Encodes eight of x's columns; four threads next to each other have 32, whose scale and mean they return. `i`: which eight.
__device__ __forceinline__ float2 encode_eight(const float (&v)[8], bool inside, u32 i, uint4* quarters, u32 stride) {
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) most = max(most, bits(v[k]) & 0x7fffffffu);
    most = max(most, __shfl_xor_sync(ALL, most, 1));
    most = max(most, __shfl_xor_sync(ALL, most, 2));
    float a = bits(most), inv = div(127.0f, a);
    // Of a group of zeros, or with a NaN or an infinity in it, q is 0.
    u32 keep = is_finite(inv) && is_finite(a) ? ALL : 0;
    // Sizes are at most 127: added to this, a number is rounded to the nearest integer, ties to even, and that is what its lowest byte says.
    u32 q[8];
#pragma unroll
    for (int k = 0; k < 8; k++) q[k] = bits(add(mul(v[k], inv), 12582912.0f));
    u32 even = keep & __byte_perm(__byte_perm(q[0], q[2], 0x0040), __byte_perm(q[4], q[6], 0x0040), 0x5410);
    u32 odd = keep & __byte_perm(__byte_perm(q[1], q[3], 0x0040), __byte_perm(q[5], q[7], 0x0040), 0x5410);
    if (inside) *(uint2*)((u8*)(quarters + i / 2 % 4 * stride + i / 8) + i % 2 * 8) = make_uint2(even, odd);
    int sum = __dp4a((int)even, 0x01010101, __dp4a((int)odd, 0x01010101, 0));
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    float scale = div(a, 127.0f);
    return make_float2(scale, mul(scale, (float)sum));
}

// The same for threads of which eight next to each other have a group of weights.
__device__ __forceinline__ void encode_group(const float (&v)[8], bool inside, u32 i, const Quarters& to) {
    float2 own = encode_eight(v, inside, i, to.q, to.stride);
    float2 next = make_float2(__shfl_down_sync(ALL, own.x, 4), __shfl_down_sync(ALL, own.y, 4));
    if (inside && i % 8 == 0) {
        to.sx[i / 8] = make_float2(own.x, next.x);
        to.m[i / 8] = add(own.y, next.y);
    }
}

// The integer sum of 32 columns, exact, as a float.
template <int BITS> __device__ __forceinline__ float part_sum(const u32* words, uint4 low, uint4 high) {
    // Added to these bits, a sum of less than 2^22 is the float 2^23 + 2^22 and that sum.
    const u32 MAGIC_BITS = 0x4b400000u;
    int sum;
    if (BITS == 4) {
        const u32 EVEN = 0x0f0f0f0fu, ODD = 0xf0f0f0f0u;
        // Odd columns are sixteen times too large, exactly.
        int even = dot4(words[0] & EVEN, low.x, (int)MAGIC_BITS), odd = dot4(words[0] & ODD, low.y, 0);
        int even1 = dot4(words[1 % BITS] & EVEN, low.z, 0), odd1 = dot4(words[1 % BITS] & ODD, low.w, 0);
        even = dot4(words[2 % BITS] & EVEN, high.x, even);
        odd = dot4(words[2 % BITS] & ODD, high.y, odd);
        even1 = dot4(words[3 % BITS] & EVEN, high.z, even1);
        odd1 = dot4(words[3 % BITS] & ODD, high.w, odd1);
        sum = even + even1 + (odd + odd1 >> 4);
    } else {
        u32 own[BITS], w[8];
#pragma unroll
        for (int i = 0; i < BITS; i++) own[i] = words[i];
        spread<BITS>(own, w);
        int even = dot4(w[0], low.x, (int)MAGIC_BITS), odd = dot4(w[1], low.y, 0);
        even = dot4(w[2], low.z, even);
        odd = dot4(w[3], low.w, odd);
        even = dot4(w[4], high.x, even);
        odd = dot4(w[5], high.y, odd);
        even = dot4(w[6], high.z, even);
        odd = dot4(w[7], high.w, odd);
        sum = even + odd;
    }
    return sub(bits((u32)sum), 12582912.0f);
}

// Eight floats; zeros where they are not inside.
__device__ __forceinline__ void load_eight(float (&v)[8], const float* x, u32 i, bool inside) {
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (inside) {
        a = ((const float4*)x)[2 * i];
        b = ((const float4*)x)[2 * i + 1];
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The same past the first-level cache, which may hold what was there before.
__device__ __forceinline__ void load_eight_written(float (&v)[8], const float* x, u32 i, bool inside) {
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (inside) {
        a = __ldcg((const float4*)x + 2 * i);
        b = __ldcg((const float4*)x + 2 * i + 1);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// What is encoded: [cols], normed or not.
struct Row {
    const float* x;
    // Null: no norm.
    const float* norm;
    float eps;
    u32 cols;
};

// Encodes x by the whole block; the norm's weights are on their way to `weights`. `loose`: [cols] floats, where there is a norm or much to encode. A thread's first
// eight columns stay in its registers: loads that go straight to shared memory take longer.
template <int THREADS> __device__ __forceinline__ void stage_one(const Row& p, const Quarters& to, float* loose, const float* weights) {
    __shared__ float inverse;
    const u32 eights = p.cols / 8;
    const bool first = threadIdx.x < eights;
    float v[8], inv = 1.0f;
    load_eight_written(v, p.x, threadIdx.x, first);
#pragma unroll 1
    for (u32 i = 2 * THREADS + threadIdx.x; i < 2 * eights; i += THREADS) copy_later((float4*)loose + i, (const float4*)p.x + i);
    if (p.norm) {
        if (first) {
            ((float4*)loose)[2 * threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
            ((float4*)loose)[2 * threadIdx.x + 1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    if (p.norm || eights > THREADS) {
        copied();
        __syncthreads();
    }
    if (p.norm) {
        if (threadIdx.x < WARP) {
            float own = inverse_rms_256(loose, p.cols, p.eps);
            if (threadIdx.x == 0) inverse = own;
        }
        __syncthreads();
        inv = inverse;
    }
    // Whole warps go on, or none of a warp.
#pragma unroll 1
    for (u32 i = threadIdx.x; i / WARP * WARP < eights; i += THREADS) {
        bool inside = i < eights;
        if (i >= THREADS) load_eight(v, loose, i, inside);
        if (p.norm) {
            float w[8];
            load_eight(w, weights, i, inside);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = mul(mul(v[k], inv), w[k]);
        }
        encode_group(v, inside, i, to);
    }
}

// A scale of sixteen bits.
__device__ __forceinline__ float half_value(u32 raw, u32 type) { return type == BF16 ? bits(raw << 16) : from_f16((u16)raw); }

// A unit's weights, its scale and its bias, under way; zeros where it is not there. `from`: anything that says where a matrix lies.
template <int BITS, class Place>
__device__ __forceinline__ void load_unit(u32 (&words)[2 * BITS], u32& s, u32& b, const Place& from, u64 row, u64 row_bytes, u32 groups, u32 group, bool there) {
    const u8* data = from.data + row * row_bytes + group * (8 * BITS);
    if (BITS % 2 == 0) {
#pragma unroll
        for (int i = 0; i < BITS / 2; i++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (there) v = __ldcs((const uint4*)data + i);
            words[4 * i % (2 * BITS)] = v.x;
            words[(4 * i + 1) % (2 * BITS)] = v.y;
            words[(4 * i + 2) % (2 * BITS)] = v.z;
            words[(4 * i + 3) % (2 * BITS)] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BITS; i++) {
            uint2 v = make_uint2(0, 0);
            if (there) v = __ldcs((const uint2*)data + i);
            words[2 * i] = v.x;
            words[2 * i + 1] = v.y;
        }
    }
    u64 scale = row * groups + group;
    s = b = 0;
    if (there) {
        s = __ldcs((const u16*)from.scales + scale);
        b = __ldcs((const u16*)from.biases + scale);
    }
}

// What a unit's scale and its bias are multiplied with, of group `g` of x.
template <int BITS> __device__ __forceinline__ void unit_sum(const u32 (&words)[2 * BITS], const Quarters& x, u32 g, float& t, float& m) {
    const uint4* q = x.q + g;
    float first = part_sum<BITS>(words, q[0], q[x.stride]), second = part_sum<BITS>(words + BITS, q[2 * x.stride], q[3 * x.stride]);
    float2 sx = x.sx[g];
    m = x.m[g];
    t = fma(sx.y, second, mul(sx.x, first));
}

// Where a lane's unit lies.
struct Unit {
    const OnePart& part;
    u64 row;
    u32 group;
    bool there;
};

__device__ __forceinline__ Unit unit_of(const One& p, u32 set, u32 step) {
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, group = (step << log) + (lane & ((1u << log) - 1));
    const OnePart& part = p.parts[p.gated ? set & 1 : set < p.second ? 0 : set < p.third ? 1 : 2];
    return {part, ((u64)(p.gated ? set >> 1 : set) << (5 - log)) + (lane >> log), group, set < p.sets && group < p.cols / 64};
}

// Which rows come after these.
__device__ __forceinline__ u32 set_after(u32 set, u32 together, u32 task, u32 warps) {
    set += together;
    return set & (task - 1) ? set : set + (warps - 1) * task;
}

template <int BITS, int UNITS, int THREADS> __device__ __forceinline__ void multiply_one(const One& p) {
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, lanes = 1u << log, in_row = lane & (lanes - 1), row_in_set = lane >> log, log_rows = 5 - log;
    const u32 subs = lanes >> 2, sub = in_row >> 2, groups = p.cols / 64, steps = (groups + lanes - 1) >> log;
    const bool rows_mode = steps == 1;
    const u32 together = rows_mode ? UNITS : 1, task = p.gated && together == 1 ? 2 : together, warps = gridDim.x * (THREADS / WARP);
    WATCH();
    Quarters x;
    x.q = (uint4*)room;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    float *loose = (float*)(x.q + 4 * x.stride) + (3 * groups + 3) / 4 * 4, *weights = loose + p.cols;
    if (p.norm) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += THREADS) copy_later((float4*)weights + i, (const float4*)p.norm + i);
    }
    // Neighbouring rows go to different multiprocessors.
    u32 set = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * task, step = 0;
    bool waits = true;
    float acc = 0.0f, gate = 0.0f;
#pragma unroll 1
    while (true) {
        // 1. Weights
        u32 words[UNITS][2 * BITS], s[UNITS], b[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            const Unit unit = unit_of(p, rows_mode ? set + d : set, rows_mode ? 0 : step + d);
            load_unit<BITS>(words[d], s[d], b[d], unit.part, unit.row, p.row_bytes, groups, unit.group, unit.there);
        }
        // 2. The row whose result this lane writes, what is there, and the first time the activations
        const bool last = rows_mode || step + UNITS >= steps;
        const u32 own = set + in_row;
        float* to = nullptr;
        if (last && in_row < together && own < p.sets && (!p.gated || (own & 1))) {
            u32 row = ((p.gated ? own >> 1 : own) << log_rows) + row_in_set;
            to = result_of(p, own, row, 1u << log_rows);
        }
        if (waits) {
            STAMP(3 + p.accumulate, 0);
            begin();
            STAMP(3 + p.accumulate, 1);
        }
        float before = 0.0f;
        if (p.accumulate && to) before = *to;
        if (waits) {
            stage_one<THREADS>({p.x, p.norm, p.eps, p.cols}, x, loose, weights);
            __syncthreads();
            waits = false;
            STAMP(3 + p.accumulate, 2);
        }
        // 3. Integer sums
        float t[UNITS], m[UNITS], y[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            u32 g = min(((rows_mode ? 0 : step + d) << log) + in_row, groups - 1);
            unit_sum<BITS>(words[d], x, g, t[d], m[d]);
        }
        // 4. Chains: those of rows side by side, or one after the other's. What is not there is left out.
        const bool there0 = in_row < groups;
        if (rows_mode) {
#pragma unroll
            for (int d = 0; d < UNITS; d++) y[d] = 0.0f;
#pragma unroll 1
            for (u32 k = 0; k < subs; k++) {
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    float next = fma(half_value(b[d], p.type), m[d], fma(half_value(s[d], p.type), t[d], y[d]));
                    if (sub == k && there0) y[d] = next;
                    y[d] = __shfl_sync(ALL, y[d], (k << 2) + (lane & 3), lanes);
                }
            }
        } else {
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                bool there = ((step + d) << log) + in_row < groups;
#pragma unroll 1
                for (u32 k = 0; k < subs; k++) {
                    float next = fma(half_value(b[d], p.type), m[d], fma(half_value(s[d], p.type), t[d], acc));
                    if (sub == k && there) acc = next;
                    acc = __shfl_sync(ALL, acc, (k << 2) + (lane & 3), lanes);
                }
                y[d] = acc;
            }
            y[0] = acc;
        }
        // 5. Results
        if (last) {
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 2));
                y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 1));
            }
            float mine = y[0], other = gate;
#pragma unroll
            for (int d = 1; d < UNITS; d++) {
                if (in_row == d && rows_mode) {
                    mine = y[d];
                    other = y[d - 1];
                }
            }
            gate = mine;
            acc = 0.0f;
            if (to) *to = p.gated ? mul(silu(other), mine) : add(before, mine);
        }
        // 6. On
        step += UNITS;
        if (last) {
            step = 0;
            set = set_after(set, together, task, warps);
        }
        if (set >= p.sets) break;
    }
    STAMP(3 + p.accumulate, 3);
}

// Blocks of 256 threads for what is through at once, so that they hold little up; else of 512; and of as many with more under way for long rows.
#define ONE(bits)                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 3) one_##bits(const __grid_constant__ One p) { multiply_one<bits, 2, 256>(p); }    \
    extern "C" __global__ void __launch_bounds__(512, 2) one_##bits##_wide(const __grid_constant__ One p) { multiply_one<bits, 2, 512>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 1) one_##bits##_deep(const __grid_constant__ One p) { multiply_one<bits, 4, 512>(p); }

ONE(2)
ONE(3)
ONE(4)
ONE(5)
ONE(6)
ONE(8)

// ---- bf16 pairs: half a warp takes a row, a lane two columns of each 32

// Steps of 32 columns in a piece of a row. Two pieces of a warp are under way.
static const u32 PIECE_STEPS = 16, PIECE_COLUMNS = 32 * PIECE_STEPS;

// x as floats, rounded to bf16, by the whole block; zeros behind it up to a whole piece. The norm's weights are on their way to `weights`.
template <int THREADS> __device__ __forceinline__ void stage_rounded(const Row& p, float* to, const float* weights) {
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
        copied();
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

template <int THREADS> __device__ __forceinline__ void multiply_one_pairs(const One& p) {
    // Of no weights: what is added to a sum is a zero that leaves its sign as it is.
    const u32 NOTHING = 0x80008000u;
    const u32 lane = threadIdx.x % 16, row_in_set = threadIdx.x % WARP / 16, steps = p.cols / 32, pieces = (steps + PIECE_STEPS - 1) / PIECE_STEPS;
    const u32 task = p.gated ? 2 : 1, warps = gridDim.x * (THREADS / WARP);
    float *x = room, *weights = x + pieces * PIECE_COLUMNS;
    if (p.norm) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += THREADS) copy_later((float4*)weights + i, (const float4*)p.norm + i);
    }
    auto part_of = [&](u32 set) -> const OnePart& { return p.parts[p.gated ? set & 1 : set < p.second ? 0 : set < p.third ? 1 : 2]; };
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

extern "C" __global__ void __launch_bounds__(512, 2) one_bf16(const __grid_constant__ One p) { multiply_one_pairs<512>(p); }
