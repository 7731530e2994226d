// Attention of prompts on keys and values of sixteen bits by wgmma, with heads of 128: sums of integers are exact, so that they may meet in any order.
//
// A block takes the query heads of a KV head of several tokens, up to 128 rows, through all partitions in turn. Two warpgroups of 64 rows each multiply, and weigh one
// while the other multiplies. A third brings keys and values two partitions ahead, and turns the values across. Grid: (tiles of tokens, KV heads).
//
// Shared memory: queries, and in each stage keys and values across, high bytes first, as rows of 128 bytes for wgmma, [2][128][128]; values as they lie in the cache, each
// row sixteen bytes longer; a head for each warp that prepares queries.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/integer_rows.cuh"
#include "attention/turn_across.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 DIM = 128, ROWS = 128, GROUP_ROWS = 64, STAGES = 2, PLANE = 128 * 128, RAW_STRIDE = 2 * DIM + 16;
static const u32 STAGES_AT = 2 * PLANE, STAGE = 4 * PLANE, RAW_AT = STAGES_AT + STAGES * STAGE, HEADS_AT = RAW_AT + PARTITION * RAW_STRIDE;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct OfWide {
    u64 barriers[2 * STAGES];
    const u8* keys[PARTITION];
    float k_scales[STAGES][PARTITION], v_scales[STAGES][PARTITION], q_scales[ROWS];
};

// Where byte `at` of row `row` of 128 bytes lies.
__device__ __forceinline__ u32 swizzled(u32 row, u32 at) { return row * 128 + ((at / 16 ^ row & 7) * 16) + at % 16; }

// A stage, and the parity of its barriers.
struct Ring {
    u32 stage;
    u32 parity;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Tokens of one sequence in a block's tile.
struct Segment {
    u32 first;
    u32 next;
    u32 rows;
    u32 lowest;
    u32 highest;

    __device__ __forceinline__ Segment(const Attention& p, u32 from, u32 end, u32 group) : first(from) {
        const u32 sequence = p.sequences[first];
        for (next = first + 1; next < end && p.sequences[next] == sequence;) next++;
        rows = (next - first) * group;
        lowest = first_seen(p, p.positions[first]), highest = p.positions[next - 1];
    }
};

// Brings a partition after the other.
__device__ __forceinline__ void bring(const Attention& p, OfWide& shared, u8* mem, u32 full, u32 empty, u32 first_token, u32 end_of_tile, u32 group, u32 kv_head) {
    const Cache& c = p.cache;
    const u32 k = threadIdx.x % 128, piece = k % 16;
    u8* raw = mem + RAW_AT;
    Ring ring = {0, 1};
#pragma unroll 1
    for (u32 first = first_token; first < end_of_tile;) {
        const Segment segment(p, first, end_of_tile, group);
        const u32* table = p.tables + p.table_starts[p.sequences[first]];
#pragma unroll 1
        for (u32 base = segment.lowest / PARTITION * PARTITION; base <= segment.highest; base += PARTITION) {
            u8* stage = mem + STAGES_AT + ring.stage * STAGE;
            barrier_wait(empty + 8 * ring.stage, ring.parity);
            const u32 at = base + k;
            Place key = {0, 0};
            float k_scale = 0.0f, v_scale = 0.0f;
            if (at >= segment.lowest && at <= segment.highest) {
                key = place(c, c.k, c.k_scales, DIM, table[at / c.block_tokens], at % c.block_tokens, kv_head);
                k_scale = read_scale(key.scale), v_scale = read_scale(key.scale + (c.v_scales - c.k_scales));
            }
            shared.keys[k] = key.row;
            shared.k_scales[ring.stage][k] = k_scale, shared.v_scales[ring.stage][k] = v_scale;
            wait_for_128(1);
            // Positions that no row sees become zero.
#pragma unroll 4
            for (u32 row = k / 16; row < PARTITION; row += 8) {
                const u8* from = shared.keys[row];
                u8* to = stage + piece / 8 * PLANE + swizzled(row, piece % 8 * 16);
                u8* to_raw = raw + row * RAW_STRIDE + piece * 16;
                if (from) {
                    cp_async_16(to, from + piece * 16);
                    cp_async_16(to_raw, from + (c.v - c.k) + piece * 16);
                } else {
                    *(uint4*)to = *(uint4*)to_raw = make_uint4(0, 0, 0, 0);
                }
            }
            cp_async_wait_all();
            wait_for_128(1);
#pragma unroll
            for (u32 plane = 0; plane < 2; plane++) {
                u8* to = stage + (2 + plane) * PLANE;
                turn_across<DIM, RAW_STRIDE, 128>(raw + plane * DIM, [&](u32 column, u32 word) { return (u32*)(to + swizzled(column, word * 4)); });
            }
            fence_async();
            barrier_arrive(full + 8 * ring.stage);
            ring.next();
        }
        first = segment.next;
    }
}

__device__ __forceinline__ void multiply(const Attention& p, OfWide& shared, u8* mem, u32 base_address, u32 full, u32 empty, u32 first_token, u32 end_of_tile, u32 group, u32 kv_head) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4, half = warp / 4;
    float* head = (float*)(mem + HEADS_AT) + warp * DIM;
    const u64 q = rows_of_128(base_address + half * GROUP_ROWS * 128);
    const u64 low = PLANE / 16;
    Ring ring = {0, 0};
#pragma unroll 1
    for (u32 first = first_token; first < end_of_tile;) {
        const Segment segment(p, first, end_of_tile, group);
        const u32 rows = segment.rows;
        // 1. Queries, normed and turned, then as integers
#pragma unroll 1
        for (u32 r = warp * 16; r < warp * 16 + 16; r++) {
            if (r < rows) {
                const u32 t = first + r / group, h = kv_head * group + r % group;
                turn(p.q.row(t) + (u64)h * DIM * (p.gated ? 2 : 1), head, DIM, p.q_norm, p.angles + (u64)p.positions[t] * 2 * p.half, p.half, p.run);
                const Rounding rounding = rounding_of(head, DIM, TOP_INT16);
#pragma unroll
                for (u32 d = lane; d < DIM; d += WARP) {
                    const int n = round_int(mul(head[d], rounding.inv));
                    mem[swizzled(r, d)] = (u8)high_byte(n);
                    mem[PLANE + swizzled(r, d)] = (u8)low_byte(n);
                }
                if (lane == 0) shared.q_scales[r] = mul(256.0f, rounding.scale);
                __syncwarp();
            } else {
                *(u32*)(mem + r * 128 + lane * 4) = *(u32*)(mem + PLANE + r * 128 + lane * 4) = 0;
            }
        }
        fence_async();
        wait_for_128(2 + half);
        IntegerRows own = rows_of_thread(p, first, rows, shared.q_scales);
        float out[DIM / 8][4];
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = -0.0f;
        // The last position that any of the warpgroup's rows sees
        const bool busy = half * GROUP_ROWS < rows;
        const u32 last = busy ? p.positions[first + (min(rows, half * GROUP_ROWS + GROUP_ROWS) - 1) / group] : 0;
#pragma unroll 1
        for (u32 base = segment.lowest / PARTITION * PARTITION; base <= segment.highest; base += PARTITION) {
            const u32 s = ring.stage;
            barrier_wait(full + 8 * s, ring.parity);
            if (busy && base <= last) {
                const u64 k = rows_of_128(base_address + STAGES_AT + s * STAGE), v = k + 2 * low;
                u32 sums[64];
                // 2. Sums of queries and keys: high bytes, then 256 times these and one low byte each
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < DIM / 32; i++) wgmma_i8(sums, q + 2 * i, k + 2 * i, i > 0);
                wgmma_finish(sums);
#pragma unroll
                for (u32 i = 0; i < 64; i++) sums[i] <<= 8;
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < DIM / 32; i++) {
                    wgmma_i8(sums, q + 2 * i, k + low + 2 * i, 1);
                    wgmma_i8(sums, q + low + 2 * i, k + 2 * i, 1);
                }
                wgmma_finish(sums);
                float scores[TILES][4];
#pragma unroll
                for (u32 i = 0; i < 64; i++) scores[i / 4][i % 4] = (float)(int)sums[i];
                // 3. Weights
                u32 w[2][TILES / 2][2];
                const Steps steps = weigh<2>(p, own, scores, w, shared.k_scales[s], shared.v_scales[s], base);
                // 4. Values
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < PARTITION / 32; i++) wgmma_u8(sums, w[0][2 * i][0], w[0][2 * i][1], w[0][2 * i + 1][0], w[0][2 * i + 1][1], v + 2 * i, i > 0);
                wgmma_finish(sums);
#pragma unroll
                for (u32 i = 0; i < 64; i++) sums[i] <<= 8;
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < PARTITION / 32; i++) {
                    wgmma_u8(sums, w[0][2 * i][0], w[0][2 * i][1], w[0][2 * i + 1][0], w[0][2 * i + 1][1], v + low + 2 * i, 1);
                    wgmma_u8(sums, w[1][2 * i][0], w[1][2 * i][1], w[1][2 * i + 1][0], w[1][2 * i + 1][1], v + 2 * i, 1);
                }
                wgmma_finish(sums);
