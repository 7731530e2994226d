// Attention of the last token of each sequence, which is all of it that a step computes: what the cache held before is under way before the kernel before this
// one has ended, and the token's own key and value are stored here. A block takes a partition for the query heads that share a KV head, or some of them; the
// last of several to come so far joins what they have left, in their order, or `join` does where they are very many. Grid: (tokens, tiles of heads, partitions).
#pragma once
#include "attention.cu"

static const u32 LAST_THREADS = 512;

// Four elements of a key in stored form.
template <u32 TYPE> struct Four {
    u32 words[TYPE == F32 ? 4 : TYPE == INT8 ? 1 : 2];

    __device__ __forceinline__ void load(const u8* p) {
        if (TYPE == F32) {
            uint4 v = *(const uint4*)p;
            words[0] = v.x;
            words[1 % (sizeof(words) / 4)] = v.y;
            words[2 % (sizeof(words) / 4)] = v.z;
            words[3 % (sizeof(words) / 4)] = v.w;
        } else if (TYPE == INT8) {
            words[0] = *(const u32*)p;
        } else {
            uint2 v = *(const uint2*)p;
            words[0] = v.x;
            words[1 % (sizeof(words) / 4)] = v.y;
        }
    }

    __device__ __forceinline__ float at(u32 i) const {
        if (TYPE == F32) return bits(words[i % (sizeof(words) / 4)]);
        if (TYPE == INT8) return (float)(i8)(words[0] >> i * 8);
        u16 half = (u16)(words[i / 2 % (sizeof(words) / 4)] >> i % 2 * 16);
        return TYPE == F16 ? from_f16(half) : from_bf16(half);
    }
};

// Sixteen bytes to shared memory; they are there after `copied`.
__device__ __forceinline__ void copy_later(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

__device__ __forceinline__ void copied() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What the partitions of some heads have left becomes their output, as `join` does it, by a block. Shared memory: maxima, sums, a and b [heads][partitions].
__device__ __forceinline__ void join_heads(const Attention& p, u32 t, u32 first, u32 heads, u32 count) {
    const Cache& c = p.cache;
    u32 width = c.v_dim + 2;
    const float* parts = p.parts + ((u64)t * p.heads + first) * p.partitions * width;
    u64 next = (u64)p.partitions * width;
    float *maxima = room, *sums = maxima + heads * count, *a = sums + heads * count, *b = a + heads * count;
    for (u32 i = threadIdx.x; i < heads * count; i += LAST_THREADS) {
        const float* ends = parts + i / count * next + (u64)(i % count) * width + c.v_dim;
        maxima[i] = __ldcg(ends);
        sums[i] = __ldcg(ends + 1);
    }
    __syncthreads();
    // Each thread goes over all maxima before its own.
    for (u32 i = threadIdx.x; i < heads * count; i += LAST_THREADS) {
        const float* own = maxima + i / count * count;
        float before = own[0];
        for (u32 j = 1; j < i % count; j++) before = greater(own[j], before);
        float top = greater(maxima[i], before);
        a[i] = exp_(sub(before, top));
        b[i] = exp_(sub(maxima[i], top));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < heads * c.v_dim; i += LAST_THREADS) {
        u32 g = i / c.v_dim, d = i % c.v_dim, at = g * count;
        const float* own = parts + g * next + d;
        float m = maxima[at], l = sums[at], o = __ldcg(own);
        for (u32 from = 1; from < count; from += 8) {
            float values[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) values[k] = from + k < count ? __ldcg(own + (u64)(from + k) * width) : 0.0f;
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                u32 n = from + k;
                if (n >= count) break;
                m = greater(maxima[at + n], m);
                l = fma(l, a[at + n], mul(sums[at + n], b[at + n]));
                o = fma(o, a[at + n], mul(values[k], b[at + n]));
            }
        }
        finish(p, t, first + g, d, o, m, l);
    }
}

