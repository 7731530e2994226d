// Products of integers of 11 bits for some tokens, with 4-bit weights in groups of 64 or 128.
//
// A block takes 64 rows and up to 16, 32 or 64 tokens at a time: four warps multiply and fold, one brings weights and one tokens, a few groups together, as many stages ahead as
// there is memory for. Several blocks share a multiprocessor. Weights are unpacked in registers; while the sums of one group are folded, the next is multiplied: by wgmma for 64
// tokens, which takes as long for fewer, and else by mma.
//
// In a mixture (GROUPED) a tile has up to sixteen pairs of one expert, whose tokens come by copies of sixteen bytes, from wherever they are. A block takes tiles that
// follow one another, which mostly have the same pairs.
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "gemm/tiles_of.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 ROWS = 64, MULTIPLYING = 4, NARROW_THREADS = (MULTIPLYING + 2) * WARP, MOST_STAGES = 12;
// Of a mixture's stages so many are under way before the first of them is waited for.
static const u32 AHEAD = 2;

// A stage: GROUPS groups of tokens, of weights, scales and biases of each row, sums of tokens.
template <u32 TOKENS> struct Narrow {
    static const u32 GROUPS = TOKENS == 64 ? 2 : 4;
    // Sixteen bytes that a stage has of a row, and that each lane brings of all rows.
    static const u32 PIECES = GROUPS * 2, COPIES = ROWS * PIECES / WARP;
    // Rows of weights begin in other banks than the three before them.
    static const u32 PITCH = GROUPS * 32 + 32;
    static const u32 WEIGHTS_AT = GROUPS * TOKENS * 128, SCALES_AT = WEIGHTS_AT + ROWS * PITCH, SUMS_AT = SCALES_AT + ROWS * 16;
    static const u32 STAGE = (SUMS_AT + GROUPS * TOKENS * 4 + 1023) / 1024 * 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Bytes of shared memory that the kernel was launched with.
__device__ __forceinline__ u32 dynamic_shared() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// What a multiplying warp has.
template <u32 TOKENS> struct NarrowFold {
    typedef Narrow<TOKENS> S;
    float acc[TOKENS / 2];
    float d[2][TOKENS / 2];
    u32 row;
    u32 j;
    u32 lane;
    u32 type;
    u32 log_wide;
    // The stage in shared memory, and its address there.
    const u8* mem;
    u32 at;

    // Group `i` of the stage, whose first is group `g`: weights of rows `row` and `row + 8`, and their scales and biases: low and high half of `v`.
    __device__ __forceinline__ void fragments(u32 g, u32 i, u32 (&a)[16], u32 (&v)[2]) const {
        const u32 of = ((g + i) >> log_wide) - (g >> log_wide & ~1u);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 r = row + 8 * h;
            const u8* scales = mem + S::SCALES_AT + r * 16 + of * 2;
            v[h] = *(const u16*)scales | (u32) * (const u16*)(scales + 8) << 16;
            unpack_int11(*(const uint2*)(mem + S::WEIGHTS_AT + r * S::PITCH + i * 32 + j * 8), a, h);
        }
    }

    template <u32 D> __device__ __forceinline__ void multiply(u32 i, const u32 (&a)[16]) {
        if constexpr (TOKENS == 64) {
            wgmma_begin(d[D], a, rows_of_128(at + i * TOKENS * 128));
        } else {
            const u32 t = lane % 8;
            u32 x[TOKENS / 8][8];
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) {
                const u8* tokens = mem + (i * TOKENS + 8 * n + t) * 128;
                ldmatrix_x4((u32(&)[4])x[n][0], tokens + 16 * (lane / 8 ^ t));
                ldmatrix_x4((u32(&)[4])x[n][4], tokens + 16 * (4 + lane / 8 ^ t));
#pragma unroll
                for (u32 k = 0; k < 4; k++) d[D][4 * n + k] = 0.0f;
            }
#pragma unroll
            for (u32 u = 0; u < 4; u++) {
#pragma unroll
                for (u32 n = 0; n < TOKENS / 8; n++) mma_f16((float(&)[4])d[D][4 * n], a + 4 * u, x[n][2 * u], x[n][2 * u + 1]);
            }
        }
    }

    // Waits for all sums but those of the last N groups.
    template <u32 D, int N> __device__ __forceinline__ void wait(const u32 (&a)[16]) {
        if constexpr (TOKENS == 64) {
            wgmma_wait<N>(d[D]);
            keep_until_here(a);
        }
    }

    template <u32 D> __device__ __forceinline__ void fold(u32 i, const u32 (&v)[2]) {
        const float s[2] = {half_value(v[0] & 0xffff, type), half_value(v[1] & 0xffff, type)}, b[2] = {half_value(v[0] >> 16, type), half_value(v[1] >> 16, type)};
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n += 2) {
            const float4 four = *(const float4*)(mem + S::SUMS_AT + (i * TOKENS + n * 8 + 4 * j) * 4);
            const float m[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 h = k / 2 % 2;
                float& c = acc[4 * n + k];
                c = fma(b[h], m[k / 4 * 2 + k % 2], fma(s[h], d[D][4 * n + k], c));
            }
        }
    }

    // A group with its weights in `a`; the next one of the stage is under way in the end, if there is one.
    template <u32 D, bool MORE> __device__ __forceinline__ void group(u32 g, u32 i, const u32 (&a)[16], const u32 (&v)[2], u32 (&next)[16], u32 (&next_v)[2]) {
        if (MORE) {
            fragments(g, i + 1, next, next_v);
            multiply<1 - D>(i + 1, next);
            wait<D, 1>(a);
        } else {
            wait<D, 0>(a);
        }
        fold<D>(i, v);
    }
};

