// Products of a mixture's experts that have a few tokens each, on integer tensor cores: a warp takes sixteen rows and up to TOGETHER tokens, all four chains of them, so that they
// meet in registers. Groups of 64, scales of sixteen bits. Weights come to a ring of each warp's own, which waits for nobody else. Rows of all experts are dealt out to as many
// blocks as the device holds at once, evenly, and their weights come without a pause from set of rows to set.
#pragma once
#include "encode.cu"
#include "rows_one.cu"
#include "tiles.cu"

struct ExpertsFew {
    // Of each expert: the matrix; and where what it gives is put through `silu(gate) * up`, that of up.
    const Matrix* table;
    const Matrix* up;
    // As in `Pairs`, with TOGETHER pairs a tile at most.
    const u32* tiles;
    const u32* order;
    Encoded x;
    // [pairs, rows]: what is hidden, in integers, where there is an `up`; else `out`.
    Encoded hidden;
    Tensor out;
    // Pairs of each row of x.
    u32 per_row;
    u32 rows;
    u32 cols;
    u32 type;
};

static const u32 FEW_THREADS = 128, TOGETHER = 8;

// What a warp brings at once: four groups of its sixteen rows, one of each chain, and of each row their scales and their biases. Rows of 4 bits lie with their pieces of sixteen
// bytes in another order in each, so that what a warp reads together meets different banks.
template <int BITS> struct FewStep {
    static const u32 ROWS = 16, ROW = 32 * BITS, STRIDE = BITS == 4 ? ROW : ROW + 16, SCALES_AT = ROWS * STRIDE, BYTES = SCALES_AT + 16 * ROWS, DEEP = BITS <= 4 ? 3 : 2;
};

