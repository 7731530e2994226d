// Attention of the last token of each sequence, which is all of it that a step computes. What the cache held before is under way before the kernel before this one has
// ended, as are the norms' weights and the angles; the token's own key and value are stored here. A block takes each so-manieth partition for the query heads that share a
// KV head, or some of them, the next one's keys and values being under way meanwhile. There is little code, since each instruction is fetched for a few executions.
// Grid: (tokens, tiles of heads, blocks of a tile).
#pragma once
#include "attention.cu"

static const u32 LAST_THREADS = 512;
// Partitions that are joined without a look at all maxima beforehand.
static const u32 MOST_NEAR = 4;

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
#pragma unroll 8
        for (u32 j = 1; j < i % count; j++) before = greater(own[j], before);
        float top = greater(maxima[i], before);
        a[i] = exp_(sub(before, top));
        b[i] = exp_(sub(maxima[i], top));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < heads * c.v_dim; i += LAST_THREADS) {
        u32 g = i / c.v_dim, d = i % c.v_dim, at = g * count;
        const float* own = parts + g * next + d;
        float m = maxima[at], l = sums[at], o = __ldcg(own), values[16];
        auto ask = [&](u32 n) { return n < count ? __ldcg(own + (u64)n * width) : 0.0f; };
#pragma unroll
        for (u32 k = 0; k < 16; k++) values[k] = ask(1 + k);
#pragma unroll 1
        for (u32 from = 1; from < count; from += 16) {
#pragma unroll
            for (u32 k = 0; k < 16; k++) {
                u32 n = from + k;
                float value = values[k];
                values[k] = ask(n + 16);
                if (n >= count) continue;
                m = greater(maxima[at + n], m);
                l = fma(l, a[at + n], mul(sums[at + n], b[at + n]));
                o = fma(o, a[at + n], mul(value, b[at + n]));
            }
        }
        finish(p, t, first + g, d, o, m, l);
    }
}

// A row of `dim` elements in its stored form, at two places, by a whole warp.
template <u32 TYPE> __device__ __forceinline__ void store_twice(const float* x, u32 dim, Place to, u8* copy, float* scale_copy) {
    const u32 lane = threadIdx.x % WARP;
    float inv = 0.0f;
    if (TYPE == INT8) {
        u32 greatest = 0;
        for (u32 i = lane; i < dim; i += WARP) greatest = max(greatest, bits(x[i]) & 0x7fffffffu);
        float a = bits(warp_greatest(greatest));
        // With a NaN or an infinity: q = 0 and a scale of NaN.
        bool finite = is_finite(a);
        inv = div(127.0f, a);
        if (!finite || !is_finite(inv)) inv = 0.0f;
        float scale = finite ? div(a, 127.0f) : bits(0x7fc00000u);
        if (lane == 0) {
            write_scale(to.scale, scale);
            *scale_copy = scale;
        }
    }
#pragma unroll 2
    for (u32 i = lane; i < dim; i += WARP) {
        float v = x[i];
        if (TYPE == F32) ((float*)to.row)[i] = ((float*)copy)[i] = v;
        else if (TYPE == F16) ((u16*)to.row)[i] = ((u16*)copy)[i] = to_f16(v);
        else if (TYPE == BF16) ((u16*)to.row)[i] = ((u16*)copy)[i] = round_bf16(v);
        else ((i8*)to.row)[i] = ((i8*)copy)[i] = (i8)to_i8(mul(v, inv));
    }
}

// A head normed and turned by a whole warp, of which each thread has up to HELD elements; weights and angles are in shared memory.
static const u32 HELD = 8;

