// Attention over latent rows of sixteen bits: a block takes sixteen rows (heads of one token, or of neighbours of one sequence) through partitions whose rows lie in shared memory once, as keys
// and as values. Four warps have four rows. Every product and sum is in the order of attention/paged.cu.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

static const u32 LATENT_ROWS = 16, LATENT_THREADS = 512, QUAD = 4, QUADS = LATENT_ROWS / QUAD;

struct LatentShared {
    const u8* rows[PARTITION];
    float scores[LATENT_ROWS][PARTITION];
    // The weights of four rows side by side.
    float weights[QUADS][PARTITION][QUAD];
    // Places that a row sees of all, and of this partition.
    u32 limits[LATENT_ROWS];
    u32 seen[LATENT_ROWS];
    // Of the partitions so far: maximum and sum of weights; factors of what they gave, and of what this one gives.
    float tops[LATENT_ROWS];
    float sums[LATENT_ROWS];
    float before[LATENT_ROWS];
    float here[LATENT_ROWS];
};

// Words from row to row: such that four neighbours lie in different banks.
__device__ __forceinline__ u32 row_words(u32 dim) { return (dim / 2 + 23) / 32 * 32 + 8; }

template <u32 TYPE> __device__ __forceinline__ float4 four(uint2 w) {
    if (TYPE == BF16) return make_float4(bits(w.x << 16), bits(w.x & 0xffff0000u), bits(w.y << 16), bits(w.y & 0xffff0000u));
    return make_float4(from_f16((u16)w.x), from_f16((u16)(w.x >> 16)), from_f16((u16)w.y), from_f16((u16)(w.y >> 16)));
}

// Scores of the warp's four rows at 32 positions. Four threads have the sixteen lanes of a dot product, four each, of four positions; in the end each has one of these.
template <u32 TYPE> __device__ __forceinline__ void score_rows(const float* q, const u8* keys, u32 words, u32 dim, u32 rows, u32 part, float scale, LatentShared& shared) {
    const u32 lane = threadIdx.x % WARP, quarter = lane % 4, group = lane / 4;
    float acc[QUAD][4][4];
#pragma unroll
    for (u32 i = 0; i < QUAD * 16; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
    const u8* key = keys + (u64)(part * 32 + group) * words * 4 + quarter * 8;
    const float* x = q + rows * dim + quarter * 4;
#pragma unroll 2
    for (u32 d = 0; d < dim; d += 16) {
        float4 own[QUAD];
#pragma unroll
        for (u32 g = 0; g < QUAD; g++) own[g] = *(const float4*)(x + g * dim + d);
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const float4 k = four<TYPE>(*(const uint2*)(key + e * 8 * words * 4 + d * 2));
#pragma unroll
            for (u32 g = 0; g < QUAD; g++) {
                acc[g][e][0] = fma(own[g].x, k.x, acc[g][e][0]);
                acc[g][e][1] = fma(own[g].y, k.y, acc[g][e][1]);
                acc[g][e][2] = fma(own[g].z, k.z, acc[g][e][2]);
                acc[g][e][3] = fma(own[g].w, k.w, acc[g][e][3]);
            }
        }
    }
    const bool low = quarter < 2, odd = quarter % 2;
#pragma unroll
    for (u32 g = 0; g < QUAD; g++) {
        // Each thread keeps half of what it has, and exchanges the other half with another.
        float half[2][4], s[4];
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) half[e][i] = add(low ? acc[g][e][i] : acc[g][e + 2][i], __shfl_xor_sync(ALL, low ? acc[g][e + 2][i] : acc[g][e][i], 2));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) s[i] = add(odd ? half[1][i] : half[0][i], __shfl_xor_sync(ALL, odd ? half[0][i] : half[1][i], 1));
        const u32 position = part * 32 + ((low ? 0 : 2) + (odd ? 1 : 0)) * 8 + group;
        shared.scores[rows + g][position] = mul(add(add(s[0], s[2]), add(s[1], s[3])), scale);
    }
}

