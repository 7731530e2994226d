// Paged attention of any shape: keys and values into their slots, each query head of each token over what it sees, and the combination of partitions.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/lanes.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

// A block has two warps and takes a KV head of a token: one warp the key, the other the value. Shared memory: a key.
extern "C" __global__ void attention_store_kv(const Attention p) {
    begin();
    float* head = smem;
    u32 h = blockIdx.y;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        const Cache& c = p.cache;
        u64 slot = p.slots[t], block = slot / c.block_tokens;
        u32 offset = slot % c.block_tokens;
        if (threadIdx.x < WARP) {
            const float* angles = p.angles + (u64)p.positions[t] * 2 * p.half;
            turn(p.k.row(t) + h * c.k_dim, head, c.k_dim, p.k_norm, angles, p.half, p.run);
            store(head, c.k_dim, c.type, place(c, c.k, c.k_scales, c.k_dim, block, offset, h));
            __syncwarp();
        } else {
            store(p.v.row(t) + h * c.v_dim, c.v_dim, c.type, place(c, c.v, c.v_scales, c.v_dim, block, offset, h));
        }
    }
}

// Addresses of a partition's visible keys and values. A thread for each position looks them up once.
struct Located {
    const u8* keys[PARTITION];
    const u8* values[PARTITION];
    float k_scales[PARTITION];
    float v_scales[PARTITION];
};

__device__ __forceinline__ void locate(const Attention& p, u32 t, const u32* table, u32 kv_head, u32 base, u32 from, u32 to, Located& located) {
    const Cache& c = p.cache;
    u32 at = base + threadIdx.x;
    if (at >= from && at < to) {
        const u64 slot = slot_of(p, t, table, at), block = slot / c.block_tokens;
        const u32 offset = slot % c.block_tokens;
        Place key = place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head);
        Place value = c.before_value ? value_in(c, key) : place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
        located.keys[threadIdx.x] = key.row;
        located.values[threadIdx.x] = value.row;
        if (has_scales(c.type)) {
            located.k_scales[threadIdx.x] = read_scale(key.scale);
            located.v_scales[threadIdx.x] = read_scale(value.scale);
        }
    }
}

// The sums of products of a key of sixteen bits with G queries: of all but two low bytes, as `docs/numerics.md` has them. A query's integers are floats.
template <int G> __device__ __forceinline__ void dot_int16(const i8* key, u32 dim, const float* q, u32 pad, int (&sums)[G]) {
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = 0;
    for (u32 d = 0; d < dim; d++) {
        const int high = key[d], all = 256 * high + key[dim + d];
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int n = (int)q[g * pad + d];
            sums[g] += high_byte(n) * all + low_byte(n) * high;
        }
    }
}

