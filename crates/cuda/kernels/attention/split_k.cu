// Attention of the last token of each sequence, or of its last few as in attention/decode.cu, by small blocks, with keys and values of 128 elements of sixteen bits:
// behind many partitions, for many sequences, and from two partitions on where more than two heads share keys and values. A block takes a partition for some of these
// heads, and is small enough that four of them are on a multiprocessor: keys lie in registers, values in shared memory, and both are under way for all blocks at once:
// keys before the kernel before this one has ended, values behind the queries. `attention_combine` comes behind, where partitions are many. Grid: (tokens, tiles of
// heads, partitions).
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/near.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"

static const u32 SPLIT_K_THREADS = 128, SPLIT_K_DIM = 128;

// A head of 128 elements, four in each thread of a warp (`lane + 32 j`), normed and turned; so lie weights, cosines and sines.
struct Head {
    float v[4];

    __device__ __forceinline__ void norm(const float (&weights)[4], float eps) {
        float low = fma(v[2], v[2], fma(v[0], v[0], 0.0f)), high = fma(v[3], v[3], fma(v[1], v[1], 0.0f));
        float inv = div(1.0f, __fsqrt_rn(add(div(wide_tree(low, high), (float)SPLIT_K_DIM), eps)));
#pragma unroll
        for (u32 j = 0; j < 4; j++) v[j] = mul(mul(v[j], inv), weights[j]);
    }

    __device__ __forceinline__ void turn(const float (&angles)[4]) {
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            float a = v[j], b = v[j + 2], cos = angles[j], sin = angles[j + 2];
            v[j] = fma(b, sub(0.0f, sin), mul(a, cos));
            v[j + 2] = fma(a, sin, mul(b, cos));
        }
    }
};

// Two elements of sixteen bits, as floats.
template <u32 TYPE> __device__ __forceinline__ float2 halves(u32 w) {
    if (TYPE == BF16) return make_float2(bits(w << 16), bits(w & 0xffff0000u));
    return make_float2(from_f16((u16)w), from_f16((u16)(w >> 16)));
}

template <int G> struct Deep {
    float q[G][SPLIT_K_DIM], weights[G][PARTITION];
    float tops[G][SPLIT_K_THREADS / WARP];
    // The token's own key as it is stored.
    u16 key[SPLIT_K_DIM];
};

// Shared memory: values [128][128] as they are stored.
template <int G, u32 TYPE> __device__ __forceinline__ void attend_split_k(const Attention& p, Deep<G>& shared) {
    WATCH();
    const u32 ROW = SPLIT_K_DIM * 2, WARPS = SPLIT_K_THREADS / WARP;
    const Cache& c = p.cache;
    u8* values = (u8*)smem;
    const u32 group = p.heads / p.kv_heads, tiles = (group + G - 1) / G, kv_head = blockIdx.y / tiles;
    const u32 first_of_tile = blockIdx.y % tiles * G, heads = min((u32)G, group - first_of_tile), first = kv_head * group + first_of_tile;
    const u32 t = blockIdx.x, now = p.positions[t], start = p.table_starts[p.sequences[t]];
    const u32 seen = first_seen(p, now), base = (seen / PARTITION + blockIdx.z) * PARTITION;
    if (base > now) return;
    if (p.stored) pdl_wait();
    const u32 from_here = max(seen, base), end = min(now + 1, base + PARTITION);
    const u32* table = p.tables + start;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // 1. Keys: four positions in four threads, of which each has four elements of each sixteen
    const u32 ROWS = SPLIT_K_THREADS / 4, OF_THREAD = PARTITION / ROWS, row = threadIdx.x / 4, quarter = threadIdx.x % 4;
    u32 offsets[OF_THREAD], blocks[OF_THREAD];
    bool before[OF_THREAD];
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; j++) {
        const u32 at = base + row + ROWS * j, in_table = at / c.block_tokens;
        before[j] = at >= from_here && at < end && at != now;
        offsets[j] = at - in_table * c.block_tokens;
        blocks[j] = before[j] ? table[in_table] : 0;
    }
    const u8* keys[OF_THREAD];
    uint2 k[OF_THREAD][8];
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; j++) keys[j] = place(c, c.k, c.k_scales, SPLIT_K_DIM, blocks[j], offsets[j], kv_head).row;
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; j++) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) k[j][i] = before[j] ? *(const uint2*)(keys[j] + 32 * i + 8 * quarter) : make_uint2(0, 0);
    }
    // What queries and the key are normed and turned with
    float angles[4], q_weights[4], k_weights[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        angles[j] = p.angles[(u64)now * SPLIT_K_DIM + lane + WARP * j];
        q_weights[j] = p.q_norm.weight ? p.q_norm.weight[lane + WARP * j] : 0.0f;
        k_weights[j] = p.k_norm.weight ? p.k_norm.weight[lane + WARP * j] : 0.0f;
    }
    STAMP(6, 0);
    begin();
    STAMP(6, 1);
    // 2. Queries and the token's own key, a warp each, and what is left behind them. Where the token itself is in this partition, its key and its value in their stored form. Values
    // are asked for behind them, so that they do not keep them waiting.
    const bool stores = now < base + PARTITION;
    const u32 TURNS = (G + 2 + WARPS - 1) / WARPS;
    Head all[TURNS];
