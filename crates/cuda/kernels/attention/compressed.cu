// Compressed attention: rows and what entries are made of into their slots, entries, and each query head of each token over the rows of its window and over entries.
#include "attention/cache.cuh"
#include "attention/heads.cuh"
#include "attention/lanes.cuh"
#include "attention/pooled.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"

struct Compress {
    Cache rows;
    Cache entries;
    // [tokens, series * dim] each
    Tensor values;
    Tensor logits;
    Norm norm;
    // [series * rate, dim]
    const float* bias;
    // [positions, 2 * half]: cosines, then sines.
    const float* angles;
    const u32* positions;
    const u32* sequences;
    const u64* slots;
    const u64* entry_slots;
    // Block tables of rows.
    const u32* tables;
    const u32* table_starts;
    u32 tokens;
    u32 half;
    u32 rate;
    u32 series;
    // Positions that share a row of the entries' cache.
    u32 every;
    u32 unused;
};

static const u32 COMPRESS_THREADS = 128;

// A token's rows and their logits into their slots, a warp a row at a time. A block takes a token.
extern "C" __global__ void __launch_bounds__(COMPRESS_THREADS) compress_store(const Compress p) {
    begin();
    const Cache& c = p.rows;
    const u32 t = blockIdx.x, dim = c.k_dim;
    const u64 slot = p.slots[t];
    for (u32 head = threadIdx.x / WARP; head < 2 * p.series; head += COMPRESS_THREADS / WARP) {
        const Tensor& from = head < p.series ? p.values : p.logits;
        store(from.row(t) + head % p.series * dim, dim, c.type, place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, head));
    }
}

