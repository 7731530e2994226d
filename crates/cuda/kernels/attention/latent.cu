// What latent attention has beside attention itself: rows into their slots, queries into the space of these rows, and the matrix of each head.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/turn_part.cuh"
#include "format/matrix.cuh"
#include "format/weight.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"

struct LatentQueries {
    // From its row 0 on.
    Matrix keys;
    // [tokens, all heads * (plain + rotated)]
    Tensor q;
    // [tokens, heads, rotated + rank]
    float* to;
    // [tokens, heads, plain]: what is not rotated, for products with matrices of their own; null: it goes through `keys`.
    float* plain_to;
    // [positions, rotated]: cosines, then sines.
    const float* angles;
    const u32* positions;
    // Where rows are stored: [tokens, rank + rotated], the vector before its norm, then the key that is rotated. Null: they are there already.
    const u64* slots;
    Cache cache;
    Tensor kv;
    Norm norm;
    u32 tokens;
    // The first of `heads` heads.
    u32 first;
    u32 heads;
    u32 plain;
    u32 rotated;
    u32 rank;
    // Elements beside each other are turned together.
    u32 adjacent;
    // Rows of `keys` from head to head, and the first of head 0.
    u32 stride;
    u32 offset;
    u32 unused;
};

// A token's turned key, then its normed vector, into its slot. A block takes it, whose warps all find the root. Shared memory: a row.
__device__ __forceinline__ void store_latent_row(const LatentQueries& p, u32 t) {
    const Cache& c = p.cache;
    const float* x = p.kv.row(t);
    if (threadIdx.x < WARP) turn_part(x + p.rank, smem, p.rotated, p.adjacent, p.angles + (u64)p.positions[t] * p.rotated);
    const float inv = inverse_rms(x, p.rank, p.norm.eps);
    for (u32 i = threadIdx.x; i < p.rank; i += blockDim.x) smem[p.rotated + i] = mul(mul(x[i], inv), p.norm.weight[i]);
    __syncthreads();
    const u64 slot = p.slots[t];
    const Place to = place(c, c.k, c.k_scales, c.k_dim, slot / c.block_tokens, slot % c.block_tokens, 0);
    if (c.type == F16) {
        for (u32 i = threadIdx.x; i < c.k_dim; i += blockDim.x) ((u16*)to.row)[i] = to_f16(smem[i]);
    } else if (c.type == BF16) {
        for (u32 i = threadIdx.x; i < c.k_dim; i += blockDim.x) ((u16*)to.row)[i] = round_bf16(smem[i]);
    } else if (threadIdx.x < WARP) {
        store(smem, c.k_dim, c.type, to);
    }
}

// Rows into their slots, and the rotated parts of queries, whose heads have a warp each. Grid: (tokens, one for the row if it is stored, and heads by warps).
extern "C" __global__ void latent_turn(const LatentQueries p) {
    begin();
    const bool stores = p.slots;
    if (stores && blockIdx.y == 0) {
        store_latent_row(p, blockIdx.x);
        return;
    }
    const u32 h = (blockIdx.y - stores) * (blockDim.x / WARP) + threadIdx.x / WARP, width = p.plain + p.rotated, dim = p.rotated + p.rank, t = blockIdx.x;
    if (h >= p.heads) return;
    const float* x = p.q.row(t) + (u64)(p.first + h) * width;
    const u64 row = (u64)t * p.heads + h;
    turn_part(x + p.plain, p.to + row * dim, p.rotated, p.adjacent, p.angles + (u64)p.positions[t] * p.rotated);
    if (p.plain_to) {
        for (u32 i = threadIdx.x % WARP; i < p.plain; i += WARP) p.plain_to[row * p.plain + i] = x[i];
    }
}

// Columns of a block, one a thread.
static const u32 ABSORB_COLUMNS = 128;

// The chains of N tokens over the rows of a head, of which `weight` gives the element of this thread's column.
template <u32 N, class W> __device__ __forceinline__ void chains(const float* q, u32 plain, W weight, float (&sums)[N]) {
    const u32 DEEP = 8;
    u32 n = 0;
#pragma unroll 1
    for (; n + DEEP <= plain; n += DEEP) {
        float w[DEEP];
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) w[d] = weight(n + d);
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) {
#pragma unroll
            for (u32 i = 0; i < N; i++) sums[i] = fma(q[i * plain + n + d], w[d], sums[i]);
        }
    }
#pragma unroll 1
    for (; n < plain; n++) {
        const float w = weight(n);
#pragma unroll
        for (u32 i = 0; i < N; i++) sums[i] = fma(q[i * plain + n], w, sums[i]);
    }
}