__device__ __forceinline__ void turn_shared(const float* x, float* head, u32 dim, const float* weights, float eps, const float* angles, u32 half) {
    const u32 lane = threadIdx.x % WARP;
    if (dim > HELD * WARP) {
        turn(x, head, dim, {weights, eps, 0}, angles, half);
        return;
    }
    float v[HELD];
#pragma unroll
    for (u32 j = 0; j < HELD; j++) v[j] = lane + WARP * j < dim ? x[lane + WARP * j] : 0.0f;
    if (weights) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (u32 j = 0; j < HELD; j += 2) {
            low = fma(v[j], v[j], low);
            high = fma(v[j + 1], v[j + 1], high);
        }
        float inv = div(1.0f, __fsqrt_rn(add(div(wide_tree(low, high), (float)dim), eps)));
#pragma unroll
        for (u32 j = 0; j < HELD; j++) {
            if (lane + WARP * j < dim) v[j] = mul(mul(v[j], inv), weights[lane + WARP * j]);
        }
    }
#pragma unroll
    for (u32 j = 0; j < HELD; j++) {
        if (lane + WARP * j < dim) head[lane + WARP * j] = v[j];
    }
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < HELD; j++) {
        u32 i = lane + WARP * j;
        if (i >= 2 * half) continue;
        bool later = i >= half;
        u32 pair = later ? i - half : i;
        float other = head[later ? pair : half + i], cos = angles[pair], sin = angles[half + pair];
        v[j] = fma(other, later ? sin : sub(0.0f, sin), mul(v[j], cos));
    }
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < HELD; j++) {
        if (lane + WARP * j < 2 * half) head[lane + WARP * j] = v[j];
    }
    __syncwarp();
}

// Two columns of a value in stored form, as floats.
template <u32 TYPE> __device__ __forceinline__ float2 two(const u8* p) {
    if (TYPE == F32) return *(const float2*)p;
    if (TYPE == INT8) {
        u32 w = *(const u16*)p;
        return make_float2((float)(i8)w, (float)(i8)(w >> 8));
    }
    u32 w = *(const u32*)p;
    if (TYPE == BF16) return make_float2(bits(w << 16), bits(w & 0xffff0000u));
    return make_float2(from_f16((u16)w), from_f16((u16)(w >> 16)));
}

// What a block shares of known size, once for all types.
template <int G> struct Between {
    // Of positions that are visible; what is left of them as weights, and these without the values' scales.
    float scores[G][PARTITION], weights[G][PARTITION], plain[G][PARTITION];
    float tops[G], sums[G];
    float v_scales[2][PARTITION], own_scale, own_v_scale;
};