#pragma unroll
    for (u32 n = 0; n < TURNS; n++) {
        const u32 of = n * WARPS + warp;
        const float* x = of == G + 1 ? p.v.row(t) + kv_head * SPLIT_K_DIM
                         : of == G   ? p.k.row(t) + kv_head * SPLIT_K_DIM
                                     : p.q.row(t) + (u64)(first + of) * SPLIT_K_DIM * (p.gated ? 2 : 1);
        if (of >= heads && !(stores && (of == G || of == G + 1))) continue;
#pragma unroll
        for (u32 j = 0; j < 4; j++) all[n].v[j] = x[lane + WARP * j];
    }
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; j++) {
        const u32 in = row + ROWS * j;
        u8* to = values + in * ROW + 16 * quarter;
        if (before[j]) {
            const u8* value = keys[j] + (c.v - c.k) + 16 * quarter;
#pragma unroll
            for (u32 i = 0; i < 4; i++) cp_async_16(to + 64 * i, value + 64 * i);
        } else if (base + in != now) {
            // With a weight of -0 it adds -0, which changes nothing.
#pragma unroll
            for (u32 i = 0; i < 4; i++) *(uint4*)(to + 64 * i) = make_uint4(0, 0, 0, 0);
        }
    }
#pragma unroll
    for (u32 n = 0; n < TURNS; n++) {
        const u32 of = n * WARPS + warp;
        const bool is_key = of == G, is_value = stores && of == G + 1;
        Head& head = all[n];
        if (of < heads) {
            if (p.q_norm.weight) head.norm(q_weights, p.q_norm.eps);
            head.turn(angles);
#pragma unroll
            for (u32 j = 0; j < 4; j++) shared.q[of % G][lane + WARP * j] = head.v[j];
        } else if (stores && is_key || is_value) {
            if (is_key) {
                if (p.k_norm.weight) head.norm(k_weights, p.k_norm.eps);
                head.turn(angles);
            }
            const u32 in_table = now / c.block_tokens, offset = now - in_table * c.block_tokens;
            u16* copy = is_value ? (u16*)(values + (now - base) * ROW) : shared.key;
            u16* to = (u16*)(place(c, c.k, c.k_scales, SPLIT_K_DIM, table[in_table], offset, kv_head).row + (is_value ? c.v - c.k : 0));
            // If several blocks have heads of this KV head, all of them store the same bytes.
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u16 x = TYPE == F16 ? to_f16(head.v[j]) : round_bf16(head.v[j]);
                to[lane + WARP * j] = x;
                copy[lane + WARP * j] = x;
            }
        }
    }
    __syncthreads();
    STAMP(6, 2);
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; j++) {
        if (base + row + ROWS * j == now) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) k[j][i] = *(const uint2*)(shared.key + 16 * i + 4 * quarter);
        }
    }
    // 3. Scores, two heads at a time: lanes 4 * quarter and on of each dot product, of which each of four threads ends with one of every four: of each two positions, the first or
    // the second, and the even or the odd head
    const u32 TWOS = OF_THREAD / 2, odd = quarter % 2, in = row + ROWS * (quarter / 2);
    float scores[G / 2][TWOS];
    bool visible[TWOS];
#pragma unroll
    for (u32 two = 0; two < TWOS; two++) {
        const u32 at = base + in + 2 * ROWS * two;
        visible[two] = at >= from_here && at < end;
    }
#pragma unroll
    for (u32 pair = 0; pair < G / 2; pair++) {
        float acc[OF_THREAD][2][4];
#pragma unroll
        for (u32 i = 0; i < 8 * OF_THREAD; i++) acc[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float4 x[2];
#pragma unroll
            for (u32 h = 0; h < 2; h++) x[h] = *(const float4*)&shared.q[2 * pair + h][16 * i + 4 * quarter];
#pragma unroll
            for (u32 j = 0; j < OF_THREAD; j++) {
                const float2 low = halves<TYPE>(k[j][i].x), high = halves<TYPE>(k[j][i].y);
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    acc[j][h][0] = fma(x[h].x, low.x, acc[j][h][0]);
                    acc[j][h][1] = fma(x[h].y, low.y, acc[j][h][1]);
                    acc[j][h][2] = fma(x[h].z, high.x, acc[j][h][2]);
                    acc[j][h][3] = fma(x[h].w, high.y, acc[j][h][3]);
                }
            }
        }
        float top = bits(NEGATIVE_INFINITY);