// The entry of a window that ends with a token. A block takes a token, a thread an element. Shared memory: an entry.
extern "C" __global__ void __launch_bounds__(COMPRESS_THREADS) compress_entry(const Compress p) {
    begin();
    const Cache &c = p.rows, &e = p.entries;
    const u32 t = blockIdx.x, dim = c.k_dim, next = p.positions[t] + 1;
    if (next % p.rate != 0) return;
    const u32 own = next - p.rate, before = p.series == 2 && own > 0 ? p.rate : 0, count = before + p.rate;
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    const float* bias = p.bias + (u64)((p.series - 1) * p.rate - before) * dim;
    for (u32 i = threadIdx.x; i < dim; i += COMPRESS_THREADS) {
        auto series = [&](u32 k) { return k < before ? 0 : p.series - 1; };
        auto logit = [&](u32 k) { return add(pooled(c, table, own + k - before, p.series + series(k), i), bias[k * dim + i]); };
        float most = 0.0f, sum = 0.0f, value = 0.0f;
        for (u32 k = 0; k < count; k++) {
            const float l = logit(k);
            most = k == 0 ? l : greater(l, most);
        }
        for (u32 k = 0; k < count; k++) {
            const float w = exp_(sub(logit(k), most));
            sum = add(sum, w);
            value = fma(w, pooled(c, table, own + k - before, series(k), i), value);
        }
        smem[i] = div(value, sum);
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const u32 lane = threadIdx.x;
    const float inv = inverse_rms(smem, dim, p.norm.eps);
    __syncwarp();
    for (u32 i = lane; i < dim; i += WARP) smem[i] = mul(mul(smem[i], inv), p.norm.weight[i]);
    __syncwarp();
    const float* angles = p.angles + (u64)own * 2 * p.half;
    float* turned = smem + dim - 2 * p.half;
    for (u32 i = lane; i < p.half; i += WARP) {
        const float a = turned[2 * i], b = turned[2 * i + 1], cos = angles[i], sin = angles[p.half + i];
        turned[2 * i] = fma(b, sub(0.0f, sin), mul(a, cos));
        turned[2 * i + 1] = fma(a, sin, mul(b, cos));
    }
    __syncwarp();
    const u64 slot = p.entry_slots[t] / p.every;
    store(smem, dim, e.type, place(e, e.k, e.k_scales, dim, slot / e.block_tokens, slot % e.block_tokens, 0));
}

struct Compressed {
    Cache rows;
    Cache entries;
    // [tokens, heads * dim], [tokens, dim], [tokens, heads * dim]
    Tensor q;
    Tensor row;
    Tensor out;
    // [heads]
    const float* sinks;
    const u32* positions;
    const u32* sequences;
    const u64* slots;
    const u32* tables;
    const u32* table_starts;
    // Block tables of entries.
    const u32* entry_tables;
    const u32* entry_starts;
    // [tokens, top]: rows of the entries that were selected; null: all are seen.
    const u32* selected;
    u32 tokens;
    u32 heads;
    u32 window;
    // Positions of an entry; 0: there are none.
    u32 rate;
    // Rows of the entries' cache that have one.
    u32 entry_rows;
    u32 top;
    float scale;
    float cap;
    u32 capped;
    // Whether queries and weights are rounded to integers, as rows are.
    u32 integers;
};

// A token's row into its slot, by a warp.
extern "C" __global__ void __launch_bounds__(32) compressed_store(const Compressed p) {
    begin();
    const Cache& c = p.rows;
    const u64 slot = p.slots[blockIdx.x];
    store(p.row.row(blockIdx.x), c.k_dim, c.type, place(c, c.k, c.k_scales, c.k_dim, slot / c.block_tokens, slot % c.block_tokens, 0));
}

// A block of four warps takes G query heads of a token through the partitions of its window and then through those of entries. Grid: (tokens, tiles of heads). Shared memory:
// q [G][padded dim] and o [G][dim].
template <int G> __device__ __forceinline__ void attend_compressed(const Compressed& p) {
    __shared__ float scores[G][PARTITION], ends[G][2], q_scales[G], weight_scales[G];
    __shared__ Located located;
    const u32 dim = p.rows.k_dim, pad = padded(dim), first = blockIdx.y * G, heads = min((u32)G, p.heads - first), t = blockIdx.x;
    float *q = smem, *o = q + G * pad;
    // 1. Queries
    for (u32 g = threadIdx.x / WARP; g < heads; g += blockDim.x / WARP) {
        const float* from = p.q.row(t) + (u64)(first + g) * dim;
        for (u32 i = threadIdx.x % WARP; i < pad; i += WARP) q[g * pad + i] = i < dim ? from[i] : 0.0f;
        __syncwarp();
        if (p.integers) round_query(q + g * pad, dim, p.rows.type, q_scales + g);
    }
    const u32 position = p.positions[t], seen = position + 1 > p.window ? position + 1 - p.window : 0, sequence = p.sequences[t];
    const u32 *table = p.tables + p.table_starts[sequence], all = p.rate ? (position + 1) / p.rate : 0;
    const u32* chosen = p.selected ? p.selected + (u64)t * p.top : nullptr;
    const u32 entries = chosen ? min(all, p.top) : all;
    const u32 windows = position / PARTITION - seen / PARTITION + 1, count = windows + (entries + PARTITION - 1) / PARTITION;
    float m[G], l[G];
    // 2. Partitions
#pragma unroll 1
    for (u32 n = 0; n < count; n++) {
        const bool in_window = n < windows;
        const Cache& c = in_window ? p.rows : p.entries;
        const u32 base = (in_window ? seen / PARTITION + n : n - windows) * PARTITION;
        const u32 from = in_window ? max(seen, base) : base, to = min(in_window ? position + 1 : entries, base + PARTITION), at = base + threadIdx.x;
        __syncthreads();
        if (at >= from && at < to) {
            u64 slot;
            if (!in_window && chosen) slot = chosen[at];
            else {
                const u32 row = in_window ? at : at * p.entry_rows + p.entry_rows - 1;
                const u32* blocks = in_window ? table : p.entry_tables + p.entry_starts[sequence];
                slot = (u64)blocks[row / c.block_tokens] * c.block_tokens + row % c.block_tokens;
            }
            const Place key = place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, 0);
            located.keys[threadIdx.x] = located.values[threadIdx.x] = key.row;
            if (has_scales(c.type)) located.k_scales[threadIdx.x] = located.v_scales[threadIdx.x] = read_scale(key.scale);
        }
        __syncthreads();
        weigh<G, 2>(p, c, q, q_scales, base, from, to, heads, located, scores, ends, weight_scales);
        const bool begins = n == 0;
        float a[G], b[G];
#pragma unroll
        for (int g = 0; g < G; g++) {
            const float m_next = ends[g][0], l_next = ends[g][1], top = begins ? m_next : greater(m_next, m[g]);
            a[g] = begins ? 0.0f : exp_below(sub(m[g], top));
            b[g] = begins ? 1.0f : exp_below(sub(m_next, top));
            l[g] = begins ? l_next : fma(l[g], a[g], mul(l_next, b[g]));
            m[g] = top;
        }
        for (u32 d = threadIdx.x; d < dim; d += blockDim.x) {
            float sums[G];
            sum_values<G, 16>(c, located, base, from, to, d, scores, sums);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float* to_o = o + g * dim + d;
                if (p.integers) sums[g] = mul(sums[g], weight_scales[g]);
                *to_o = begins ? sums[g] : fma(*to_o, a[g], mul(sums[g], b[g]));
            }
        }
    }
    // 3. Sinks
    for (u32 d = threadIdx.x; d < dim; d += blockDim.x) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            if (g >= heads) continue;
            const float sink = p.sinks[first + g], top = greater(sink, m[g]), fade = exp_below(sub(m[g], top));
            const float sum = fma(l[g], fade, exp_below(sub(sink, top)));
            p.out.row(t)[(u64)(first + g) * dim + d] = div(mul(o[g * dim + d], fade), sum);
        }
    }
}

#define COMPRESSED(G) extern "C" __global__ void __launch_bounds__(128) compressed_attend_##G(const __grid_constant__ Compressed p) { begin(); attend_compressed<G>(p); }

COMPRESSED(1)
COMPRESSED(4)