// Shared memory: values [128][v_dim] as they are stored, twice where a block has several partitions, a key and a value as they are stored [k_dim], [v_dim], then floats:
// queries [G][k_dim], a key [k_dim], both norms' weights [2][k_dim], angles [k_dim].
template <int G, u32 TYPE> __device__ __forceinline__ void attend_last(const Attention& p, Between<G>& between) {
    // Sixteens of a key that are under way.
    const u32 KEYS_DEEP = TYPE == F32 ? 4 : 8;
    WATCH();
    auto &scores = between.scores, &weights = between.weights, &plain = between.plain;
    auto &tops = between.tops, &sums = between.sums;
    auto& v_scales = between.v_scales;
    float &own_scale = between.own_scale, &own_v_scale = between.own_v_scale;
    const Cache& c = p.cache;
    const u32 row_bytes = c.v_dim * size_of(TYPE), k_dim = c.k_dim, buffers = gridDim.z < p.partitions ? 2 : 1;
    u8 *values = (u8*)room, *own_row = values + buffers * PARTITION * row_bytes, *own_value = own_row + k_dim * size_of(TYPE);
    float *q = (float*)(own_value + row_bytes), *own_key = q + G * k_dim, *norms = own_key + k_dim, *turns = norms + 2 * k_dim;
    const u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    const u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    const u32 t = blockIdx.x, now = p.positions[t], seen = first_seen(p, now), count = now / PARTITION - seen / PARTITION + 1;
    if (blockIdx.z >= count) return;
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    auto base_of = [&](u32 n) { return (seen / PARTITION + n) * PARTITION; };
    // 1. What was there before: a position's key in four threads, of which each has four elements of each sixteen; values all together; weights and angles. Keys of
    // later partitions come nearer only, so that they take no registers.
    const u32 position = threadIdx.x / 4, quarter = threadIdx.x % 4;
    bool visible, own;
    Four<TYPE> deep[KEYS_DEEP];
    float k_scale = 1.0f;
    const u8* key;
    auto load_keys = [&]() {
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            if (16 * i < k_dim) deep[i].load(key + 16 * i * size_of(TYPE));
        }
    };
    auto bring = [&](u32 n, u32 buffer, bool is_first) {
        const u32 at = base_of(n) + position;
        visible = at >= seen && at <= now, own = at == now, key = own_row + quarter * 4 * size_of(TYPE);
        if (visible && !own) {
            u32 in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens, block = table[in_table];
            Place place_k = place(c, c.k, c.k_scales, k_dim, block, offset, kv_head), value = place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
            key = place_k.row + quarter * 4 * size_of(TYPE);
            if (is_first) {
                load_keys();
            } else {
#pragma unroll 1
                for (u32 i = quarter * 128; i < k_dim * size_of(TYPE); i += 512) prefetch(place_k.row + i);
            }
            u8* to = values + (buffer * PARTITION + position) * row_bytes;
#pragma unroll 1
            for (u32 i = quarter * 16; i < row_bytes; i += 64) copy_later(to + i, value.row + i);
            if (TYPE == INT8) {
                k_scale = read_scale(place_k.scale);
                if (quarter == 0) v_scales[buffer][position] = read_scale(value.scale);
            }
        }
    };
    u32 number = blockIdx.z, buffer = 0;
    bring(number, buffer, true);
    {
        const float* angles = p.angles + (u64)now * 2 * p.half;
        u32 i = threadIdx.x;
        if (i < k_dim) {
            if (p.q_norm.weight) norms[i] = p.q_norm.weight[i];
            if (p.k_norm.weight) norms[k_dim + i] = p.k_norm.weight[i];
            if (i < 2 * p.half) turns[i] = angles[i];
        }
    }
    const u32 in_table_now = now / c.block_tokens, offset_now = now - in_table_now * c.block_tokens, block_now = table[in_table_now];
    STAMP(5, 0);
    begin();
    // Weights and angles of other threads.
    __syncthreads();
    STAMP(5, 1);
    // 2. Queries and the token's own key, a warp each; where the token itself is in a partition of this block, its key and its value in their stored form
    const bool stores = (count - 1) % gridDim.z == blockIdx.z;
    if (warp < heads || (stores && warp == G)) {
        bool is_key = warp == G;
        const float* x = is_key ? p.k.row(t) + kv_head * k_dim : p.q.row(t) + (u64)(first + warp) * k_dim * (p.gated ? 2 : 1);
        const Norm& norm = is_key ? p.k_norm : p.q_norm;
        turn_shared(x, q + warp * k_dim, k_dim, norm.weight ? norms + (is_key ? k_dim : 0) : nullptr, norm.eps, turns, p.half);
        // Where several blocks have heads of this KV head, all of them store the same.
        if (is_key) store_twice<TYPE>(own_key, k_dim, place(c, c.k, c.k_scales, k_dim, block_now, offset_now, kv_head), own_row, &own_scale);
    } else if (stores && warp == G + 1) {
        store_twice<TYPE>(p.v.row(t) + kv_head * c.v_dim, c.v_dim, place(c, c.v, c.v_scales, c.v_dim, block_now, offset_now, kv_head), own_value, &own_v_scale);
    }
    __syncthreads();
    STAMP(5, 2);
    const bool alone = count == 1;
    const u32 width = c.v_dim + 2, pairs = c.v_dim / 2;
    const u64 next_head = (u64)p.partitions * width;
    float* all_parts = p.parts + ((u64)t * p.heads + first) * next_head;