#pragma unroll
        for (u32 two = 0; two < TWOS; two++) {
            // Each thread keeps half of what it has, and exchanges the other half with another.
            float half[2][4], s[4];
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const float a = acc[2 * two][h][i], b = acc[2 * two + 1][h][i];
                    half[h][i] = add(quarter < 2 ? a : b, __shfl_xor_sync(ALL, quarter < 2 ? b : a, 2));
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) s[i] = add(odd ? half[1][i] : half[0][i], __shfl_xor_sync(ALL, odd ? half[0][i] : half[1][i], 1));
            float score = mul(add(add(s[0], s[2]), add(s[1], s[3])), p.scale);
            if (p.capped) score = mul(tanh_(div(score, p.cap)), p.cap);
            scores[pair][two] = score;
            top = greater(visible[two] ? score : bits(NEGATIVE_INFINITY), top);
        }
#pragma unroll
        for (u32 step = 2; step < WARP; step *= 2) top = greater(__shfl_xor_sync(ALL, top, step), top);
        if (lane < 2) shared.tops[2 * pair + lane][warp] = top;
    }
    __syncthreads();
    STAMP(6, 3);
    // 4. Weights
#pragma unroll
    for (u32 pair = 0; pair < G / 2; pair++) {
        const u32 g = 2 * pair + odd;
        float top = shared.tops[g][0];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) top = greater(shared.tops[g][w], top);
#pragma unroll
        for (u32 two = 0; two < TWOS; two++) shared.weights[g][in + 2 * ROWS * two] = visible[two] ? exp_below(sub(scores[pair][two], top)) : -0.0f;
    }
    cp_async_wait_all();
    __syncthreads();
    STAMP(6, 4);
    const u32 width = part_width(SPLIT_K_DIM);
    const u64 next = (u64)p.partitions * width;
    float* parts = p.parts + (((u64)t * p.heads + first) * p.partitions + blockIdx.z) * width;
    // 5. Values: a thread has two columns of as many heads as there are for two threads
    const u32 COLUMNS = SPLIT_K_DIM / 2, AT_ONCE = SPLIT_K_THREADS / COLUMNS, EACH = (G + AT_ONCE - 1) / AT_ONCE, g = threadIdx.x / COLUMNS * EACH, column = threadIdx.x % COLUMNS * 2;
    if (g < heads) {
        const u8* v = values + column * 2;
        float2 o[EACH];
#pragma unroll
        for (u32 h = 0; h < EACH; h++) o[h] = make_float2(0.0f, 0.0f);
        u32 words[2][8];
        float4 fours[2][EACH][2];
        auto ask = [&](u32 n, u32 from) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) words[n][e] = *(const u32*)(v + (from + e) * ROW);
#pragma unroll
            for (u32 i = 0; i < 2 * EACH; i++) fours[n][i / 2][i % 2] = ((const float4*)shared.weights[g + i / 2])[from / 4 + i % 2];
        };
        auto take = [&](u32 n) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                const float2 x = halves<TYPE>(words[n][e]);
#pragma unroll
                for (u32 h = 0; h < EACH; h++) {
                    const float4 four = fours[n][h][e / 4];
                    const float weight = e % 4 == 0 ? four.x : e % 4 == 1 ? four.y : e % 4 == 2 ? four.z : four.w;
                    o[h].x = fma(weight, x.x, o[h].x);
                    o[h].y = fma(weight, x.y, o[h].y);
                }
            }
        };
        ask(0, 0);
#pragma unroll 1
        for (u32 from = 0; from < PARTITION; from += 16) {
            ask(1, from + 8);
            take(0);
            ask(0, (from + 16) % PARTITION);
            take(1);
        }
#pragma unroll
        for (u32 h = 0; h < EACH; h++)
            if (g + h < heads) *(float2*)(parts + (g + h) * next + column) = o[h];
    }
    // 6. Maxima and sums, by the last warps; both halves of a warp have the lanes of the sum.
    if (warp >= WARPS - heads) {
        const u32 g = WARPS - 1 - warp;
        float top = shared.tops[g][0], sum = 0.0f;
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) top = greater(shared.tops[g][w], top);
        // Positions that are not visible add -0.
#pragma unroll
        for (u32 i = 0; i < PARTITION; i += 16) sum = add(sum, shared.weights[g][i + lane % 16]);
        sum = lane_tree(sum);
        if (lane == 0) *(float2*)(parts + g * next + SPLIT_K_DIM) = make_float2(top, sum);
    }
    STAMP(6, 5);
    // 7. Few partitions are joined here
    if (p.counters) combine_near(p, first, heads, now / PARTITION - seen / PARTITION + 1);
}

template <int G> __device__ __forceinline__ void attend_split_k_typed(const Attention& p) {
    __shared__ __align__(16) Deep<G> shared;
    if (p.cache.type == F16) attend_split_k<G, F16>(p, shared);
    else attend_split_k<G, BF16>(p, shared);
}

#define DEEP(G)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(128, 4) attention_split_k_##G(const __grid_constant__ Attention p) { attend_split_k_typed<G>(p); }

DEEP(2)
DEEP(4)