// The tile that a warp is at. What tiles that follow one another have in common is read once.
template <u32 TOKENS, bool GROUPED> struct Place {
    const Matmul* product;
    Matrix matrix;
    const u32* order;
    u32 row;
    u32 token;
    u32 count;
    // Which tile of pairs, and which of the products.
    u32 pairs;
    u32 part;

    // Goes to a tile. Returns whether it has other tokens than the one before.
    __device__ __forceinline__ bool go(const Products& all, u32 products, u32 across, u32 of_rows, u32 tile) {
        if (!GROUPED) {
            product = &part_of<ROWS>(all, products, across, tile);
            matrix = product->matrix;
            row = tile / across * ROWS, token = tile % across * TOKENS, count = min(TOKENS, product->outputs - token);
            return true;
        }
        const bool others = tile / of_rows != pairs;
        pairs = tile / of_rows;
        tile %= of_rows;
        product = &part_of<ROWS>(all, products, 1, tile);
        row = tile * ROWS;
        const u32 now = product - all.parts;
        if (others || now != part) {
            const uint4 own = ((const uint4*)all.parts[0].tiles)[1 + pairs];
            matrix = product->table[own.x];
            order = product->order + own.y;
            count = own.z;
            part = now;
        }
        return others;
    }
};

template <u32 TOKENS, bool GROUPED, u32 KIND> __device__ __forceinline__ void gemm_narrow(const Products& all) {
    typedef Narrow<TOKENS> S;
    __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
    const Matmul& first = all.parts[0];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS;
    u32 count = 1, of_rows = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) of_rows += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rows of 128 bytes are swizzled by their addresses.
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(barriers), empty = full + 8 * MOST_STAGES;
    const u32 stages = min((dynamic_shared() - 1024) / S::STAGE, MOST_STAGES);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < stages; i++) {
            barrier_init(full + 8 * i, GROUPED ? 2 * WARP : WARP + 1);
            barrier_init(empty + 8 * i, MULTIPLYING);
        }
        barriers_are_made();
    }
    __syncthreads();
    if (GROUPED) begin();
    const u32 tiles = of_rows * (GROUPED ? first.tiles[0] : across);
    // A mixture's tiles are divided among blocks in their order.
    const u32 begin_at = GROUPED ? (u32)((u64)tiles * blockIdx.x / gridDim.x) : blockIdx.x, end_at = GROUPED ? (u32)((u64)tiles * (blockIdx.x + 1) / gridDim.x) : tiles;
    const u32 step = GROUPED ? 1 : gridDim.x;
    Place<TOKENS, GROUPED> of;
    of.pairs = of.part = ~0u;
    if (warp == MULTIPLYING) {
        // What a lane brings of a tile: sixteen bytes of each of these rows' weights, and scales and biases of rows `lane` and `lane + 32`.
        const u8 *rows[S::COPIES], *scales[2], *biases[2];
        const u32 in_row = lane % S::PIECES * 16, first_row = lane / S::PIECES;
        u32 log_wide = 0;
        bool aligned = true;
        auto find = [&]() {
            const Matrix& m = of.matrix;
            log_wide = m.group == 128;
            u64 own[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                // Beyond the last row, the last one again.
                const u64 r = of.product->in_matrix(min(of.row + lane + 32 * i, of.product->rows - 1));
                own[i] = r * m.row_bytes, scales[i] = m.scales + 2 * r * m.groups, biases[i] = m.biases + 2 * r * m.groups;
            }
#pragma unroll
            for (u32 i = 0; i < S::COPIES; i++) {
                const u32 r = first_row + i * (WARP / S::PIECES);
                rows[i] = m.data + in_row + __shfl_sync(ALL, own[i / (S::COPIES / 2)], r % WARP);
            }
            if (GROUPED) aligned = (((u64)m.data | m.row_bytes) & 15) == 0 && (((u64)m.scales | (u64)m.biases | 2 * m.groups) & (log_wide ? 3 : 7)) == 0;
        };
        auto bring_weights = [&](u32 g, u32 s) {
            u8 *to = mem + s * S::STAGE, *own = to + S::WEIGHTS_AT + first_row * S::PITCH + in_row, *of_rows = to + S::SCALES_AT + lane * 16;
            const u32 pair = g >> log_wide & ~1u, PITCH = WARP / S::PIECES * S::PITCH;
            if (aligned) {
#pragma unroll
                for (u32 i = 0; i < S::COPIES; i++) cp_async_16_stream(own + i * PITCH, rows[i] + (u64)g * 32);
            } else {
#pragma unroll
                for (u32 i = 0; i < S::COPIES; i++) copy_slowly(own + i * PITCH, rows[i] + (u64)g * 32, 8);
            }
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u8* of_row = of_rows + 32 * 16 * i;
                if (!aligned) {
                    copy_slowly(of_row, scales[i] + pair * 2, S::GROUPS >> log_wide);
                    copy_slowly(of_row + 8, biases[i] + pair * 2, S::GROUPS >> log_wide);
                } else if (S::GROUPS == 4 && !log_wide) {
                    cp_async_8(of_row, scales[i] + pair * 2);
                    cp_async_8(of_row + 8, biases[i] + pair * 2);
                } else {
                    cp_async_4(of_row, scales[i] + pair * 2);
                    cp_async_4(of_row + 8, biases[i] + pair * 2);
                }
            }
        };
        u32 s = 0, ph = 1, brought = 0;
        if (!GROUPED) {
            // Weights of the first stages, before what they meet is there.
            if (begin_at < end_at) {
                of.go(all, count, across, of_rows, begin_at);
                find();
                for (u32 g = 0; g < groups && brought < stages; g += S::GROUPS) bring_weights(g, brought++);
            }
            begin();
        }
