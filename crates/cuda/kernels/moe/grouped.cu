// Products of a mixture's experts that have a few tokens each, or of one matrix of many rows, on integer tensor cores: a warp takes sixteen rows and up to
// TOGETHER tokens, all four chains of them, so that they meet in registers. Groups of 64, scales of sixteen bits. Weights come to a ring of each warp's own,
// which waits for nobody else. Rows of all experts are dealt out to as many blocks as the device holds at once, evenly, and their weights come without a pause
// from set of rows to set.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"

struct GroupedGemm {
    // [experts]: matrices, or with `up` those of gate and up for `silu(gate) * up`. Null: one matrix for all tokens.
    const Matrix* table;
    const Matrix* up;
    // As in `Pairs`, with TOGETHER pairs a tile at most.
    const u32* tiles;
    const u32* order;
    Encoded x;
    // [pairs, rows]: the result, quantized with `up`, else in `out`.
    Encoded hidden;
    Tensor out;
    // Pairs of each row of x.
    u32 per_row;
    u32 rows;
    u32 cols;
    u32 type;
    // The most tiles, and how many experts there are.
    u32 most_tiles;
    u32 experts;
    // Without experts: the matrix, and tokens, TOGETHER a tile.
    Matrix matrix;
    u32 tokens;
    u32 unused;
};

static const u32 FEW_THREADS = 128, TOGETHER = 8;

// What a warp brings at once: four groups of its sixteen rows, one of each chain, and of each row their scales and their biases. Rows of 4 bits lie with their pieces of sixteen
// bytes in another order in each, so that what a warp reads together meets different banks.
template <class F> struct GroupedStep {
    static const u32 ROWS = 16, ROW = 32 * F::BITS, STRIDE = F::BITS == 4 ? ROW : ROW + 16, SCALES_AT = ROWS * STRIDE, BYTES = SCALES_AT + 16 * ROWS, DEEP = F::BITS <= 4 ? 3 : 2;
};