// The plain parts of the queries of N tokens and a head, through the head's rows of `keys`: one chain of fmas for each column, in the order of rows. Grid: (heads, tiles of columns,
// tiles of tokens). Shared memory: [N][plain].
template <u32 N> __device__ __forceinline__ void absorb(const LatentQueries& p) {
    const u32 h = blockIdx.x, c = blockIdx.y * ABSORB_COLUMNS + threadIdx.x, width = p.plain + p.rotated, dim = p.rotated + p.rank;
    const u32 from = blockIdx.z * N, count = min(N, p.tokens - from);
    begin();
    for (u32 i = threadIdx.x; i < N * p.plain; i += ABSORB_COLUMNS) {
        const u32 t = i / p.plain, n = i - t * p.plain;
        smem[i] = t < count ? p.q.row(from + t)[(u64)(p.first + h) * width + n] : 0.0f;
    }
    __syncthreads();
    if (c >= p.rank) return;
    const Matrix& m = p.keys;
    const u64 row = (u64)(p.first + h) * p.stride + p.offset;
    float sums[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) sums[i] = 0.0f;
    // The usual formats have loops without branches.
    const u8* data = m.data + row * m.row_bytes;
    if (!m.group && m.type == BF16) chains<N>(smem, p.plain, [&](u32 n) { return from_bf16(((const u16*)(data + n * m.row_bytes))[c]); }, sums);
    else if (!m.group && m.type == F16) chains<N>(smem, p.plain, [&](u32 n) { return from_f16(((const u16*)(data + n * m.row_bytes))[c]); }, sums);
    else chains<N>(smem, p.plain, [&](u32 n) { return weight_of(m, row + n, c); }, sums);
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        if (i < count) p.to[((u64)(from + i) * p.heads + h) * dim + p.rotated + c] = sums[i];
    }
}

extern "C" __global__ void __launch_bounds__(ABSORB_COLUMNS) latent_absorb_1(const LatentQueries p) { absorb<1>(p); }
extern "C" __global__ void __launch_bounds__(ABSORB_COLUMNS) latent_absorb_4(const LatentQueries p) { absorb<4>(p); }
extern "C" __global__ void __launch_bounds__(ABSORB_COLUMNS) latent_absorb_16(const LatentQueries p) { absorb<16>(p); }

struct LatentHeads {
    // The rows of the first head.
    Matrix first;
    // Bytes from head to head, of elements, scales and biases.
    u64 steps[3];
    // [heads]
    Matrix* matrices;
    // [outputs]: the head of each. Head h of token t is output t * heads + h, or, in runs, h * run + t.
    u32* numbers;
    // Outputs by head and tiles of them, as moe/pairs.cu has them; null: not wanted.
    u32* tiles;
    // [outputs]: of tiles their outputs; of runs the input of each output.
    u32* order;
    u32 tokens;
    u32 heads;
    u32 outputs;
    // The most outputs of a tile.
    u32 of_tile;
    // Outputs of a head behind each other, of which the last may be none of a token; 0: heads take turns.
    u32 run;
    u32 unused;
};

// A table of the heads' matrices, as products of experts take it.
extern "C" __global__ void latent_heads(const LatentHeads p) {
    begin();
    const u32 of_head = p.tiles ? (p.tokens + p.of_tile - 1) / p.of_tile : 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.outputs; i += gridDim.x * blockDim.x) {
        p.numbers[i] = p.run ? i / p.run : i % p.heads;
        if (p.run) p.order[i] = min(i % p.run, p.tokens - 1) * p.heads + i / p.run;
        if (p.tiles) {
            p.order[i] = i % p.tokens * p.heads + i / p.tokens;
            if (i == 0) p.tiles[0] = p.heads * of_head;
            if (i < p.heads * of_head) {
                const u32 h = i / of_head, from = i % of_head * p.of_tile;
                ((uint4*)p.tiles)[1 + i] = make_uint4(h, h * p.tokens + from, min(p.of_tile, p.tokens - from), 0);
            }
        }
        if (i >= p.heads) continue;
        Matrix own = p.first;
        own.data += i * p.steps[0];
        own.scales += i * p.steps[1];
        own.biases += i * p.steps[2];
        p.matrices[i] = own;
    }
}

struct LatentGather {
    // Rows of `cols`, of outputs as `LatentHeads` has them.
    const float* from;
    float* to;
    // Elements from token to token and from head to head of `to`.
    u64 token;
    u64 head;
    u32 cols;
    u32 heads;
    u32 run;
    u32 unused;
};

// Outputs to where each head of a token has its own. Grid: (tokens, heads).
extern "C" __global__ void latent_gather(const LatentGather p) {
    begin();
    const u32 t = blockIdx.x, h = blockIdx.y;
    const float* from = p.from + (p.run ? (u64)h * p.run + t : (u64)t * p.heads + h) * p.cols;
    float* to = p.to + t * p.token + h * p.head;
    for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) to[c] = from[c];
}