#pragma unroll 1
        for (u32 tile = begin_at; tile < end_at; tile += step) {
            of.go(all, count, across, of_rows, tile);
            // An expert that is not on the device is skipped.
            if (GROUPED && of.matrix.kind != KIND) continue;
            find();
#pragma unroll 1
            for (u32 g = 0; g < groups; g += S::GROUPS) {
                if (brought == 0) {
                    barrier_wait(empty + 8 * s, ph);
                    bring_weights(g, s);
                } else {
                    brought--;
                }
                if (aligned) barrier_arrive_copied(full + 8 * s);
                else barrier_arrive(full + 8 * s);
                if (++s == stages) s = 0, ph ^= 1;
            }
        }
        cp_async_wait_all();
    } else if (warp > MULTIPLYING) {
        if (!GROUPED) begin();
        u32 s = 0, ph = 1, unannounced = 0, next = 0;
        // Copies of sixteen bytes are announced once they are there, behind a fence: wgmma would need it, mma does not.
        auto announce = [&]() {
            fence_async();
            barrier_arrive(full + 8 * next);
            if (++next == stages) next = 0;
            unannounced--;
        };
        // In a mixture: the tokens of the sixteen rows that eight lanes each bring, and of the row whose sums a lane brings.
        u64 tokens[4];
        u32 swizzled[4], own_place = 0;
#pragma unroll 1
        for (u32 tile = begin_at; tile < end_at; tile += step) {
            const bool others = of.go(all, count, across, of_rows, tile);
            if (GROUPED && others) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 k = lane / 8 + 4 * i, token = of.order[min(k, of.count - 1)] / of.product->per_row;
                    tokens[i] = int11_row(token, 0, groups) + lane % 8 * 16;
                    swizzled[i] = k * 128 + ((lane ^ token ^ k) & 7) * 16;
                }
                own_place = int11_place(of.order[min(lane % TOKENS, of.count - 1)] / of.product->per_row);
            }
            if (GROUPED && of.matrix.kind != KIND) continue;
            const u8* x = (const u8*)first.x.n + (GROUPED ? 0 : int11_row(of.token, 0, groups));
            const float* sums = first.x.sn + (GROUPED ? 0 : of.token);