// The weights of one partition, for G query heads that share a KV head: scores[g][position] = exp(s - m) (times the value's scale), ends[g] = m and the sum
// of weights. By a block with a thread for each position; `q`: [G][padded k_dim]. Positions from `from` to `to` are visible. Where queries are integers,
// weights become integers too, with `weight_scales`; of eight bits all their sums are below 2^24, which floats hold exactly.
template <int G, u32 DEEP>
__device__ __forceinline__ void weigh(const Attention& p, const float* q, float* q_scales, u32 base, u32 from, u32 to, u32 heads, const Located& located,
                                      float (*scores)[PARTITION], float (*ends)[2], float* weight_scales) {
    const Cache& c = p.cache;
    u32 position = threadIdx.x, lane = threadIdx.x % 16, pad = padded(c.k_dim);
    // 1. scores: a thread has the sixteen lanes of a dot product
    if (base + position >= from && base + position < to) {
        float acc[G][16];
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int i = 0; i < 16; i++) acc[g][i] = 0.0f;
        }
        const u8* key = located.keys[position];
        int whole[G];
        if (c.type == INT16) dot_int16<G>((const i8*)key, c.k_dim, q, pad, whole);
        else if (c.type == F32) dot_lanes<G, F32, DEEP>(key, c.k_dim, q, pad, acc);
        else if (c.type == F16) dot_lanes<G, F16, DEEP>(key, c.k_dim, q, pad, acc);
        else if (c.type == BF16) dot_lanes<G, BF16, DEEP>(key, c.k_dim, q, pad, acc);
        else dot_lanes<G, INT8, DEEP>(key, c.k_dim, q, pad, acc);
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int step = 8; step > 0; step /= 2) {
#pragma unroll
                for (int i = 0; i < step; i++) acc[g][i] = add(acc[g][i], acc[g][i + step]);
            }
            float s = c.type == INT16 ? (float)whole[g] : acc[g][0];
            if (has_scales(c.type)) s = mul(s, located.k_scales[position]);
            s = mul(s, p.integers ? mul(p.scale, q_scales[g]) : p.scale);
            if (p.capped) s = mul(tanh_(div(s, p.cap)), p.cap);
            scores[g][position] = s;
        }
    }
    __syncthreads();
    // 2. weights: a warp takes a head
    for (u32 g = threadIdx.x / WARP; g < heads; g += blockDim.x / WARP) {
        float top = bits(NEGATIVE_INFINITY);
        for (u32 i = threadIdx.x % WARP; i < PARTITION; i += WARP) {
            if (base + i >= from && base + i < to) top = greater(scores[g][i], top);
        }
        top = warp_max(top);
        float sum = 0.0f, weights[PARTITION / 16];
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            bool visible = base + i >= from && base + i < to;
            weights[j] = visible ? exp_below(sub(scores[g][i], top)) : 0.0f;
            sum = add(sum, weights[j]);
        }
        u32 greatest = 0;
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            if (has_scales(c.type) && base + i >= from && base + i < to) {
                weights[j] = mul(weights[j], located.v_scales[i]);
                greatest = max(greatest, bits(weights[j]) & 0x7fffffffu);
            }
        }
        if (p.integers) {
            const float most = c.type == INT8 ? 255.0f : 65535.0f, a = bits(warp_max(greatest)), inv = div(most, a);
            bool finite = is_finite(a);
            // A row with NaN or infinity becomes zeros with a scale of NaN.
            bool some = finite && is_finite(inv);
#pragma unroll
            for (u32 j = 0; j < PARTITION / 16; j++) {
                // This addition rounds numbers of this size to the nearest integer, ties to even.
                weights[j] = some ? sub(add(mul(weights[j], inv), 12582912.0f), 12582912.0f) : 0.0f;
            }
            if (threadIdx.x % WARP == 0) weight_scales[g] = finite ? mul(byte_factor(c.type), div(a, most)) : bits(0x7fc00000u);
        }
        // Both halves of the warp read the scores before either overwrites them.
        __syncwarp();
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            if (threadIdx.x % WARP < 16 && base + i >= from && base + i < to) scores[g][i] = weights[j];
        }
        sum = lane_tree(sum);
        if (threadIdx.x % WARP == 0) {
            ends[g][0] = top;
            ends[g][1] = sum;
        }
    }
    __syncthreads();
}

template <int G, u32 TYPE, u32 DEEP>
__device__ __forceinline__ void sum_typed(const Located& located, u32 first, u32 end, u32 d, float (*scores)[PARTITION], float (&sums)[G]) {
    // Many loads are issued before the first is used.
    for (u32 from = first; from < end; from += DEEP) {
        float v[DEEP];
#pragma unroll
        for (u32 i = 0; i < DEEP; i++) v[i] = from + i < end ? cached(located.values[from + i], TYPE, d) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < DEEP; i++) {
            if (from + i < end) {
#pragma unroll
                for (int g = 0; g < G; g++) sums[g] = fma(scores[g][from + i], v[i], sums[g]);
            }
        }
    }
}

