// Paged attention of any shape: keys and values into their slots, each query head of each token over what it sees, and the combination of partitions.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/heads.cuh"
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
            weigh<G, 2>(p, c, q, q_scales, base, from, to, heads, located, scores, ends, weight_scales);
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
    weigh<G, 4>(p, c, smem, q_scales, base, from, to, heads, located, scores, ends, weight_scales);
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