#pragma unroll 1
    while (true) {
        const u32 base = base_of(number), from = max(seen, base) - base, to = min(now + 1 - base, PARTITION);
        u8* held = values + buffer * PARTITION * row_bytes;
        if (own || (visible && number != blockIdx.z)) load_keys();
        if (TYPE == INT8 && own) k_scale = own_scale;
        // 3. Scores: lanes 4 * quarter and on of each dot product
        float acc[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[g][i] = 0.0f;
        }
        // Without a branch between them, what is read from shared memory is under way together.
        auto some = [&](u32 from_d, bool whole) {
#pragma unroll
            for (u32 i = 0; i < KEYS_DEEP; i++) {
                u32 d = from_d + 16 * i;
                if (!whole && d >= k_dim) break;
                float k[4];
#pragma unroll
                for (u32 e = 0; e < 4; e++) k[e] = deep[i].at(e);
                if (visible && d + 16 * KEYS_DEEP < k_dim) deep[i].load(key + (d + 16 * KEYS_DEEP) * size_of(TYPE));
#pragma unroll
                for (int g = 0; g < G; g++) {
                    float4 x = *(const float4*)(q + g * k_dim + d + quarter * 4);
                    acc[g][0] = fma(x.x, k[0], acc[g][0]);
                    acc[g][1] = fma(x.y, k[1], acc[g][1]);
                    acc[g][2] = fma(x.z, k[2], acc[g][2]);
                    acc[g][3] = fma(x.w, k[3], acc[g][3]);
                }
            }
        };
        u32 d = 0;
#pragma unroll 1
        for (; d + 16 * KEYS_DEEP <= k_dim; d += 16 * KEYS_DEEP) some(d, true);
        if (d < k_dim) some(d, false);
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
            // What is not visible is no maximum.
            if (quarter == 0) scores[g][position] = visible ? s : bits(NEGATIVE_INFINITY);
        }
        if (number == count - 1) {
            u32 own_position = now - base;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < row_bytes / 16; i += LAST_THREADS) ((uint4*)(held + own_position * row_bytes))[i] = ((const uint4*)own_value)[i];
            if (TYPE == INT8 && threadIdx.x == 0) v_scales[buffer][own_position] = own_v_scale;
        }
        copied();
        __syncthreads();
        STAMP(5, 3);
        // What comes after these: nobody reads any more what was where its values go.
        const u32 next = number + gridDim.z;
        const bool more = next < count;
        if (more) bring(next, buffer ^ 1, false);
        // 4. Weights: four warps have a head, and all of them its maximum.
        if (warp / 4 < heads) {
            const u32 g = warp / 4, i = threadIdx.x % PARTITION;
            float4 four = *(const float4*)&scores[g][4 * lane];
            float top = bits(NEGATIVE_INFINITY);
            top = greater(four.x, top), top = greater(four.y, top), top = greater(four.z, top), top = greater(four.w, top);
            top = warp_greatest(top);
            const bool there = i >= from && i < to;
            float weight = there ? exp_(sub(scores[g][i], top)) : 0.0f;
            if (TYPE == INT8) plain[g][i] = weight;
            weights[g][i] = TYPE == INT8 && there ? mul(weight, v_scales[buffer][i]) : weight;
            if (i == 0) tops[g] = top;
        }
        __syncthreads();
        STAMP(5, 4);
        // 5. Their sums, by the last warps; both halves of a warp have the lanes of the sum.
        float* parts = all_parts + (u64)number * width;
        if (warp >= LAST_THREADS / WARP - heads) {
            const u32 g = LAST_THREADS / WARP - 1 - warp;
            const float* of = TYPE == INT8 ? plain[g] : weights[g];
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < PARTITION; i += 16) sum = add(sum, of[i + lane % 16]);
            sum = lane_tree(sum);
            if (lane == 0) {
                sums[g] = sum;
                if (!alone) {
                    parts[g * next_head + c.v_dim] = tops[g];
                    parts[g * next_head + c.v_dim + 1] = sum;
                }
            }
        }
        if (alone) __syncthreads();
        // 6. Values: a thread has two columns of a head