// A set of rows is what a block takes together: 64 of them; with GATED, 32 of gate and the same 32 of up. Without, it follows the one with GATED of the same experts, which has
// waited for who made the tiles, or there are none: its first weights are on their way before the kernel before it has ended.
template <class F, bool GATED> __device__ __forceinline__ void grouped_gemm(const GroupedGemm& p) {
    typedef GroupedStep<F> Step;
    __shared__ u32 outputs[TOGETHER];
    // The first tiles are copied to shared memory once.
    __shared__ uint4 near[FEW_THREADS];
    // Gate and up of each token, for two sets in turn.
    __shared__ float both[GATED ? 2 : 1][TOGETHER][2 * WARP + 4];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane / 4, part = lane % 4, groups = p.cols / 64, steps = (groups + 3) / 4;
    const u32 of_set = GATED ? 32 : 64, first_row = (GATED ? warp % 2 : warp) * Step::ROWS, sets = (p.rows + of_set - 1) / of_set;
    const u64 row_bytes = groups * (8 * F::BITS);
    // Shared memory: a ring for each warp; activations, so that neighbours among the tokens meet different banks; of each group the tokens' scales, and their means.
    const u32 RING = Step::DEEP * Step::BYTES, Q = FEW_THREADS / WARP * RING, stride = (p.cols + 127) / 128 * 128 + 32;
    u8* const memory = (u8*)smem;
    const u32 sx = Q + TOGETHER * stride, means = sx + 8 * TOGETHER * groups;
    // Where a lane begins in these: what it brings of a step, and its scales behind that; what it multiplies of a step, from the second group on, and the scales of its rows; its
    // tokens' activations and scales. Kept, since the compiler does again at each step what is plain arithmetic.
    const u32 ring = warp * RING, rows_at = F::BITS == 4 ? lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16 : quad * Step::STRIDE;
    u32 own_to = ring + (F::BITS == 4 ? lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16 : 0), own_scales_to = ring + Step::SCALES_AT + lane * 8 - own_to, odd_to = (own_to ^ 64) - own_to;
    u32 own_rows = ring + rows_at, own_scales = ring + Step::SCALES_AT + quad * 8 - own_rows;
    u32 further[4] = {0, (rows_at ^ 32) - rows_at, (rows_at ^ 64) - rows_at, (rows_at ^ 96) - rows_at};
    u32 own_q = Q + quad * stride + part * 8, own_sx = sx + part * 16, own_means = means + part * 8, four_rows = 4 * (u32)row_bytes;
    u32* const kept[] = {&own_to, &own_scales_to, &odd_to, &own_rows, &own_scales, &further[1], &further[2], &further[3], &own_q, &own_sx, &own_means, &four_rows};
#pragma unroll
    for (u32 i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) *kept[i] = __shfl_sync(ALL, *kept[i], lane);
    const Matrix* const table = GATED && warp / 2 ? p.up : p.table;
    if (GATED) {
        // Their matrices are in the second-level cache once the tiles are known.
        const u32 LINE = 128, lines = (p.experts * (u32)sizeof(Matrix) + LINE - 1) / LINE;
        for (u32 i = threadIdx.x; blockIdx.x == 0 && i < 2 * lines; i += FEW_THREADS) prefetch((const u8*)(i < lines ? p.table : p.up) + i % lines * LINE);
        begin();
    }
    bool begun = GATED;
    if (threadIdx.x < p.most_tiles) near[threadIdx.x] = ((const uint4*)p.tiles)[1 + threadIdx.x];
    // Tiles of one matrix are taken side by side, so that what several read comes from memory once.
    const u32 aside = p.table ? 1 : (p.tokens + TOGETHER - 1) / TOGETHER, tasks = (p.table ? p.tiles[0] : 1) * sets, blocks = (gridDim.x - blockIdx.x % aside + aside - 1) / aside;
    const u32 before = blockIdx.x % aside * sets, end = before + (u32)((u64)(blockIdx.x / aside + 1) * tasks / blocks);
    u32 task = before + (u32)((u64)(blockIdx.x / aside) * tasks / blocks), turn = 0;
    __syncthreads();
#pragma unroll 1
    while (task < end) {
        // A tile's rows, as far as they are this block's.
        const u32 tile = task / sets, first_set = task - tile * sets, count = min(end - task, sets - first_set);
        task += count;
        uint4 of = make_uint4(0, tile * TOGETHER, min(TOGETHER, p.tokens - tile * TOGETHER), 0);
        if (p.table) of = tile < FEW_THREADS ? near[tile] : ((const uint4*)p.tiles)[1 + tile];
        const u32 n = of.z;
        // Skips an expert that is not on the device.
        const u32 KIND = KIND_OF<F>;
        if (p.table && p.table[of.x].kind != KIND || GATED && p.up[of.x].kind != KIND) continue;
        const Matrix& m = p.table ? table[of.x] : p.matrix;
        const u8 *data = m.data, *scales = m.scales, *biases = m.biases;
        const bool regular = groups % 4 == 0 && p.rows % of_set == 0 && (((u64)data | (u64)scales | (u64)biases) & 15) == 0;
        // 1. The first weights, and activations
        const u32 all = count * steps;
        u32 to_bring = all, next_row = first_set * of_set + first_row, next_step = 0, to = 0;
        const u8* from = data + (u64)(next_row + lane / 8) * row_bytes + lane % 8 * 16;
        const u8* of_row = (lane < 16 ? scales : biases) + (u64)(next_row + lane % 16) * groups * 2;
        auto bring = [&]() {
            u8* const at = memory + own_to + to;
            to = to == RING - Step::BYTES ? 0 : to + Step::BYTES;
            if (to_bring > 0 && regular) {
                if (F::BITS == 4) {
#pragma unroll
                    for (u32 k = 0; k < 4; k++) cp_async_16_stream(at + (k % 2 ? (int)odd_to : 0) + k * 512, from + (u64)four_rows * k);
                    from += Step::ROW;
                } else {
#pragma unroll
                    for (u32 k = 0; k < F::BITS; k++) {
                        const u32 i = lane + k * WARP, r = i / (2 * F::BITS), piece = i % (2 * F::BITS);
                        cp_async_16(at + r * Step::STRIDE + piece * 16, data + (next_row + r) * row_bytes + next_step * Step::ROW + piece * 16);
                    }
                }
                cp_async_8(at + (int)own_scales_to, of_row);
                of_row += 8;
            } else if (to_bring > 0) {
                u8* const first = at - own_to + ring;
                const u32 here = min(groups - next_step * 4, 4u);
                for (u32 i = lane; i < 16 * 8 * F::BITS; i += WARP) {
                    const u32 r = i / (8 * F::BITS), word = i % (8 * F::BITS);
                    const u32 place = F::BITS == 4 ? r * 128 + (word / 4 ^ r % 8) * 16 + word % 4 * 4 : r * Step::STRIDE + word * 4;
                    if (word < here * 2 * F::BITS) cp_async_4(first + place, data + min(next_row + r, p.rows - 1) * row_bytes + next_step * Step::ROW + word * 4);
                }
                const u16* one = (const u16*)(lane < 16 ? scales : biases) + (u64)min(next_row + lane % 16, p.rows - 1) * groups + next_step * 4;
                for (u32 g = 0; g < here; g++) ((u16*)(first + Step::SCALES_AT + lane * 8))[g] = one[g];
            }
            cp_async_commit();
            if (to_bring > 0) to_bring--;
            if (++next_step < steps) return;
            next_step = 0, next_row += of_set;
            from += of_set * row_bytes - row_bytes;
            of_row += (of_set - 1) * groups * 2;
        };
        __syncwarp();
#pragma unroll 1
        for (u32 d = 0; d + 1 < Step::DEEP; d++) bring();
        __syncthreads();
        if (threadIdx.x < n) outputs[threadIdx.x] = p.table ? p.order[of.y + threadIdx.x] : of.y + threadIdx.x;
        if (!begun) begin();
        begun = true;
        __syncthreads();
#pragma unroll 1
        for (u32 t = warp; t < n; t += FEW_THREADS / WARP) {
            const u64 input = outputs[t] / p.per_row;
            const uint4* x = (const uint4*)(p.x.q + input * p.cols);
#pragma unroll 1
            for (u32 i = lane; i < p.cols / 16; i += WARP) cp_async_16(memory + Q + t * stride + 16 * i, x + i);
#pragma unroll 1
            for (u32 i = lane; i < groups; i += WARP) {
                const float2 mean = __ldcg((const float2*)(p.x.mx + input * (p.cols / 32)) + i);
                ((float2*)(memory + sx))[i * TOGETHER + t] = __ldcg((const float2*)(p.x.sx + input * (p.cols / 32)) + i);
                ((float*)(memory + means))[i * TOGETHER + t] = add(mean.x, mean.y);
            }
        }
        cp_async_wait_all();
        __syncthreads();
        // 2. Chains: of the rows `quad` and 8 + `quad`, of the tokens 2 `part` and 2 `part` + 1
        float acc[4][4];
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i / 4][i % 4] = 0.0f;
        u32 step = 0, slot = 0, set = first_set;
#pragma unroll 1
        for (u32 i = 0; i < all; i++) {
            cp_async_wait<Step::DEEP - 2>();
            // All lanes of the warp have read what the next copies overwrite.
            __syncwarp();
            bring();
            const u8 *const here = memory + own_rows + slot, *const x = memory + own_q + step * 256;
            const u8 *const of_tokens = memory + own_sx + step * (4 * 8 * TOGETHER), *const mean_of_tokens = memory + own_means + step * (4 * 4 * TOGETHER);
            slot = slot == RING - Step::BYTES ? 0 : slot + Step::BYTES;
            // Scale and bias of each row, in four groups.
            float of_group[4][2][2];
            uint2 raw[2][2];
#pragma unroll
            for (u32 i = 0; i < 4; i++) raw[i / 2][i % 2] = *(const uint2*)(here + (int)own_scales + (i % 2 * 16 + i / 2 * 8) * 8);
            if (p.type == BF16) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const uint2 of = raw[i / 2][i % 2];
                    of_group[0][i / 2][i % 2] = bits(of.x << 16), of_group[1][i / 2][i % 2] = bits(of.x & 0xffff0000u);
                    of_group[2][i / 2][i % 2] = bits(of.y << 16), of_group[3][i / 2][i % 2] = bits(of.y & 0xffff0000u);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const uint2 of = raw[i / 2][i % 2];
                    of_group[0][i / 2][i % 2] = from_f16((u16)of.x), of_group[1][i / 2][i % 2] = from_f16((u16)(of.x >> 16));
                    of_group[2][i / 2][i % 2] = from_f16((u16)of.y), of_group[3][i / 2][i % 2] = from_f16((u16)(of.y >> 16));
                }
            }
            auto multiply = [&](u32 g, u32 (&sums)[2][4]) {
                u32 a[2][4];
                if (F::BITS == 4) {
                    u32 words[4];
                    ldmatrix_x4(words, here + (int)further[g]);
                    F::unpack_matrix(words, a);
                } else {
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
#pragma unroll
                        for (u32 r = 0; r < 2; r++) F::unpack_lane(here + 8 * r * Step::STRIDE + (2 * g + half) * 4 * F::BITS, part, a[half][r], a[half][2 + r]);
                    }
                }
                const uint2 low = *(const uint2*)(x + 64 * g), high = *(const uint2*)(x + 64 * g + 32);
                mma_u8_i8(sums[0], a[0], low.x, low.y);
                mma_u8_i8(sums[1], a[1], high.x, high.y);
            };
            auto add_group = [&](u32 g, const u32 (&sums)[2][4]) {
                const float4 scales = *(const float4*)(of_tokens + g * (8 * TOGETHER));
                const float2 mean = *(const float2*)(mean_of_tokens + g * (4 * TOGETHER));
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    float t = mul(e % 2 ? scales.z : scales.x, sub(bits(sums[0][e]), MAGIC_FLOAT));
                    t = fma(e % 2 ? scales.w : scales.y, sub(bits(sums[1][e]), MAGIC_FLOAT), t);
                    acc[g][e] = fma(of_group[g][e / 2][1], e % 2 ? mean.y : mean.x, fma(of_group[g][e / 2][0], t, acc[g][e]));
                }
            };
            // Products of a group are under way while the sums of the one before are added.
            const u32 left = groups - step * 4;
            u32 sums[2][2][4];
            if (left >= 4) {
                multiply(0, sums[0]);
#pragma unroll
                for (u32 g = 0; g < 4; g++) {
                    if (g + 1 < 4) multiply(g + 1, sums[(g + 1) % 2]);
                    add_group(g, sums[g % 2]);
                }
            } else {
#pragma unroll
                for (u32 g = 0; g < 3; g++) {
                    if (g >= left) break;
                    multiply(g, sums[0]);
                    add_group(g, sums[0]);
                }
            }
            if (++step < steps) continue;
            // 3. Results of a set
            step = 0;
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const float y = add(add(acc[0][e], acc[2][e]), add(acc[1][e], acc[3][e]));
                acc[0][e] = acc[1][e] = acc[2][e] = acc[3][e] = 0.0f;
                const u32 t = 2 * part + e % 2, r = first_row + quad + e / 2 * 8, row = set * of_set + r;
                if (GATED) both[turn][t][warp / 2 * WARP + r] = y;
                else if (t < n && row < p.rows) p.out.row(outputs[t])[row] = y;
            }
            if (GATED) {
                __syncthreads();
#pragma unroll 1
                for (u32 t = warp; t < n; t += FEW_THREADS / WARP)
                    quantize_lanes(mul(silu(both[turn][t][lane]), both[turn][t][WARP + lane]), (u64)outputs[t] * p.rows + set * of_set, p.hidden);
                turn ^= 1;
            }
            set++;
        }
    }
    if (!begun) begin();
}

#define GROUPED_GEMM(name, F) \
    extern "C" __global__ void __launch_bounds__(128, 4) grouped_gemm_##name(const __grid_constant__ GroupedGemm p) { ON_TENSOR_CORES(grouped_gemm<F, false>(p);) } \
    extern "C" __global__ void __launch_bounds__(128, 4) grouped_gemm_##name##_gated(const __grid_constant__ GroupedGemm p) { ON_TENSOR_CORES(grouped_gemm<F, true>(p);) }

INT8_FORMATS(GROUPED_GEMM)
