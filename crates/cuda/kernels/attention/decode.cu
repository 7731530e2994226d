// Attention of the last token of each sequence, which is all of it that a step computes, or of its last few, such as drafted ones. What the cache held before is under
// way before the kernel before this one has ended, as are the norms' weights and the angles; the token's own key and value are stored here. Where a sequence has a few
// tokens, each sees those before it: `attention_store_kv` has stored all of them, this kernel waits for that before it reads, and stores the same bytes again. A block
// takes a partition for the query heads that share a KV head, or some of them. There is little code, since each instruction is fetched for a few executions. Grid:
// (tokens, tiles of heads, partitions).
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/near.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"
#include "prim/tensor.cuh"

static const u32 DECODE_THREADS = 512;

// Four elements of a key in stored form.
template <u32 TYPE> struct Four {
    u32 words[TYPE == F32 ? 4 : TYPE == INT8 ? 1 : 2];

    // `dim`: how far the low bytes of sixteen bits lie behind the high ones.
    __device__ __forceinline__ void load(const u8* p, u32 dim) {
        if (TYPE == INT16) {
            words[0] = *(const u32*)p;
            words[1 % (sizeof(words) / 4)] = *(const u32*)(p + dim);
        } else if (TYPE == F32) {
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

// A row of `dim` elements in its stored form, at two places, by a whole warp.
template <u32 TYPE> __device__ __forceinline__ void store_twice(const float* x, u32 dim, Place to, u8* copy, float* scale_copy) {
    const u32 lane = threadIdx.x % WARP;
    float inv = 0.0f;
    if (has_scales(TYPE)) {
        const Rounding rounding = rounding_of(x, dim, top_of(TYPE));
        inv = rounding.inv;
        if (lane == 0) {
            write_scale(to.scale, rounding.scale);
            *scale_copy = rounding.scale;
        }
    }
#pragma unroll 2
    for (u32 i = lane; i < dim; i += WARP) {
        float v = x[i];
        if (TYPE == F32) ((float*)to.row)[i] = ((float*)copy)[i] = v;
        else if (TYPE == F16) ((u16*)to.row)[i] = ((u16*)copy)[i] = to_f16(v);
        else if (TYPE == BF16) ((u16*)to.row)[i] = ((u16*)copy)[i] = round_bf16(v);
        else if (TYPE == INT16) {
            const int n = round_int(mul(v, inv));
            ((i8*)to.row)[i] = ((i8*)copy)[i] = high_byte(n);
            ((i8*)to.row)[dim + i] = ((i8*)copy)[dim + i] = low_byte(n);
        }
        else ((i8*)to.row)[i] = ((i8*)copy)[i] = (i8)to_i8(mul(v, inv));
    }
}

// A head normed and turned by a whole warp, of which each thread has up to HELD elements; weights and angles are in shared memory.
static const u32 HELD = 8;

// Longer heads are rare. Behind each piece of code that a warp jumps over it waits for instructions, so this piece lies apart.
__device__ __noinline__ void turn_long(const float* x, float* head, u32 dim, const float* weights, float eps, const float* angles, u32 half, u32 run) {
    turn(x, head, dim, {weights, eps, 0}, angles, half, run);
}

template <u32 TYPE>
__device__ __forceinline__ void turn_shared(const float* x, float* head, u32 dim, const float* weights, float eps, const float* angles, u32 half, u32 run) {
    const u32 lane = threadIdx.x % WARP;
    if (dim > HELD * WARP) {
        turn_long(x, head, dim, weights, eps, angles, half, run);
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
    // For all other types `run` is 1.
    if (TYPE == INT8) hadamard(head, dim, run);
}

// `sum + a . b` of four i8 each.
__device__ __forceinline__ int dp4a_signed(u32 a, u32 b, int sum) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}

// Makes bytes of a normed and turned query in its place, high ones and then low ones, by a whole warp. Returns 256 times its scale.
__device__ __forceinline__ float query_bytes(float* head, u32 dim) {
    const u32 lane = threadIdx.x % WARP;
    const Rounding rounding = rounding_of(head, dim, TOP_INT16);
    int n[DECODE_THREADS / WARP];
#pragma unroll
    for (u32 j = 0; j < DECODE_THREADS / WARP; j++) n[j] = lane + WARP * j < dim ? round_int(mul(head[lane + WARP * j], rounding.inv)) : 0;
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < DECODE_THREADS / WARP; j++) {
        const u32 i = lane + WARP * j;
        if (i < dim) ((i8*)head)[i] = high_byte(n[j]), ((i8*)head)[dim + i] = low_byte(n[j]);
    }
    return mul(256.0f, rounding.scale);
}

// What a block shares of known size: scores of positions that are visible, what they become as weights, and these without the values' scales.
template <int G> struct SharedScores {
    float scores[G][PARTITION], weights[G][PARTITION], plain[G][PARTITION];
    float tops[G], sums[G];
    float v_scales[PARTITION], own_scale, q_scales[G], weight_scales[G];
};

// The weighted sums of two columns of values of sixteen bits; weights are integers.
__device__ __forceinline__ float2 sum_bytes(const u8* column, u32 row_bytes, u32 dim, const float* weights, u32 from, u32 to, float scale) {
    int x = 0, y = 0;
#pragma unroll 8
    for (u32 i = from; i < to; i++) {
        const int n = (int)bits(weights[i]), n_high = n >> 8, n_low = n & 255;
        const u32 high = *(const u16*)(column + i * row_bytes), low = *(const u16*)(column + i * row_bytes + dim);
        const int x_high = (i8)high, y_high = (i8)(high >> 8);
        x += n_high * (256 * x_high + (i8)low) + n_low * x_high;
        y += n_high * (256 * y_high + (i8)(low >> 8)) + n_low * y_high;
    }
    return make_float2(mul((float)x, scale), mul((float)y, scale));
}

// Shared memory: values [128][v_dim] as they are stored, a key as it is stored [k_dim], then floats: queries [G][k_dim], a key [k_dim], both norms' weights [2][k_dim],
// angles [k_dim].
template <int G, u32 TYPE> __device__ __forceinline__ void attend_decode(const Attention& p, SharedScores<G>& shared) {
    // Sixteen elements of a key each: so many of them are under way.
    const u32 KEYS_DEEP = TYPE == F32 ? 4 : 8;
    // From an element to the next; of sixteen bits, high and low bytes lie apart.
    const u32 step = TYPE == INT16 ? 1 : size_of(TYPE);
    WATCH();
    auto &scores = shared.scores, &weights = shared.weights, &plain = shared.plain;
    auto &tops = shared.tops, &sums = shared.sums;
    float *v_scales = shared.v_scales, &own_scale = shared.own_scale;
    // With a type that is known here, so that sizes are constants.
    Cache c = p.cache;
    c.type = TYPE;
    const u32 row_bytes = c.v_dim * size_of(TYPE), k_dim = c.k_dim;
    u8 *values = (u8*)smem, *own_row = values + PARTITION * row_bytes;
    float *q = (float*)(own_row + k_dim * size_of(TYPE)), *own_key = q + G * k_dim, *norms = own_key + k_dim, *turns = norms + 2 * k_dim;
    const u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    const u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    const u32 t = blockIdx.x, now = p.positions[t], seen = first_seen(p, now), base = (seen / PARTITION + blockIdx.z) * PARTITION;
    if (base > now) return;
    if (p.stored) pdl_wait();
    const u32 from_here = max(seen, base), end = min(now + 1, base + PARTITION);
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // 1. What was there before: a position's key in four threads, of which each has four elements of each sixteen; values all together; weights and angles
    const u32 position = threadIdx.x / 4, quarter = threadIdx.x % 4, at = base + position;
    const bool visible = at >= from_here && at < end, own = at == now;
    Four<TYPE> deep[KEYS_DEEP];
    float k_scale = 1.0f;
    const u8* key = own_row;
    if (visible && !own) {
        u32 in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens, block = table[in_table];
        Place place_k = place(c, c.k, c.k_scales, k_dim, block, offset, kv_head), value = place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
        key = place_k.row;
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            if (16 * i < k_dim) deep[i].load(key + (16 * i + quarter * 4) * step, k_dim);
        }
#pragma unroll 1
        for (u32 i = quarter * 16; i < row_bytes; i += 64) cp_async_16(values + position * row_bytes + i, value.row + i);
        if (has_scales(TYPE)) {
            k_scale = read_scale(place_k.scale);
            if (quarter == 0) v_scales[position] = read_scale(value.scale);
        }
    }
    key += quarter * 4 * step;
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
    // 2. Queries and the token's own key, a warp each; where the token itself is in this partition, its key and its value in their stored form
    const bool stores = now < base + PARTITION;
    if (warp < heads || (stores && warp == G)) {
        bool is_key = warp == G;
        const float* x = is_key ? p.k.row(t) + kv_head * k_dim : p.q.row(t) + (u64)(first + warp) * k_dim * (p.gated ? 2 : 1);
        const Norm& norm = is_key ? p.k_norm : p.q_norm;
        turn_shared<TYPE>(x, q + warp * k_dim, k_dim, norm.weight ? norms + (is_key ? k_dim : 0) : nullptr, norm.eps, turns, p.half, p.run);
        if (TYPE == INT16 && !is_key) {
            const float scale = query_bytes(q + warp * k_dim, k_dim);
            if (lane == 0) shared.q_scales[warp] = scale;
        }
        // If several blocks have heads of this KV head, all of them store the same bytes.
        if (is_key) store_twice<TYPE>(own_key, k_dim, place(c, c.k, c.k_scales, k_dim, block_now, offset_now, kv_head), own_row, &own_scale);
    } else if (stores && warp == G + 1) {
        u32 own_position = now - base;
        store_twice<TYPE>(p.v.row(t) + kv_head * c.v_dim, c.v_dim, place(c, c.v, c.v_scales, c.v_dim, block_now, offset_now, kv_head), values + own_position * row_bytes,
                          v_scales + own_position);
    }
    cp_async_wait_all();
    __syncthreads();
    STAMP(5, 2);
    if (own) {
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            if (16 * i < k_dim) deep[i].load(key + 16 * i * step, k_dim);
        }
        if (has_scales(TYPE)) k_scale = own_scale;
    }
    // 3. Scores: lanes 4 * quarter and on of each dot product; of sixteen bits, sums of high bytes' products and of others
    float acc[G][4];
    int high[G], low[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[g][i] = 0.0f;
        high[g] = low[g] = 0;
    }
    // No branch lies between the loads from shared memory, so that they are under way together.
    auto some = [&](u32 from, bool whole) {
#pragma unroll
        for (u32 i = 0; i < KEYS_DEEP; i++) {
            u32 d = from + 16 * i;
            if (!whole && d >= k_dim) break;
            float k[4];
            const u32 key_high = deep[i].words[0], key_low = deep[i].words[1 % (sizeof(deep[i].words) / 4)];
#pragma unroll
            for (u32 e = 0; e < 4; e++) k[e] = deep[i].at(e);
            if (visible && d + 16 * KEYS_DEEP < k_dim) deep[i].load(key + (d + 16 * KEYS_DEEP) * step, k_dim);
#pragma unroll
            for (int g = 0; g < G; g++) {
                if (TYPE == INT16) {
                    const u8* of = (const u8*)(q + g * k_dim) + d + quarter * 4;
                    const u32 q_high = *(const u32*)of, q_low = *(const u32*)(of + k_dim);
                    high[g] = dp4a_signed(q_high, key_high, high[g]);
                    low[g] = dp4a_signed(q_low, key_high, dp4a_signed(q_high, key_low, low[g]));
                    continue;
                }
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
        if (TYPE == INT16) {
            int all = 256 * high[g] + low[g];
            all += __shfl_xor_sync(ALL, all, 1);
            all += __shfl_xor_sync(ALL, all, 2);
            s = (float)all;
        }
        if (has_scales(TYPE)) s = mul(s, k_scale);
        s = mul(s, TYPE == INT16 ? mul(p.scale, shared.q_scales[g]) : p.scale);
        if (p.capped) s = mul(tanh_(div(s, p.cap)), p.cap);
        // Positions that are not visible do not count for the maximum.
        if (quarter == 0) scores[g][position] = visible ? s : bits(NEGATIVE_INFINITY);
    }
    __syncthreads();
    STAMP(5, 3);
    // 4. Weights: four warps have a head, and all of them its maximum.
    if (warp / 4 < heads) {
        const u32 g = warp / 4, i = threadIdx.x % PARTITION;
        float4 four = *(const float4*)&scores[g][4 * lane];
        float top = bits(NEGATIVE_INFINITY);
        top = greater(four.x, top), top = greater(four.y, top), top = greater(four.z, top), top = greater(four.w, top);
        top = warp_max(top);
        const bool there = base + i >= from_here && base + i < end;
        float weight = there ? exp_below(sub(scores[g][i], top)) : 0.0f;
        if (has_scales(TYPE)) plain[g][i] = weight;
        weights[g][i] = has_scales(TYPE) && there ? mul(weight, v_scales[i]) : weight;
        if (i == 0) tops[g] = top;
    }
    __syncthreads();
    if (TYPE == INT16) {
        // Weights as integers. All four warps of a head find the greatest; those that nobody sees are zeros.
        const u32 g = warp / 4, i = threadIdx.x % PARTITION;
        int n = 0;
        if (g < heads) {
            const uint4 four = *(const uint4*)&weights[g][4 * lane];
            const u32 most = warp_max_redux(max(max(four.x & 0x7fffffffu, four.y & 0x7fffffffu), max(four.z & 0x7fffffffu, four.w & 0x7fffffffu)));
            const float a = bits(most), inv = div(65535.0f, a);
            n = is_finite(a) && is_finite(inv) ? round_int(mul(weights[g][i], inv)) : 0;
            if (i == 0) shared.weight_scales[g] = is_finite(a) ? mul(256.0f, div(a, 65535.0f)) : bits(NOT_A_NUMBER);
        }
        __syncthreads();
        if (g < heads) weights[g][i] = bits((u32)n);
        __syncthreads();
    }
    STAMP(5, 4);
    const u32 count = now / PARTITION - seen / PARTITION + 1, width = part_width(c.v_dim), pairs = c.v_dim / 2;
    // With one partition nothing is joined, here or by a kernel of its own.
    const bool alone = count == 1 && (p.partitions == 1 || p.counters);
    const u64 next = (u64)p.partitions * width;
    float* parts = p.parts + (((u64)t * p.heads + first) * p.partitions + blockIdx.z) * width;
    // 5. Their sums, by the last warps; both halves of a warp have the lanes of the sum.
    if (warp >= DECODE_THREADS / WARP - heads) {
        const u32 g = DECODE_THREADS / WARP - 1 - warp;
        const float* of = has_scales(TYPE) ? plain[g] : weights[g];
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < PARTITION; i += 16) sum = add(sum, of[i + lane % 16]);
        sum = lane_tree(sum);
        if (lane == 0) {
            sums[g] = sum;
            if (!alone) parts[g * next + c.v_dim] = tops[g], parts[g * next + c.v_dim + 1] = sum;
        }
    }
    if (alone) __syncthreads();
    // 6. Values: a thread has two columns of a head
#pragma unroll 1
    for (u32 i = threadIdx.x; i < heads * pairs; i += DECODE_THREADS) {
        u32 g = i / pairs, d = (i - g * pairs) * 2, from = from_here - base, to = end - base;
        const u8* column = values + d * step;
        float2 o = make_float2(0.0f, 0.0f);
        if (TYPE == INT16) o = sum_bytes(column, row_bytes, c.v_dim, weights[g], from, to, shared.weight_scales[g]);
        // All eight are read, and those that are not visible are left out: a branch between the loads would serialise them.
#pragma unroll 1
        for (u32 eight = from & ~7u; TYPE != INT16 && eight < to; eight += 8) {
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
                float2 next = make_float2(fma(w[e], v[e].x, o.x), fma(w[e], v[e].y, o.y));
                o = eight + e - from < to - from ? next : o;
            }
        }
        if (alone) {
#pragma unroll 1
            for (u32 e = 0; e < 2; e++) finish(p, t, first + g, d + e, e ? o.y : o.x, tops[g], sums[g]);
        } else {
            *(float2*)(parts + g * next + d) = o;
        }
    }
    STAMP(5, 5);
    if (alone || !p.counters) return;
    combine_near(p, first, heads, count);
}

// A kernel for each type: one for all of them would begin with jumps to a type's code, and its registers would have to do for all.
#define LAST(G, TYPE, name)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2) attention_decode_##name##_##G(const __grid_constant__ Attention p) {         \
        __shared__ __align__(16) SharedScores<G> shared;                                                                              \
        attend_decode<G, TYPE>(p, shared);                                                                                            \
    }
#define LAST_OF_ALL(G) LAST(G, F32, f32) LAST(G, F16, f16) LAST(G, BF16, bf16) LAST(G, INT8, int8) LAST(G, INT16, int16)

LAST_OF_ALL(1)
LAST_OF_ALL(2)
LAST_OF_ALL(4)