// The same of values of sixteen bits, whose low bytes lie `dim` further.
template <int G>
__device__ __forceinline__ void sum_int16(const Located& located, u32 first, u32 end, u32 dim, u32 d, float (*scores)[PARTITION], float (&sums)[G]) {
    int whole[G];
#pragma unroll
    for (int g = 0; g < G; g++) whole[g] = 0;
#pragma unroll 4
    for (u32 i = first; i < end; i++) {
        const i8* value = (const i8*)located.values[i];
        const int high = value[d], all = 256 * high + value[dim + d];
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int n = (int)scores[g][i];
            whole[g] += (n >> 8) * all + (n & 255) * high;
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = (float)whole[g];
}

// The weighted sums of values at column `d` over the visible positions, for G heads.
template <int G, u32 DEEP>
__device__ __forceinline__ void sum_values(const Cache& c, const Located& located, u32 base, u32 from, u32 to, u32 d, float (*scores)[PARTITION],
                                           float (&sums)[G]) {
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = 0.0f;
    if (c.type == F32) sum_typed<G, F32, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == F16) sum_typed<G, F16, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == BF16) sum_typed<G, BF16, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == INT16) sum_int16<G>(located, from - base, to - base, c.before_value ? c.k_dim : c.v_dim, d, scores, sums);
    else sum_typed<G, INT8, DEEP>(located, from - base, to - base, d, scores, sums);
}

// Rounds a query to integers, stored exactly as floats, and finds its scale; by a warp.
__device__ __forceinline__ void round_query(float* q, u32 dim, u32 type, float* scale) {
    const u32 lane = threadIdx.x % WARP;
    const Rounding rounding = rounding_of(q, dim, top_of(type));
    for (u32 i = lane; i < dim; i += WARP) q[i] = (float)round_int(mul(q[i], rounding.inv));
    if (lane == 0) *scale = mul(byte_factor(type), rounding.scale);
    __syncwarp();
}

// Norms and rotates the queries of a tile of heads, a warp for each. `scales`: their scales, if they become integers.
__device__ __forceinline__ void turn_queries(const Attention& p, u32 t, u32 first, u32 heads, float* q, float* scales) {
    const Cache& c = p.cache;
    u32 pad = padded(c.k_dim);
    for (u32 g = threadIdx.x / WARP; g < heads; g += blockDim.x / WARP) {
        const float* q_in = p.q.row(t) + (u64)(first + g) * c.k_dim * (p.gated ? 2 : 1);
        turn(q_in, q + g * pad, c.k_dim, p.q_norm, p.angles + (u64)p.positions[t] * 2 * p.half, p.half, p.run);
        if (p.integers) round_query(q + g * pad, c.k_dim, c.type, scales + g);
        if (threadIdx.x % WARP < pad - c.k_dim) q[g * pad + c.k_dim + threadIdx.x % WARP] = 0.0f;
    }
    __syncthreads();
}

