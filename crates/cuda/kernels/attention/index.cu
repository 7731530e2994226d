// Sparse indexers: keys into their slots, scores of all positions that a token sees, of pools of them or of entries, and the slots of the best.
#include "attention/cache.cuh"
#include "attention/lanes.cuh"
#include "attention/pooled.cuh"
#include "attention/turn_part.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"

struct Index {
    Cache cache;
    // [tokens, heads * dim], [tokens, dim], [tokens, heads]; without weights all heads count once.
    Tensor q;
    Tensor k;
    Tensor weights;
    // Of pools: [tokens, dim], what weighs keys in them; and [pool, dim], added to it. Without them keys weigh alike.
    Tensor logits;
    // Of keys: a layer norm. Without a bias it is an RMS norm of pools' keys, which are turned by the positions of their first tokens; those of tokens are stored as they are.
    Norm norm;
    const float* bias;
    const float* pool_bias;
    // [positions, 2 * half]: cosines, then sines.
    const float* angles;
    const u32* positions;
    const u32* sequences;
    const u64* slots;
    // Block tables of keys, and of the rows that are selected.
    const u32* tables;
    const u32* table_starts;
    const u32* row_tables;
    const u32* row_starts;
    // [tokens at a time, reach]
    float* scores;
    // [tokens, top + pool - 1]
    u32* selected;
    u32 tokens;
    u32 heads;
    u32 half;
    u32 adjacent;
    u32 top;
    // Positions up to the last token's own, or whole pools of them, rounded up to whole partitions.
    u32 reach;
    // The first of the tokens at a time.
    u32 first;
    // Positions of a block of rows.
    u32 row_block;
    float scale;
    float weight_scale;
    // Positions that have one key and are selected together.
    u32 pool;
    // Rows of the cache that have one key: as many, unless positions share rows.
    u32 key_rows;
    // Where entries are selected, and not positions: rows that have one. 0: positions are.
    u32 entry_rows;
    u32 unused;
};

static const u32 INDEX_THREADS = 128, SELECT_THREADS = 512;

// Turns the first elements of a row in place, by a warp, through room for them.
__device__ __forceinline__ void turn_in_place(float* x, float* room, const Index& p, const float* angles) {
    for (u32 i = threadIdx.x % WARP; i < 2 * p.half; i += WARP) room[i] = x[i];
    __syncwarp();
    turn_part(room, x, 2 * p.half, p.adjacent, angles);
    __syncwarp();
}

// Norms, turns and stores a token's key, turns its queries and scales the weights of heads. A block takes a token, a warp a row at a time. Shared memory: a row for each warp.
extern "C" __global__ void __launch_bounds__(INDEX_THREADS) index_store(const Index p) {
    begin();
    const Cache& c = p.cache;
    const u32 t = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, dim = c.k_dim;
    const float* angles = p.angles + (u64)p.positions[t] * 2 * p.half;
    float* room = smem + warp * dim;
    if (warp == 0) {
        float* x = p.k.row(t);
        const u64 slot = p.slots[t];
        const Place to = place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, 0);
        for (u32 h = lane; p.weights.at && h < p.heads; h += WARP) p.weights.row(t)[h] = mul(p.weights.row(t)[h], p.weight_scale);
        if (!p.bias) {
            store(x, dim, c.type, to);
            return;
        }
        float sum = 0.0f;
        // Both halves of the warp have the same sixteen lanes.
        for (u32 i = lane % 16; i < (dim + 15) / 16 * 16; i += 16) sum = add(sum, i < dim ? x[i] : 0.0f);
        const float mean = div(lane_tree(sum), (float)dim);
        for (u32 i = lane; i < dim; i += WARP) room[i] = sub(x[i], mean);
        __syncwarp();
        const float inv = inverse_rms(room, dim, p.norm.eps);
        for (u32 i = lane; i < dim; i += WARP) x[i] = fma(mul(room[i], inv), p.norm.weight[i], p.bias[i]);
        __syncwarp();
        turn_in_place(x, room, p, angles);
        for (u32 i = lane; i < dim; i += WARP) room[i] = x[i];
        __syncwarp();
        store(room, dim, c.type, to);
        return;
    }
    if (warp == 1 && p.logits.at) {
        const u64 slot = p.slots[t];
        store(p.logits.row(t), dim, c.type, place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, 1));
    }
    for (u32 h = warp - 1; h < p.heads; h += INDEX_THREADS / WARP - 1) turn_in_place(p.q.row(t) + (u64)h * dim, room, p, angles);
}