// The weights of a row, by a warp, and how the partition joins those before it.
template <bool SPLIT> __device__ __forceinline__ void weigh_row(u32 row, u32 base, bool begins, LatentShared& shared, float* part_ends) {
    const u32 lane = threadIdx.x % WARP, limit = shared.limits[row], seen = limit > base ? min(limit - base, PARTITION) : 0;
    if (lane == 0) shared.seen[row] = seen;
    if (seen == 0) return;
    float top = bits(NEGATIVE_INFINITY);
    for (u32 i = lane; i < seen; i += WARP) top = greater(shared.scores[row][i], top);
    top = warp_max(top);
    // Both halves of the warp have the sixteen lanes of the sum.
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < PARTITION / 16; j++) {
        const u32 i = 16 * j + lane % 16;
        const float weight = i < seen ? exp_below(sub(shared.scores[row][i], top)) : 0.0f;
        sum = add(sum, weight);
        if (lane < 16) shared.weights[row / QUAD][i][row % QUAD] = weight;
    }
    sum = lane_tree(sum);
    if (lane > 0) return;
    if (SPLIT) {
        part_ends[0] = top, part_ends[1] = sum;
        return;
    }
    const float before = shared.tops[row], all = begins ? top : greater(top, before);
    const float a = begins ? 0.0f : exp_below(sub(before, all)), b = begins ? 1.0f : exp_below(sub(top, all));
    shared.sums[row] = begins ? sum : fma(shared.sums[row], a, mul(sum, b));
    shared.tops[row] = all, shared.before[row] = a, shared.here[row] = b;
}