// A block of four warps takes G query heads, of one KV head, of a token through all partitions in turn. Grid: (tokens, tiles of heads). Shared memory:
// q [G][padded k_dim] and o [G][v_dim].
template <int G> __device__ __forceinline__ void attend_heads(const Attention& p) {
    __shared__ float scores[G][PARTITION], ends[G][2], q_scales[G], weight_scales[G];
    __shared__ Located located;
    const Cache& c = p.cache;
    float *q = smem, *o = q + G * padded(c.k_dim);
    u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        u32 position = last_seen(p, t), seen = first_seen(p, position);
        const u32* table = p.tables + p.table_starts[p.sequences[t]];
        __syncthreads();
        turn_queries(p, t, first, heads, q, q_scales);
        float m[G], l[G];
        for (u32 base = seen / PARTITION * PARTITION; base <= position; base += PARTITION) {
            u32 from = max(seen, base), to = min(position + 1, base + PARTITION);
            locate(p, t, table, kv_head, base, from, to, located);
            __syncthreads();
            weigh<G, 2>(p, q, q_scales, base, from, to, heads, located, scores, ends, weight_scales);
            bool begins = base <= seen;
            float a[G], b[G];
#pragma unroll
            for (int g = 0; g < G; g++) {
                float m_next = ends[g][0], l_next = ends[g][1];
                float top = begins ? m_next : greater(m_next, m[g]);
                a[g] = begins ? 0.0f : exp_below(sub(m[g], top));
                b[g] = begins ? 1.0f : exp_below(sub(m_next, top));
                l[g] = begins ? l_next : fma(l[g], a[g], mul(l_next, b[g]));
                m[g] = top;
            }
            for (u32 d = threadIdx.x; d < c.v_dim; d += blockDim.x) {
                float sums[G];
                sum_values<G, 16>(c, located, base, from, to, d, scores, sums);
#pragma unroll
                for (int g = 0; g < G; g++) {
                    float* to_o = o + g * c.v_dim + d;
                    if (p.integers) sums[g] = mul(sums[g], weight_scales[g]);
                    *to_o = begins ? sums[g] : fma(*to_o, a[g], mul(sums[g], b[g]));
                }
            }
            __syncthreads();
        }
        for (u32 d = threadIdx.x; d < c.v_dim; d += blockDim.x) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                if (g < heads) finish(p, t, first + g, d, o[g * c.v_dim + d], m[g], l[g]);
            }
        }
    }
}

// The same for one partition; `attention_combine` combines the results. Grid: (tokens, tiles of heads, partitions). Shared memory: q [G][padded k_dim].
template <int G> __device__ __forceinline__ void attend_partition(const Attention& p) {
    __shared__ float scores[G][PARTITION], ends[G][2], q_scales[G], weight_scales[G];
    __shared__ Located located;
    const Cache& c = p.cache;
    u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    u32 t = blockIdx.x, position = last_seen(p, t), seen = first_seen(p, position);
    u32 base = (seen / PARTITION + blockIdx.z) * PARTITION;
    if (base > position) return;
    u32 from = max(seen, base), to = min(position + 1, base + PARTITION);
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    locate(p, t, table, kv_head, base, from, to, located);
    turn_queries(p, t, first, heads, smem, q_scales);
    weigh<G, 4>(p, smem, q_scales, base, from, to, heads, located, scores, ends, weight_scales);
    const u32 width = part_width(c.v_dim);
    float* parts = p.parts + (((u64)t * p.heads + first) * p.partitions + blockIdx.z) * width;
    u64 next = (u64)p.partitions * width;
    for (u32 d = threadIdx.x; d < c.v_dim; d += blockDim.x) {
        float sums[G];
        sum_values<G, 16>(c, located, base, from, to, d, scores, sums);
#pragma unroll
        for (int g = 0; g < G; g++) {
            if (g < heads) parts[g * next + d] = p.integers ? mul(sums[g], weight_scales[g]) : sums[g];
        }
    }
    if (threadIdx.x < 2) {
        for (u32 g = 0; g < heads; g++) parts[g * next + c.v_dim + threadIdx.x] = ends[g][threadIdx.x];
    }
}

// Combines the partitions of a head of a token. A block takes 32 columns, and 128 partitions at a time. A running maximum is exact, so all factors can be computed at
// once; only one fma for each partition must run in order, and one warp does that. Grid: (tokens, heads, tiles of columns).
static const u32 JOIN_THREADS = 128, JOIN_COLUMNS = 32;