// Shared memory: values [128][v_dim] as they are stored, then queries [G][k_dim], a key [k_dim].
template <int G, u32 TYPE> __device__ __forceinline__ void attend_last(const Attention& p) {
    // Sixteens of a key that are under way.
    const u32 KEYS_DEEP = TYPE == F32 ? 4 : 8;
    __shared__ __align__(16) float scores[G][PARTITION];
    __shared__ float ends[G][2];
    __shared__ float v_scales[PARTITION];
    const Cache& c = p.cache;
    u32 row_bytes = c.v_dim * size_of(TYPE);
    u8* values = (u8*)room;
    float *q = (float*)(values + PARTITION * row_bytes), *own_key = q + G * c.k_dim;
    u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    u32 t = blockIdx.x, now = p.positions[t], seen = first_seen(p, now);
    u32 base = (seen / PARTITION + blockIdx.z) * PARTITION;
    if (base > now) return;
    u32 from_here = max(seen, base), end = min(now + 1, base + PARTITION);
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    // 1. What was there before: a position's key in four threads, of which each has four elements of each sixteen; values all together.
    u32 position = threadIdx.x / 4, quarter = threadIdx.x % 4, at = base + position;
    bool visible = at >= from_here && at < end, own = at == now;
    Place key = {0, 0};
    Four<TYPE> deep[KEYS_DEEP];
    float k_scale = 1.0f;
    u32 in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens, block = 0;
    if (visible) {
        block = table[in_table];
        key = place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head);
        key.row += quarter * 4 * size_of(TYPE);
        Place value = place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
        if (!own) {
#pragma unroll
            for (u32 i = 0; i < KEYS_DEEP; i++) {
                if (16 * i < c.k_dim) deep[i].load(key.row + 16 * i * size_of(TYPE));
            }
            for (u32 i = quarter * 16; i < row_bytes; i += 64) copy_later(values + position * row_bytes + i, value.row + i);
            if (TYPE == INT8) {
                k_scale = read_scale(key.scale);
                if (quarter == 0) v_scales[position] = read_scale(value.scale);
            }
        }
    }
    begin();
    // 2. Queries, a warp each; where the token itself is in this partition, its key and its value
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* angles = p.angles + (u64)now * 2 * p.half;
    bool stores = now < base + PARTITION;
    if (warp < heads) {
        const float* q_in = p.q.row(t) + (u64)(first + warp) * c.k_dim * (p.gated ? 2 : 1);
        turn(q_in, q + warp * c.k_dim, c.k_dim, p.q_norm, angles, p.half);
    } else if (stores && warp >= G && warp < G + 2) {
        // Its slot, as the table says it: a division of 64 bits takes as long as all of a norm.
        u32 in_table = now / c.block_tokens, offset = now - in_table * c.block_tokens, block = table[in_table];
        // Where several blocks have heads of this KV head, all of them store the same.
        if (warp == G) {
            turn(p.k.row(t) + kv_head * c.k_dim, own_key, c.k_dim, p.k_norm, angles, p.half);
            store(own_key, c.k_dim, TYPE, place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head));
        } else {
            store(p.v.row(t) + kv_head * c.v_dim, c.v_dim, TYPE, place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head));
        }
    }
    __syncthreads();
    if (own) {
        Place value = place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            if (16 * i < c.k_dim) deep[i].load(key.row + 16 * i * size_of(TYPE));
        }
        for (u32 i = quarter * 16; i < row_bytes; i += 64) *(uint4*)(values + position * row_bytes + i) = *(const uint4*)(value.row + i);
        if (TYPE == INT8) {
            k_scale = read_scale(key.scale);
            if (quarter == 0) v_scales[position] = read_scale(value.scale);
        }
    }
    copied();
    // 3. Scores: lanes 4 * quarter and on of each dot product
    float acc[G][4];
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[g][i] = 0.0f;
    }
    for (u32 from = 0; from < c.k_dim; from += 16 * KEYS_DEEP) {
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            u32 d = from + 16 * i;
            if (d >= c.k_dim || !visible) break;
            float k[4];
#pragma unroll
            for (u32 e = 0; e < 4; e++) k[e] = deep[i].at(e);
            if (d + 16 * KEYS_DEEP < c.k_dim) deep[i].load(key.row + (d + 16 * KEYS_DEEP) * size_of(TYPE));
#pragma unroll
            for (int g = 0; g < G; g++) {
                float4 x = *(const float4*)(q + g * c.k_dim + d + quarter * 4);
                acc[g][0] = fma(x.x, k[0], acc[g][0]);
                acc[g][1] = fma(x.y, k[1], acc[g][1]);
                acc[g][2] = fma(x.z, k[2], acc[g][2]);
                acc[g][3] = fma(x.w, k[3], acc[g][3]);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
        for (u32 step = 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[g][i] = add(acc[g][i], __shfl_xor_sync(ALL, acc[g][i], step));
        }
        float s = add(add(acc[g][0], acc[g][2]), add(acc[g][1], acc[g][3]));
        if (TYPE == INT8) s = mul(s, k_scale);
        s = mul(s, p.scale);
        if (p.capped) s = mul(tanh_(div(s, p.cap)), p.cap);
        if (quarter == 0) scores[g][position] = s;
    }
    __syncthreads();
    // 4. Weights: a warp takes a head, four positions a thread; both halves of it have the lanes of the sum.
    if (warp < heads) {
        u32 g = warp;
        float top = bits(NEGATIVE_INFINITY);
#pragma unroll
        for (u32 i = lane; i < PARTITION; i += WARP) {
            if (base + i >= from_here && base + i < end) top = greater(scores[g][i], top);
        }
        top = warp_greatest(top);
        float sum = 0.0f, weights[PARTITION / 16];
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane % 16;
            bool there = base + i >= from_here && base + i < end;
            weights[j] = there ? exp_(sub(scores[g][i], top)) : 0.0f;
            sum = add(sum, weights[j]);
        }
        __syncwarp();
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane % 16;
            if (lane < 16 && base + i >= from_here && base + i < end) scores[g][i] = TYPE == INT8 ? mul(weights[j], v_scales[i]) : weights[j];
        }
        sum = lane_tree(sum);
        if (lane == 0) {
            ends[g][0] = top;
            ends[g][1] = sum;
        }
    }
    __syncthreads();
    // 5. Values: a thread has a column of a head
    u32 count = now / PARTITION - seen / PARTITION + 1;
    bool alone = gridDim.z == 1 || p.counters && count == 1;
    u64 next = (u64)p.partitions * (c.v_dim + 2);
    float* parts = p.parts + (((u64)t * p.heads + first) * p.partitions + blockIdx.z) * (c.v_dim + 2);
    for (u32 i = threadIdx.x; i < heads * c.v_dim; i += LAST_THREADS) {
        u32 g = i / c.v_dim, d = i % c.v_dim, from = from_here - base, to = end - base;
        const u8* column = values + d * size_of(TYPE);
        float o = 0.0f;
        for (; from % 4 && from < to; from++) o = fma(scores[g][from], cached(column + from * row_bytes, TYPE, 0), o);
#pragma unroll 4
        for (; from + 4 <= to; from += 4) {
            float4 w = *(const float4*)&scores[g][from];
            const u8* v = column + from * row_bytes;
            o = fma(w.x, cached(v, TYPE, 0), o);
            o = fma(w.y, cached(v + row_bytes, TYPE, 0), o);
            o = fma(w.z, cached(v + 2 * row_bytes, TYPE, 0), o);
            o = fma(w.w, cached(v + 3 * row_bytes, TYPE, 0), o);
        }
        for (; from < to; from++) o = fma(scores[g][from], cached(column + from * row_bytes, TYPE, 0), o);
        if (alone) finish(p, t, first + g, d, o, ends[g][0], ends[g][1]);
        else parts[g * next + d] = o;
    }
    if (alone) return;
    if (threadIdx.x < 2 * heads) {
        parts[threadIdx.x / 2 * next + c.v_dim + threadIdx.x % 2] = ends[threadIdx.x / 2][threadIdx.x % 2];
    }
    if (!p.counters) return;
    // 6. The last block of these heads joins what all have left
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(p.counters + t * gridDim.y + blockIdx.y, count - 1) == count - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    join_heads(p, t, first, heads, count);
}

template <int G> __device__ __forceinline__ void attend_last_typed(const Attention& p) {
    if (p.cache.type == F32) attend_last<G, F32>(p);
    else if (p.cache.type == F16) attend_last<G, F16>(p);
    else if (p.cache.type == BF16) attend_last<G, BF16>(p);
    else attend_last<G, INT8>(p);
}

#define LAST(G)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2) attend_last_##G(const __grid_constant__ Attention p) { attend_last_typed<G>(p); }

LAST(1)
LAST(2)
LAST(4)