#pragma unroll 1
            for (u32 g = 0; g < groups; g += S::GROUPS) {
                const u32 at = base + s * S::STAGE, f = full + 8 * s;
                u8* here = mem + s * S::STAGE;
                barrier_wait(empty + 8 * s, ph);
                if (GROUPED) {
#pragma unroll
                    for (u32 i = 0; i < S::GROUPS; i++) {
#pragma unroll
                        for (u32 k = 0; k < 4; k++) cp_async_16(here + i * TOKENS * 128 + swizzled[k], x + tokens[k] + (u64)(g + i) * TILE_BYTES);
                    }
#pragma unroll
                    for (u32 i = lane / TOKENS; i < S::GROUPS; i += WARP / TOKENS)
                        cp_async_4(here + S::SUMS_AT + (i * TOKENS + int11_place(lane % TOKENS)) * 4, sums + (u64)(g + i) * first.x.padded + own_place);
                    cp_async_commit();
                    if (++unannounced > AHEAD) {
                        cp_async_wait<AHEAD>();
                        announce();
                    }
                } else if (lane == 0) {
                    barrier_expect(f, S::GROUPS * TOKENS * (128 + 4));
#pragma unroll
                    for (u32 i = 0; i < S::GROUPS; i++) {
                        copy_bulk(at + i * TOKENS * 128, x + (u64)(g + i) * TILE_BYTES, TOKENS * 128, f);
                        copy_bulk(at + S::SUMS_AT + i * TOKENS * 4, sums + (u64)(g + i) * first.x.padded, TOKENS * 4, f);
                    }
                }
                if (++s == stages) s = 0, ph ^= 1;
            }
        }
        cp_async_wait_all();
        while (GROUPED && unannounced) announce();
    } else {
        if (!GROUPED) begin();
        NarrowFold<TOKENS> w;
        w.row = warp * 16 + lane / 4;
        w.j = lane % 4;
        w.lane = lane;
        u32 s = 0, ph = 0;
        u32 a0[16], a1[16], v0[2], v1[2];
        // In a mixture: where results of this thread's tokens go, and what they are multiplied with.
        u32 outputs[GROUPED ? TOKENS / 4 : 1];
        float powers[GROUPED ? TOKENS / 4 : 1];
#pragma unroll 1
        for (u32 tile = begin_at; tile < end_at; tile += step) {
            const bool others = of.go(all, count, across, of_rows, tile);
            if (GROUPED && others) {
#pragma unroll
                for (u32 n = 0; n < TOKENS / 4; n++) {
                    outputs[n] = of.order[min(n / 2 * 8 + 2 * w.j + n % 2, of.count - 1)];
                    powers[n] = first.x.tn[outputs[n] / of.product->per_row];
                }
            }
            if (GROUPED && of.matrix.kind != KIND) continue;
            w.type = of.matrix.type;
            w.log_wide = of.matrix.group == 128;
#pragma unroll
            for (u32 i = 0; i < TOKENS / 2; i++) w.acc[i] = 0.0f;
            // Nothing is under way from one turn of the loop to the next: the compiler would put wgmmas one after the other.
#pragma unroll 1
            for (u32 g = 0; g < groups; g += S::GROUPS) {
                w.mem = mem + s * S::STAGE;
                w.at = base + s * S::STAGE;
                barrier_wait(full + 8 * s, ph);
                w.fragments(g, 0, a0, v0);
                w.template multiply<0>(0, a0);
                w.template group<0, true>(g, 0, a0, v0, a1, v1);
                if (S::GROUPS == 4) {
                    w.template group<1, true>(g, 1, a1, v1, a0, v0);
                    w.template group<0, true>(g, 2, a0, v0, a1, v1);
                }
                w.template group<1, false>(g, S::GROUPS - 1, a1, v1, a0, v0);
                // Bulk copies may overtake reads that are still under way.
                fence_async();
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * s);
                if (++s == stages) s = 0, ph ^= 1;
            }
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 t = n * 8 + 2 * w.j + i % 2, r = of.row + w.row + i / 2 * 8;
                    if (t >= of.count || r >= of.product->rows) continue;
                    if (GROUPED) put(*of.product, outputs[2 * n + i % 2], r, mul(w.acc[4 * n + i], powers[2 * n + i % 2]));
                    else put(*of.product, of.token + t, r, mul(w.acc[4 * n + i], first.x.tn[of.token + t]));
                }
        }
    }
}
#endif

#define GEMM_NARROW_OF(name, F, tokens) \
    extern "C" __global__ void __launch_bounds__(NARROW_THREADS, 2) gemm_narrow_##name##_##tokens(const __grid_constant__ Products p) { ON_HOPPER(gemm_narrow<tokens, false, KIND_OF<F>>(p);) }
#define GEMM_NARROW(name, F) \
    GEMM_NARROW_OF(name, F, 16) GEMM_NARROW_OF(name, F, 32) GEMM_NARROW_OF(name, F, 64) \
    extern "C" __global__ void __launch_bounds__(NARROW_THREADS, 2) gemm_narrow_##name##_16_grouped(const __grid_constant__ Products p) { ON_HOPPER(gemm_narrow<16, true, KIND_OF<F>>(p);) }

INT11_TENSOR_FORMATS(GEMM_NARROW)