#pragma unroll 1
        for (u32 i = threadIdx.x; i < heads * pairs; i += LAST_THREADS) {
            u32 g = i / pairs, d = (i - g * pairs) * 2;
            const u8* column = held + d * size_of(TYPE);
            float2 o = make_float2(0.0f, 0.0f);
            // Those of eight that are not visible are read and left out: a branch between them would keep them from being under way together.
            auto add_eight = [&](u32 eight, bool whole) {
                float w[8];
                float2 v[8];
#pragma unroll
                for (u32 e = 0; e < 8; e += 4) {
                    float4 four = *(const float4*)&weights[g][eight + e];
                    w[e] = four.x, w[e + 1] = four.y, w[e + 2] = four.z, w[e + 3] = four.w;
                }
#pragma unroll
                for (u32 e = 0; e < 8; e++) v[e] = two<TYPE>(column + (eight + e) * row_bytes);
#pragma unroll
                for (u32 e = 0; e < 8; e++) {
                    float2 sum = make_float2(fma(w[e], v[e].x, o.x), fma(w[e], v[e].y, o.y));
                    o = whole || eight + e - from < to - from ? sum : o;
                }
            };
            if (to - from == PARTITION) {
#pragma unroll 2
                for (u32 eight = 0; eight < PARTITION; eight += 8) add_eight(eight, true);
            } else {
#pragma unroll 1
                for (u32 eight = from & ~7u; eight < to; eight += 8) add_eight(eight, false);
            }
            if (alone) {
#pragma unroll 1
                for (u32 e = 0; e < 2; e++) finish(p, t, first + g, d + e, e ? o.y : o.x, tops[g], sums[g]);
            } else {
                *(float2*)(parts + g * next_head + d) = o;
            }
        }
        STAMP(5, 5);
        if (!more) break;
        number = next;
        buffer ^= 1;
    }
    if (alone || !p.counters) return;
    // 7. The last block of these heads joins what all have left: of a few partitions all are under way together, and a thread does for itself what is needed of each.
    __shared__ bool last;
    const u32 blocks = min(count, gridDim.z);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(p.counters + t * gridDim.y + blockIdx.y, blocks - 1) == blocks - 1;
    __syncthreads();
    STAMP(5, 6);
    if (!last) return;
    __threadfence();
    if (count > MOST_NEAR) {
        join_heads(p, t, first, heads, count);
        return;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < heads * c.v_dim; i += LAST_THREADS) {
        u32 g = i / c.v_dim, d = i - g * c.v_dim;
        const float* own_parts = all_parts + g * next_head;
        float m[MOST_NEAR], l[MOST_NEAR], o[MOST_NEAR];
#pragma unroll
        for (u32 n = 0; n < MOST_NEAR; n++) {
            if (n < count) {
                o[n] = __ldcg(own_parts + n * width + d);
                m[n] = __ldcg(own_parts + n * width + c.v_dim);
                l[n] = __ldcg(own_parts + n * width + c.v_dim + 1);
            }
        }
#pragma unroll
        for (u32 n = 1; n < MOST_NEAR; n++) {
            if (n < count) {
                float top = greater(m[n], m[0]), a = exp_(sub(m[0], top)), b = exp_(sub(m[n], top));
                l[0] = fma(l[0], a, mul(l[n], b));
                o[0] = fma(o[0], a, mul(o[n], b));
                m[0] = top;
            }
        }
        finish(p, t, first + g, d, o[0], m[0], l[0]);
    }
}

template <int G> __device__ __forceinline__ void attend_last_typed(const Attention& p) {
    __shared__ __align__(16) Between<G> between;
    if (p.cache.type == F32) attend_last<G, F32>(p, between);
    else if (p.cache.type == F16) attend_last<G, F16>(p, between);
    else if (p.cache.type == BF16) attend_last<G, BF16>(p, between);
    else attend_last<G, INT8>(p, between);
}

#define LAST(G)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2) attend_last_##G(const __grid_constant__ Attention p) { attend_last_typed<G>(p); }

LAST(1)
LAST(2)
LAST(4)