// Where a token is the last of its pool, the pool's key takes the place of its own. A block takes a token, a thread an element. Shared memory: two rows.
extern "C" __global__ void __launch_bounds__(INDEX_THREADS) index_pool(const Index p) {
    begin();
    const Cache& c = p.cache;
    const u32 t = blockIdx.x, dim = c.k_dim, last = p.positions[t];
    if ((last + 1) % p.pool != 0) return;
    const u32 first = last + 1 - p.pool;
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    for (u32 i = threadIdx.x; i < dim; i += INDEX_THREADS) {
        float most = 0.0f, sum = 0.0f, key = 0.0f;
        if (!p.logits.at) {
            for (u32 k = 0; k < p.pool; k++) key = add(key, pooled(c, table, first + k, 0, i));
            smem[i] = div(key, (float)p.pool);
            continue;
        }
        for (u32 k = 0; k < p.pool; k++) {
            const float logit = add(pooled(c, table, first + k, 1, i), p.pool_bias[k * dim + i]);
            most = k == 0 ? logit : greater(logit, most);
        }
        for (u32 k = 0; k < p.pool; k++) {
            const float e = exp_(sub(add(pooled(c, table, first + k, 1, i), p.pool_bias[k * dim + i]), most));
            sum = add(sum, e);
            key = fma(e, pooled(c, table, first + k, 0, i), key);
        }
        smem[i] = div(key, sum);
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    if (!p.bias) {
        const float inv = inverse_rms(smem, dim, p.norm.eps);
        for (u32 i = threadIdx.x; i < dim; i += WARP) smem[i] = mul(mul(smem[i], inv), p.norm.weight[i]);
        __syncwarp();
        turn_in_place(smem, smem + dim, p, p.angles + (u64)first * 2 * p.half);
    }
    const u64 slot = p.slots[t];
    store(smem, dim, c.type, place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, 0));
}

// Adds what G heads from `h` on make of a key to a position's score.
template <u32 G, u32 TYPE> __device__ __forceinline__ float add_heads(const Index& p, const u8* key, float key_scale, const float* q, u32 pad, u32 h, const float* weights, float sum) {
    float acc[G][16];
#pragma unroll
    for (u32 g = 0; g < G; g++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[g][i] = 0.0f;
    }
    dot_lanes<G, TYPE, 2>(key, p.cache.k_dim, q + h * pad, pad, acc);
#pragma unroll
    for (u32 g = 0; g < G; g++) {
#pragma unroll
        for (u32 step = 8; step > 0; step /= 2) {
#pragma unroll
            for (u32 i = 0; i < step; i++) acc[g][i] = add(acc[g][i], acc[g][i + step]);
        }
        float s = acc[g][0];
        if (TYPE == INT8) s = mul(s, key_scale);
        // A NaN passes.
        sum = fma(weights[h + g], greater(0.0f, mul(s, p.scale)), sum);
    }
    return sum;
}

template <u32 TYPE> __device__ __forceinline__ float score(const Index& p, const u8* key, float key_scale, const float* q, u32 pad, const float* weights) {
    float sum = 0.0f;
    u32 h = 0;
#pragma unroll 1
    for (; h + 4 <= p.heads; h += 4) sum = add_heads<4, TYPE>(p, key, key_scale, q, pad, h, weights, sum);
#pragma unroll 1
    for (; h < p.heads; h++) sum = add_heads<1, TYPE>(p, key, key_scale, q, pad, h, weights, sum);
    return sum;
}

// A thread has a position of a token, or a pool, whose key is the last position's. Grid: (tiles of positions, tokens at a time). Shared memory: queries, padded, and the weights of heads.
extern "C" __global__ void __launch_bounds__(INDEX_THREADS) index_scores(const Index p) {
    begin();
    const Cache& c = p.cache;
    const u32 t = p.first + blockIdx.y, count = (p.positions[t] + 1) / p.pool, at = blockIdx.x * INDEX_THREADS + threadIdx.x, pad = padded(c.k_dim);
    if (blockIdx.x * INDEX_THREADS >= count) return;
    float* weights = smem + p.heads * pad;
    for (u32 i = threadIdx.x; i < p.heads * pad; i += INDEX_THREADS) {
        const u32 h = i / pad, d = i - h * pad;
        smem[i] = d < c.k_dim ? p.q.row(t)[(u64)h * c.k_dim + d] : 0.0f;
    }
    for (u32 h = threadIdx.x; h < p.heads; h += INDEX_THREADS) weights[h] = p.weights.at ? p.weights.row(t)[h] : 1.0f;
    __syncthreads();
    if (at >= count) return;
    const u32 position = at * p.key_rows + p.key_rows - 1, block = (p.tables + p.table_starts[p.sequences[t]])[position / c.block_tokens];
    const Place key = place(c, c.k, c.k_scales, c.k_dim, block, position % c.block_tokens, 0);
    const float key_scale = c.type == INT8 ? read_scale(key.scale) : 1.0f;
    float s;
    if (c.type == F32) s = score<F32>(p, key.row, key_scale, smem, pad, weights);
    else if (c.type == F16) s = score<F16>(p, key.row, key_scale, smem, pad, weights);
    else if (c.type == BF16) s = score<BF16>(p, key.row, key_scale, smem, pad, weights);
    else s = score<INT8>(p, key.row, key_scale, smem, pad, weights);
    p.scores[(u64)blockIdx.y * p.reach + at] = s;
}