extern "C" __global__ void __launch_bounds__(JOIN_THREADS) attention_combine(const __grid_constant__ Attention p) {
    __shared__ __align__(16) float values[2][JOIN_THREADS][JOIN_COLUMNS];
    // Factors of the result so far and of a partition, and the latter times the partition's sum.
    __shared__ float4 factors[2][JOIN_THREADS];
    __shared__ float ends[JOIN_THREADS / WARP];
    const Cache& c = p.cache;
    const u32 width = part_width(c.v_dim), t = blockIdx.x, h = blockIdx.y, d = blockIdx.z * JOIN_COLUMNS, position = last_seen(p, t);
    const u32 count = position / PARTITION - first_seen(p, position) / PARTITION + 1, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* parts = p.parts + ((u64)t * p.heads + h) * p.partitions * width;
    begin();
    float m, sum, before = bits(NEGATIVE_INFINITY), o = -0.0f, l = -0.0f;
    auto ask = [&](u32 from) {
        const u32 n = from + threadIdx.x;
        m = n < count ? __ldcg(parts + (u64)n * width + c.v_dim) : bits(NEGATIVE_INFINITY);
        sum = n < count ? __ldcg(parts + (u64)n * width + c.v_dim + 1) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < JOIN_COLUMNS / 4; i++) {
            const u32 row = (i * JOIN_THREADS + threadIdx.x) / (JOIN_COLUMNS / 4), column = threadIdx.x % (JOIN_COLUMNS / 4) * 4;
            float* to = &values[from / JOIN_THREADS % 2][row][column];
            if (from + row >= count) *(float4*)to = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            else if (d + column < c.v_dim) cp_async_16(to, parts + (u64)(from + row) * width + d + column);
        }
    };
    ask(0);
#pragma unroll 1
    for (u32 from = 0; from < count; from += JOIN_THREADS) {
        const u32 n = from + threadIdx.x, odd = from / JOIN_THREADS % 2;
        // 1. Running maxima and factors. The first partition is taken as it is; a missing one adds -0, which changes nothing.
        float reached = m;
#pragma unroll
        for (u32 step = 1; step < WARP; step *= 2) {
            float other = __shfl_up_sync(ALL, reached, step);
            reached = lane >= step ? greater(other, reached) : reached;
        }
        if (lane == WARP - 1) ends[warp] = reached;
        const float neighbour = __shfl_up_sync(ALL, reached, 1);
        __syncthreads();
        float all = before;
#pragma unroll
        for (u32 w = 0; w < JOIN_THREADS / WARP; w++) {
            if (w < warp) before = greater(ends[w], before);
            all = greater(ends[w], all);
        }
        if (lane > 0) before = greater(neighbour, before);
        const float top = greater(m, before), a = exp_below(sub(before, top)), b = exp_below(sub(m, top));
        before = all;
        factors[odd][threadIdx.x] = n == 0       ? make_float4(0.0f, 1.0f, sum, 0.0f)
                                    : n >= count ? make_float4(1.0f, -0.0f, -0.0f, 0.0f)
                                                 : make_float4(a, b, mul(sum, b), 0.0f);
        cp_async_wait_all();
        __syncthreads();
        if (from + JOIN_THREADS < count) ask(from + JOIN_THREADS);
        if (warp > 0) continue;
        // 2. In order
        const u32 steps = min(count - from, JOIN_THREADS);
        float v[2][8];
        float4 f[2][8];
        auto fetch = [&](u32 half, u32 i) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) v[half][e] = values[odd][i + e][lane], f[half][e] = factors[odd][i + e];
        };
        auto take = [&](u32 half) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                l = fma(l, f[half][e].x, f[half][e].z);
                o = fma(o, f[half][e].x, mul(v[half][e], f[half][e].y));
            }
        };
        fetch(0, 0);
#pragma unroll 1
        for (u32 i = 0; i < steps; i += 16) {
            fetch(1, i + 8);
            take(0);
            fetch(0, (i + 16) % JOIN_THREADS);
            take(1);
        }
    }
    if (warp == 0 && d + lane < c.v_dim) finish_joined(p, t, h, d + lane, o, before, l);
}

#define HEADS(G)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) attention_##G(const Attention p) { begin(); attend_heads<G>(p); }         \
    extern "C" __global__ void __launch_bounds__(128) attention_partition_##G(const Attention p) { begin(); attend_partition<G>(p); }

HEADS(1)
HEADS(2)
HEADS(4)