#pragma unroll
                for (u32 b = 0; b < 2; b++) keep_until_here(*(const u32(*)[16])w[b]);
#pragma unroll
                for (u32 i = 0; i < 64; i++) {
                    const float o = mul((float)(int)sums[i], steps.scales[i / 2 % 2]);
                    float& to = out[i / 4][i % 4];
                    to = fma(to, steps.kept[i / 2 % 2], mul(o, steps.taken[i / 2 % 2]));
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * s);
            ring.next();
        }
        // 5. The end of each row
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 r = warp * 16 + lane / 4 + 8 * e;
            if (!own.has[e]) continue;
            const u32 t = first + r / group, h = kv_head * group + r % group;
#pragma unroll
            for (u32 i = 0; i < DIM / 4; i++) finish(p, t, h, i / 2 * 8 + 2 * quad + i % 2, out[i / 2][2 * e + i % 2], own.top[e], own.sum[e]);
        }
        // Nothing reads its queries any more.
        wait_for_128(2 + half);
        first = segment.next;
    }
}

__device__ __forceinline__ void attend_wide(const Attention& p) {
    __shared__ __align__(16) OfWide shared;
    const u32 group = p.heads / p.kv_heads, per_tile = max(ROWS / group, 1u);
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(shared.barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 128);
            barrier_init(empty + 8 * i, 8);
        }
        barriers_are_made();
    }
    begin();
    __syncthreads();
    // The last tokens see most positions, so their blocks come first, with all their heads.
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x, kv_head = block % gridDim.y;
    const u32 tile = gridDim.x - 1 - block / gridDim.y, first = tile * per_tile, end_of_tile = min(first + per_tile, p.tokens);
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        bring(p, shared, mem, full, empty, first, end_of_tile, group, kv_head);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        multiply(p, shared, mem, base, full, empty, first, end_of_tile, group, kv_head);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1) attention_int16_wide_128(const __grid_constant__ Attention p) { ON_HOPPER(attend_wide(p);) }