// Grid: (tiles of rows, 1, partitions if they are split). Shared memory: rows of the cache, then queries.
template <u32 TYPE, bool SPLIT> __device__ __forceinline__ void attend_latents(const Attention& p) {
    __shared__ __align__(16) LatentShared shared;
    const Cache& c = p.cache;
    const u32 dim = c.k_dim, rank = c.v_dim, words = row_words(dim), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = warp / QUAD;
    u8* keys = (u8*)smem;
    float* q = smem + PARTITION * words;
    // 1. The rows, and what they see
    const u32 tiles = (p.heads + LATENT_ROWS - 1) / LATENT_ROWS, all = p.tokens * p.heads;
    const u32 first = p.flat ? blockIdx.x * LATENT_ROWS : blockIdx.x / tiles * p.heads + blockIdx.x % tiles * LATENT_ROWS;
    const u32 count = min(LATENT_ROWS, p.flat ? all - first : p.heads - blockIdx.x % tiles * LATENT_ROWS);
    begin();
    const u32 t = first / p.heads, reach = last_seen(p, (first + count - 1) / p.heads) + 1;
    if (SPLIT && blockIdx.z * PARTITION >= reach) return;
    const u32 end = SPLIT ? min(reach, (blockIdx.z + 1) * PARTITION) : reach;
    if (threadIdx.x < LATENT_ROWS) shared.limits[threadIdx.x] = threadIdx.x < count ? last_seen(p, (first + threadIdx.x) / p.heads) + 1 : 0;
    for (u32 i = threadIdx.x; i < LATENT_ROWS * dim / 4; i += LATENT_THREADS) {
        const bool there = i * 4 / dim < count;
        ((float4*)q)[i] = there ? ((const float4*)(p.q.at + (u64)first * dim))[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const u32* table = p.tables + p.table_starts[p.sequences[t]];
    const u32 width = part_width(rank), column = threadIdx.x % (QUAD * WARP) * 4;
    const u64 part_rows = (u64)p.partitions * width;
    float* parts = p.parts + ((u64)first * p.partitions + blockIdx.z) * width;
    float4 o[QUAD];
#pragma unroll
    for (u32 g = 0; g < QUAD; g++) o[g] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 base = SPLIT ? blockIdx.z * PARTITION : 0; base < end; base += PARTITION) {
        const u32 there = min(end - base, PARTITION);
        const bool begins = base == 0;
        // 2. Rows of the cache
        __syncthreads();
        if (threadIdx.x < there) {
            const u64 slot = slot_of(p, t, table, base + threadIdx.x);
            shared.rows[threadIdx.x] = place(c, c.k, c.k_scales, dim, slot / c.block_tokens, slot % c.block_tokens, 0).row;
        }
        __syncthreads();
        for (u32 i = warp; i < there; i += LATENT_THREADS / WARP) {
            for (u32 piece = lane; piece < dim / 8; piece += WARP) cp_async_16(keys + (u64)i * words * 4 + piece * 16, shared.rows[i] + piece * 16);
        }
        cp_async_wait_all();
        __syncthreads();
        // 3. Scores and weights
        if (quad * QUAD < count && warp % QUAD * 32 < there) score_rows<TYPE>(q, keys, words, dim, quad * QUAD, warp % QUAD, p.scale, shared);
        __syncthreads();
        weigh_row<SPLIT>(warp, base, begins, shared, parts + warp * part_rows + rank);
        __syncthreads();
        // 4. Values: a thread has four columns of four rows
        u32 seen[QUAD], least = PARTITION, most = 0;
#pragma unroll
        for (u32 g = 0; g < QUAD; g++) {
            seen[g] = shared.seen[quad * QUAD + g];
            least = min(least, seen[g]), most = max(most, seen[g]);
        }
        if (column < rank) {
            const u8* value = keys + c.before_value * 2 + column * 2;
            float4 sums[QUAD];
#pragma unroll
            for (u32 g = 0; g < QUAD; g++) sums[g] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            auto take = [&](u32 i, bool every) {
                const float4 v = four<TYPE>(*(const uint2*)(value + (u64)i * words * 4)), w = *(const float4*)shared.weights[quad][i];
                const float weights[QUAD] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (u32 g = 0; g < QUAD; g++) {
                    if (!every && i >= seen[g]) continue;
                    sums[g].x = fma(weights[g], v.x, sums[g].x);
                    sums[g].y = fma(weights[g], v.y, sums[g].y);
                    sums[g].z = fma(weights[g], v.z, sums[g].z);
                    sums[g].w = fma(weights[g], v.w, sums[g].w);
                }
            };
#pragma unroll 4
            for (u32 i = 0; i < least; i++) take(i, true);
#pragma unroll 1
            for (u32 i = least; i < most; i++) take(i, false);
#pragma unroll
            for (u32 g = 0; g < QUAD; g++) {
                if (seen[g] == 0) continue;
                const u32 row = quad * QUAD + g;
                if (SPLIT) {
                    *(float4*)(parts + row * part_rows + column) = sums[g];
                    continue;
                }
                const float a = shared.before[row], b = shared.here[row];
                const float4 s = sums[g];
                o[g].x = begins ? s.x : fma(o[g].x, a, mul(s.x, b));
                o[g].y = begins ? s.y : fma(o[g].y, a, mul(s.y, b));
                o[g].z = begins ? s.z : fma(o[g].z, a, mul(s.z, b));
                o[g].w = begins ? s.w : fma(o[g].w, a, mul(s.w, b));
            }
        }
    }
    if (SPLIT || column >= rank) return;
#pragma unroll
    for (u32 g = 0; g < QUAD; g++) {
        const u32 row = quad * QUAD + g;
        if (row >= count) continue;
        const float l = shared.sums[row];
        *(float4*)(p.out.at + (u64)(first + row) * rank + column) = make_float4(div(o[g].x, l), div(o[g].y, l), div(o[g].z, l), div(o[g].w, l));
    }
}

#define LATENT(name, TYPE)                                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(LATENT_THREADS) latent_attend_##name(const __grid_constant__ Attention p) { attend_latents<TYPE, false>(p); }      \
    extern "C" __global__ void __launch_bounds__(LATENT_THREADS) latent_attend_part_##name(const __grid_constant__ Attention p) { attend_latents<TYPE, true>(p); }

LATENT(f16, F16)
LATENT(bf16, BF16)