// A number that grows with a score; what is no number comes last.
__device__ __forceinline__ u32 rank_of(float score) {
    const u32 b = bits(score);
    return is_nan(score) ? 0 : b ^ (b >> 31 ? 0xffffffffu : 0x80000000u);
}

// The slots of the best positions of a token, or of those of its best pools and behind all of them, in ascending order; of equal ones the lower. A block takes a token.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) index_select(const Index p) {
    __shared__ u32 counts[256], digit, left, sums[2][SELECT_THREADS / WARP];
    begin();
    const u32 t = p.first + blockIdx.x, all = p.positions[t] + 1, n = all / p.pool, each = p.entry_rows ? 1 : p.pool, most = p.top / each, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* scores = p.scores + (u64)blockIdx.x * p.reach;
    const u32* table = p.row_tables + p.row_starts[p.sequences[t]];
    u32* to = p.selected + (u64)t * (p.top + each - 1);
    auto slot = [&](u32 at) {
        if (p.entry_rows) at = at * p.entry_rows + p.entry_rows - 1;
        return table[at / p.row_block] * p.row_block + at % p.row_block;
    };
    if (n <= most) {
        const u32 seen = p.entry_rows ? n : all;
        for (u32 i = threadIdx.x; i < seen; i += SELECT_THREADS) to[i] = slot(i);
        return;
    }
    const u32 behind = p.entry_rows ? 0 : all % p.pool;
    for (u32 i = threadIdx.x; i < behind; i += SELECT_THREADS) to[p.top + i] = slot(n * p.pool + i);
    // 1. The rank of the last that is taken, a byte at a time, and how many of its equals are
    u32 prefix = 0, wanted = most;
#pragma unroll 1
    for (u32 shift = 32; shift > 0;) {
        shift -= 8;
        for (u32 i = threadIdx.x; i < 256; i += SELECT_THREADS) counts[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += SELECT_THREADS) {
            const u32 rank = rank_of(scores[i]);
            if (shift == 24 || rank >> (shift + 8) == prefix >> (shift + 8)) atomicAdd(&counts[rank >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 above = 0, at = 255;
            for (; at > 0 && above + counts[at] < wanted; at--) above += counts[at];
            digit = at, left = wanted - above;
        }
        __syncthreads();
        prefix |= digit << shift, wanted = left;
    }
    // 2. Those above it, and the first of its equals
    u32 taken = 0, equals = 0;
#pragma unroll 1
    for (u32 from = 0; from < n; from += SELECT_THREADS) {
        const u32 at = from + threadIdx.x, rank = at < n ? rank_of(scores[at]) : 0;
        const bool equal = at < n && rank == prefix, above = at < n && rank > prefix;
        const u32 before = (1u << lane) - 1, all_equal = __ballot_sync(ALL, equal), all_above = __ballot_sync(ALL, above);
        if (lane == 0) sums[0][warp] = __popc(all_equal), sums[1][warp] = __popc(all_above);
        __syncthreads();
        u32 own_equals = equals + __popc(all_equal & before), own_above = __popc(all_above & before), block_equals = 0, block_above = 0;
        for (u32 w = 0; w < SELECT_THREADS / WARP; w++) {
            if (w < warp) own_equals += sums[0][w], own_above += sums[1][w];
            block_equals += sums[0][w], block_above += sums[1][w];
        }
        // Of the equals before this position, as many are taken as are wanted.
        const u32 place = taken + own_above + min(own_equals, wanted) - min(equals, wanted);
        if (above || equal && own_equals < wanted) {
            for (u32 i = 0; i < each; i++) to[place * each + i] = slot(at * each + i);
        }
        taken += block_above + min(equals + block_equals, wanted) - min(equals, wanted);
        equals += block_equals;
        __syncthreads();
    }
}