// A set of rows is what a block takes together: 64 of them; with GATED, 32 of gate and the same 32 of up.
template <int BITS, bool GATED> __device__ __forceinline__ void experts_few(const ExpertsFew& p) {
    typedef FewStep<BITS> Step;
    __shared__ u32 outputs[TOGETHER];
    // Of two sets one behind the other: of each token gate and up.
    __shared__ float both[GATED ? 2 : 1][TOGETHER][2 * WARP + 4];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane / 4, part = lane % 4, groups = p.cols / 64, steps = (groups + 3) / 4;
    const u32 of_set = GATED ? 32 : 64, first_row = (GATED ? warp % 2 : warp) * Step::ROWS, sets = (p.rows + of_set - 1) / of_set;
    const u64 row_bytes = groups * (8 * BITS);
    // Activations: neighbours among the tokens meet different banks; of each group the tokens' scales, and their means.
    const u32 stride = (p.cols + 127) / 128 * 128 + 32;
    u8* const q = (u8*)room;
    float2* const sx = (float2*)(q + TOGETHER * stride);
    float* const means = (float*)(sx + groups * TOGETHER);
    u8* const ring = (u8*)(means + groups * TOGETHER) + warp * Step::DEEP * Step::BYTES;
    const Matrix* const table = GATED && warp / 2 ? p.up : p.table;
    begin();
    const u32 tasks = p.tiles[0] * sets, end = (u32)((u64)(blockIdx.x + 1) * tasks / gridDim.x);
    u32 task = (u32)((u64)blockIdx.x * tasks / gridDim.x), turn = 0;
#pragma unroll 1
    while (task < end) {
        // A tile's rows, as far as they are this block's.
        const u32 tile = task / sets, first_set = task - tile * sets, count = min(end - task, sets - first_set);
        task += count;
        const uint4 of = ((const uint4*)p.tiles)[1 + tile];
        const u32 n = of.z;
        // Of an expert that is not there.
        const u32 KIND = INTEGERS + (BITS == 8 ? 5 : BITS - 2);
        if (p.table[of.x].kind != KIND || GATED && p.up[of.x].kind != KIND) continue;
        const u8 *data = table[of.x].data, *scales = table[of.x].scales, *biases = table[of.x].biases;
        const bool regular = groups % 4 == 0 && p.rows % of_set == 0 && (((u64)data | (u64)scales | (u64)biases) & 15) == 0;
        // 1. The first weights, and activations
        const u32 all = count * steps;
        u32 brought = 0, next_row = first_set * of_set + first_row, next_step = 0, to = 0;
        const u8* from = data + (u64)(next_row + lane / 8) * row_bytes + lane % 8 * 16;
        const u8* of_row = (lane < 16 ? scales : biases) + (u64)(next_row + lane % 16) * groups * 2;
        auto bring = [&]() {
            u8* const at = ring + to * Step::BYTES;
            if (++to == Step::DEEP) to = 0;
            if (brought < all && regular) {
                if (BITS == 4) {
                    const u32 own = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
#pragma unroll
                    for (u32 k = 0; k < 4; k++) copy_words_later(at + (own ^ k % 2 * 64) + k * 512, from + k * 4 * row_bytes);
                    from += Step::ROW;
                } else {
#pragma unroll
                    for (u32 k = 0; k < BITS; k++) {
                        const u32 i = lane + k * WARP, r = i / (2 * BITS), piece = i % (2 * BITS);
                        copy_words_later(at + r * Step::STRIDE + piece * 16, data + (next_row + r) * row_bytes + next_step * Step::ROW + piece * 16);
                    }
                }
                copy_two_words_later(at + Step::SCALES_AT + lane * 8, of_row + next_step * 8);
            } else if (brought < all) {
                const u32 here = min(groups - next_step * 4, 4u);
                for (u32 i = lane; i < 16 * 8 * BITS; i += WARP) {
                    const u32 r = i / (8 * BITS), word = i % (8 * BITS);
                    const u32 place = BITS == 4 ? r * 128 + (word / 4 ^ r % 8) * 16 + word % 4 * 4 : r * Step::STRIDE + word * 4;
                    if (word < here * 2 * BITS) copy_word_later(at + place, data + min(next_row + r, p.rows - 1) * row_bytes + next_step * Step::ROW + word * 4);
                }
                const u16* one = (const u16*)(lane < 16 ? scales : biases) + (u64)min(next_row + lane % 16, p.rows - 1) * groups + next_step * 4;
                for (u32 g = 0; g < here; g++) ((u16*)(at + Step::SCALES_AT + lane * 8))[g] = one[g];
            }
            copies_end();
            brought++;
            if (++next_step < steps) return;
            next_step = 0, next_row += of_set;
            from += of_set * row_bytes - row_bytes;
            of_row += of_set * groups * 2;
        };
        __syncwarp();
#pragma unroll 1
        for (u32 d = 0; d + 1 < Step::DEEP; d++) bring();
        __syncthreads();
        if (threadIdx.x < n) outputs[threadIdx.x] = p.order[of.y + threadIdx.x];
        __syncthreads();
#pragma unroll 1
        for (u32 t = warp; t < n; t += FEW_THREADS / WARP) {
            const u64 input = outputs[t] / p.per_row;
            const uint4* x = (const uint4*)(p.x.q + input * p.cols);
#pragma unroll 1
            for (u32 i = lane; i < p.cols / 16; i += WARP) copy_later(q + t * stride + 16 * i, x + i);
#pragma unroll 1
            for (u32 i = lane; i < groups; i += WARP) {
                const float2 mean = __ldcg((const float2*)(p.x.mx + input * (p.cols / 32)) + i);
                sx[i * TOGETHER + t] = __ldcg((const float2*)(p.x.sx + input * (p.cols / 32)) + i);
                means[i * TOGETHER + t] = add(mean.x, mean.y);
            }
        }
        copied();
        __syncthreads();
        // 2. Chains: of the rows `quad` and 8 + `quad`, of the tokens 2 `part` and 2 `part` + 1
        float acc[4][4];
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i / 4][i % 4] = 0.0f;
        u32 step = 0, slot = 0, set = first_set;
#pragma unroll 1
        for (u32 i = 0; i < all; i++) {
            copied_but<Step::DEEP - 2>();
            // All of the warp have read what the next copies write over.
            __syncwarp();
            bring();
            const u8* const here = ring + slot * Step::BYTES;
            if (++slot == Step::DEEP) slot = 0;
            // Of four groups, of each row its scale and its bias.
            float of_group[4][2][2];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const uint2 raw = ((const uint2*)(here + Step::SCALES_AT))[i % 2 * 16 + quad + i / 2 * 8];
                if (p.type == BF16) {
                    of_group[0][i / 2][i % 2] = bits(raw.x << 16), of_group[1][i / 2][i % 2] = bits(raw.x & 0xffff0000u);
                    of_group[2][i / 2][i % 2] = bits(raw.y << 16), of_group[3][i / 2][i % 2] = bits(raw.y & 0xffff0000u);
                } else {
                    of_group[0][i / 2][i % 2] = from_f16((u16)raw.x), of_group[1][i / 2][i % 2] = from_f16((u16)(raw.x >> 16));
                    of_group[2][i / 2][i % 2] = from_f16((u16)raw.y), of_group[3][i / 2][i % 2] = from_f16((u16)(raw.y >> 16));
                }
            }
            auto add_group = [&](u32 g) {
                const u32 group = step * 4 + g;
                u32 a[2][4];
                if (BITS == 4) {
                    u32 words[4];
                    load_rows(words, here + ((lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16) ^ g * 32));
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
#pragma unroll
                        for (u32 r = 0; r < 2; r++) {
                            a[half][r] = words[2 * half + r] & 0x0f0f0f0fu;
                            a[half][2 + r] = words[2 * half + r] >> 4 & 0x0f0f0f0fu;
                        }
                    }
                } else {
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
#pragma unroll
                        for (u32 r = 0; r < 2; r++) eight<BITS>(here + (quad + 8 * r) * Step::STRIDE + (2 * g + half) * 4 * BITS, part, a[half][r], a[half][2 + r]);
                    }
                }
                const uint2* x = (const uint2*)(q + quad * stride + 64 * group) + part;
                const uint2 low = x[0], high = x[4];
                u32 sums[2][4];
                multiply_tile(sums[0], a[0], low.x, low.y);
                multiply_tile(sums[1], a[1], high.x, high.y);
                const float4 of_tokens = *(const float4*)(sx + group * TOGETHER + 2 * part);
                const float2 mean = *(const float2*)(means + group * TOGETHER + 2 * part);
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    float t = mul(e % 2 ? of_tokens.z : of_tokens.x, sub(bits(sums[0][e]), MAGIC_FLOAT));
                    t = fma(e % 2 ? of_tokens.w : of_tokens.y, sub(bits(sums[1][e]), MAGIC_FLOAT), t);
                    acc[g][e] = fma(of_group[g][e / 2][1], e % 2 ? mean.y : mean.x, fma(of_group[g][e / 2][0], t, acc[g][e]));
                }
            };
            if (step * 4 + 4 <= groups) {
#pragma unroll
                for (u32 g = 0; g < 4; g++) add_group(g);
            } else {
#pragma unroll
                for (u32 g = 0; g < 3; g++) {
                    if (step * 4 + g < groups) add_group(g);
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
                    encode_lanes(mul(silu(both[turn][t][lane]), both[turn][t][WARP + lane]), (u64)outputs[t] * p.rows + set * of_set, p.hidden);
                turn ^= 1;
            }
            set++;
        }
    }
}

#define FEW(bits)                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 5) few_##bits(const __grid_constant__ ExpertsFew p) { experts_few<bits, false>(p); }         \
    extern "C" __global__ void __launch_bounds__(128, 5) few_gated_##bits(const __grid_constant__ ExpertsFew p) { experts_few<bits, true>(p); }


FEW(2)
FEW(3)
FEW(4)
FEW(5)
FEW(6)
FEW(8)
