// Products of integer groups for several tokens, on integer tensor cores: a block has 64 tokens, or 16 where there are few, and bands of 32 rows; a warp has
// one of the four chains of a band. The integer sum of each group of activations is a product of its own (m16n8k32), exact in any order; what follows it is the
// sequence of fmas that docs/numerics.md gives.
//
// Columns inside a group meet in the order in which they are packed: a lane of a row takes eight neighbouring ones, even columns before odd ones, which is how
// activations lie.
//
// `MmaStage` (gemm/mma_stage.cuh) says what is brought at once and how it lies; `gemm_mma` in its order: who brings what (1), the first rows of one matrix,
// before the kernel before this one has ended (2), sums, with copies some stages and scales as floats one stage ahead of them (3), and the meeting of the four
// chains (4).
#pragma once
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "gemm/mma_stage.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

template <class F, int OF, int EIGHTS, int BANDS, int ALL> __device__ __forceinline__ void gemm_mma(const Matmul& p) {
    typedef MmaStage<F, OF, EIGHTS, BANDS, ALL> G;
    u8 *memory = (u8*)smem, *raw = memory + G::STAGES * G::TILE, *floats = raw + G::STAGES * G::RAW;
    const u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const u32 parts = p.cols / 32, groups = parts / OF, stages = (groups + 3) / 4, first_row = blockIdx.x * G::ROWS;
    // Output rows of a tile, and their rows of x; what is not there is the last.
    __shared__ u32 outputs[G::TOKENS], inputs[G::TOKENS];
    if (first_row >= p.rows) {
        begin();
        return;
    }

    // 1. What is brought: rows that are not there are the last. Where all of it lies in whole sixteens of bytes, each thread has places of its own in every stage, and
    // keeps them; else it goes slowly.
    // Who brings which stage, and a thread's place among those who do.
    const u32 place = thread % G::BRINGERS, turn = G::TURNS == 1 ? 0 : thread / G::BRINGERS;
    auto has_turn = [&](u32 stage) { return G::TURNS == 1 || stage % G::TURNS == turn; };
    u32* kept = (u32*)(memory + G::KEPT_AT) + 4 * place;
    // The same for all threads.
    const u8** data = (const u8**)(memory + G::KEPT_AT + G::KEPT);
    u32 near[G::WORDS];
    auto keep = [&](u32 word, u32 what) {
        if (G::KEPT) kept[word / 4 * 4 * G::BRINGERS + word % 4] = what;
        else near[word] = what;
    };
    // Words from a multiple of four on.
    auto find_kept = [&](u32 first, u32 count, u32* to) {
#pragma unroll
        for (u32 i = 0; i < count; i += 4) {
            uint4 v;
            if (G::KEPT) {
                v = *(const uint4*)(kept + (first + i) * G::BRINGERS);
            } else {
                v.x = near[first + i];
                v.y = i + 1 < count ? near[first + i + 1] : 0;
                v.z = i + 2 < count ? near[first + i + 2] : 0;
                v.w = i + 3 < count ? near[first + i + 3] : 0;
            }
            to[i] = v.x;
            if (i + 1 < count) to[i + 1] = v.y;
            if (i + 2 < count) to[i + 2] = v.z;
            if (i + 3 < count) to[i + 3] = v.w;
        }
    };
    auto found = [&](u32 word) { return G::KEPT ? kept[word / 4 * 4 * G::BRINGERS + word % 4] : near[word]; };
    // An even word and the one behind it.
    auto found_address = [&](u32 word) -> const u8* {
        uint2 v;
        if (G::KEPT) v = *(const uint2*)(kept + word / 4 * 4 * G::BRINGERS + word % 4);
        else v = make_uint2(near[word], near[word + 1]);
        return (const u8*)((u64)v.y << 32 | v.x);
    };
    const bool has_scales = G::TURNS != 1 || thread < G::S_THREADS, has_sums = G::TURNS != 1 || !has_scales;
    const u32 x_place = place - G::X_FROM;
    Matrix m = p.matrix;
    bool regular = false;
    // Bytes of four scales.
    u32 step = 0;
    auto find_weights = [&]() {
        step = m.type == F32 ? 16 : 8;
        // All stages are whole.
        regular = parts % 4 == 0 && groups % 4 == 0 && (((u64)m.data | (u64)m.scales | (u64)m.biases) & 15) == 0 &&
                  ((p.in_matrix(p.rows - 1) + 1) * m.row_bytes | (u64)p.outputs * p.cols) >> 32 == 0;
        // Each chain finds a part of the words that all of them take.
#pragma unroll
        for (u32 k = 0; k < G::A_COPIES; k++) {
            if (!has_turn(k)) continue;
            u32 i = place + k * G::BRINGERS;
            u64 row = p.in_matrix(min(first_row + i / G::PIECES % G::ROWS, p.rows - 1));
            keep(k, (u32)(row * m.row_bytes) + i % G::PIECES * 16);
        }
        if (has_scales) {
#pragma unroll
            for (u32 k = 0; k < G::S_COPIES; k++) {
                if (!has_turn(k)) continue;
                u32 i = place + k * G::S_THREADS;
                u64 row = p.in_matrix(min(first_row + i % G::ROWS, p.rows - 1));
                u64 from = (u64)(i < G::ROWS ? m.scales : m.biases) + row * (groups / 4) * step;
                keep(G::KEPT_S + 2 * k, (u32)from), keep(G::KEPT_S + 2 * k + 1, (u32)(from >> 32));
            }
        }
        if (thread == 0) *data = m.data;
    };
    auto find_inputs = [&]() {
#pragma unroll
        for (u32 k = 0; k < G::B_COPIES; k++) {
            if (!has_turn(k)) continue;
            u32 i = place + k * G::BRINGERS;
            keep(G::KEPT_B + k, inputs[i / (2 * G::PARTS) % G::TOKENS] * p.cols + i % (2 * G::PARTS) * 16);
        }
        if (!has_sums) return;
#pragma unroll
        for (u32 k = 0; k < G::X_COPIES; k++) {
            if (!has_turn(k)) continue;
            u32 i = x_place + k * G::X_THREADS;
            u64 from = (u64)(i < G::X_PIECES / 2 ? p.x.sx : p.x.mx) + (u64)inputs[i / OF % G::TOKENS] * parts * 4 + i % OF * 16;
            keep(G::KEPT_X + 2 * k, (u32)from), keep(G::KEPT_X + 2 * k + 1, (u32)(from >> 32));
        }
    };
    keep(G::KEPT_TO, (place / G::PIECES * G::ROW_STRIDE / 16 + place % G::PIECES) | (G::A / 16 + place / (2 * G::PARTS) * G::TOKEN_STRIDE / 16 + place % (2 * G::PARTS)) << 16);
    // Where scales and biases of two groups of a row go as floats, and scales and sums of a token and a chain.
    if (has_scales) keep(G::KEPT_S_TO, place % 2 * 2 * G::CHAIN + place / 2 * 8);
    if (has_sums) {
        u32 t = x_place / 4, chain = x_place % 4;
        u32 scales = chain * G::CHAIN + G::SCALES_AT + (t / 2 * 2 * OF + t % 2) * 4;
        u32 sums = chain * G::CHAIN + G::SUMS_AT + ((t / 16 * 4 + t % 8 / 2) * 4 + t / 8 % 2 * 2 + t % 2) * 4;
        keep(G::KEPT_X_TO, scales << 16 | sums);
    }
    // What is not regular, and what is less than a whole stage.
    auto bring_weights_slowly = [&](u32 stage, u8* to) {
        u32 here = min(parts - stage * G::PARTS, G::PARTS);
        const u32 PIECE = F::BITS % 4 == 0 ? 16 : 4, PER_ROW = G::ROW / PIECE;
#pragma unroll 1
        for (u32 i = thread; i < G::ROWS * PER_ROW; i += G::THREADS) {
            u32 r = i / PER_ROW, piece = i % PER_ROW;
            if (piece * PIECE >= here * 4 * F::BITS) continue;
            u64 row = p.in_matrix(min(first_row + r, p.rows - 1));
            const u8* from = m.data + row * m.row_bytes + stage * G::ROW + piece * PIECE;
            u8* at = to + r * G::ROW_STRIDE + piece * PIECE;
            if (PIECE == 16) cp_async_16(at, from);
            else cp_async_4(at, from);
        }
    };
    auto bring_scales_slowly = [&](u32 stage, u8* to) {
        if (thread >= 2 * G::ROWS) return;
        u8* at = to + thread * step;
        u64 first = p.in_matrix(min(first_row + thread % G::ROWS, p.rows - 1)) * groups + stage * 4;
        const u8* from = thread < G::ROWS ? m.scales : m.biases;
#pragma unroll 1
        for (u32 g = 0; g < 4 && stage * 4 + g < groups; g++) {
            if (m.type == F32) ((u32*)at)[g] = ((const u32*)from)[first + g];
            else ((u16*)at)[g] = ((const u16*)from)[first + g];
        }
    };
    auto bring_inputs_slowly = [&](u32 stage, u8* to) {
        u32 here = min(parts - stage * G::PARTS, G::PARTS);
#pragma unroll 1
        for (u32 i = thread; i < G::B_PIECES; i += G::THREADS) {
            u32 t = i / (2 * G::PARTS), piece = i % (2 * G::PARTS);
            const i8* from = p.x.q + (u64)inputs[t] * p.cols + stage * G::COLUMNS + piece * 16;
            if (piece < here * 2) cp_async_16(to + G::A + t * G::TOKEN_STRIDE + piece * 16, from);
        }
    };
    auto bring_sums_slowly = [&](u32 stage, u8* to) {
        u32 here = min(parts - stage * G::PARTS, G::PARTS);
#pragma unroll 1
        for (u32 i = thread; i < G::TOKENS * G::PARTS; i += G::THREADS) {
            u32 t = i / G::PARTS, part = i % G::PARTS;
            u64 at = (u64)inputs[t] * parts + stage * G::PARTS + part;
            u8* own = to + G::S + 4 * i;
            if (part >= here) continue;
            cp_async_4(own, p.x.sx + at);
            cp_async_4(own + G::SX, p.x.mx + at);
        }
    };
    auto bring_weights = [&](u32 stage, u8* to, const u8* from) {
        u32 own[G::A_COPIES];
        find_kept(0, G::A_COPIES, own);
        from += stage * G::ROW;
        u8* at = to + (found(G::KEPT_TO) & 0xffff) * 16;
#pragma unroll
        for (u32 k = 0; k < G::A_COPIES; k++) {
            u32 i = place + k * G::BRINGERS;
            if (G::A_PIECES % G::BRINGERS != 0 && i >= G::A_PIECES) continue;
            if (G::BRINGERS % G::PIECES != 0) at = to + i / G::PIECES * G::ROW_STRIDE + i % G::PIECES * 16;
            cp_async_16(at, from + own[k]);
            at += G::BRINGERS / G::PIECES * G::ROW_STRIDE;
        }
    };
    auto bring_inputs = [&](u32 stage, u8* to) {
        u32 own[G::B_COPIES];
        find_kept(G::KEPT_B, G::B_COPIES, own);
        const i8* from = p.x.q + stage * G::COLUMNS;
        u8* at = to + (found(G::KEPT_TO) >> 16) * 16;
#pragma unroll
        for (u32 k = 0; k < G::B_COPIES; k++) {
            u32 i = place + k * G::BRINGERS;
            if (G::B_PIECES % G::BRINGERS != 0 && i >= G::B_PIECES) continue;
            cp_async_16(at, from + own[k]);
            at += G::BRINGERS / (2 * G::PARTS) * G::TOKEN_STRIDE;
        }
    };
    // Of weights, of activations, or both.
    auto bring_scales = [&](u32 stage, u8* to, bool of_weights, bool of_activations) {
        if (has_scales && of_weights) {
#pragma unroll
            for (u32 k = 0; k < G::S_COPIES; k++) {
                u32 i = place + k * G::S_THREADS;
                const u8* from = found_address(G::KEPT_S + 2 * k) + stage * step;
                if (m.type == F32) cp_async_16(to + i * 16, from);
                else cp_async_8(to + i * 8, from);
            }
        }
        if (has_sums && of_activations) {
#pragma unroll
            for (u32 k = 0; k < G::X_COPIES; k++) {
                u32 i = x_place + k * G::X_THREADS;
                if (G::X_PIECES % G::X_THREADS != 0 && i >= G::X_PIECES) continue;
                cp_async_16(to + G::S + i * 16, found_address(G::KEPT_X + 2 * k) + stage * (4 * G::PARTS));
            }
        }
    };
    // Scales of a stage become floats.
    auto unfold = [&](const u8* from, u8* to) {
        if (has_scales) {
            u8* at = to + found(G::KEPT_S_TO);
#pragma unroll
            for (u32 k = 0; k < G::S_COPIES; k++) {
                // Two groups of a row.
                const u8* own = from + (place + k * G::S_THREADS) * (step / 2);
                float s[2], b[2];
                if (m.type == F32) {
                    s[0] = ((const float*)own)[0], s[1] = ((const float*)own)[1];
                    own += 16 * G::ROWS;
                    b[0] = ((const float*)own)[0], b[1] = ((const float*)own)[1];
                } else {
                    u32 of_s = *(const u32*)own, of_b = *(const u32*)(own + 8 * G::ROWS);
                    s[0] = value(of_s & 0xffff, m.type), s[1] = value(of_s >> 16, m.type);
                    b[0] = value(of_b & 0xffff, m.type), b[1] = value(of_b >> 16, m.type);
                }
                *(float2*)(at + k * (4 * G::S_THREADS)) = make_float2(s[0], b[0]);
                *(float2*)(at + k * (4 * G::S_THREADS) + G::CHAIN) = make_float2(s[1], b[1]);
            }
        }
        if (!has_sums) return;
        u32 at = found(G::KEPT_X_TO);
#pragma unroll
        for (u32 k = 0; k < G::UNFOLDED; k++) {
            // Whole sixteens of tokens further on.
            const u32 FURTHER = G::X_THREADS / 4;
            u32 i = x_place + k * G::X_THREADS;
            if (4 * G::TOKENS % G::X_THREADS != 0 && i >= 4 * G::TOKENS) continue;
            const u8* own = from + G::S + i * (4 * OF);
            float of[OF], sums[OF];
            joined_scales<OF>((const float*)own, of);
            joined_scales<OF>((const float*)(own + G::SX), sums);
            float mean = sums[0];
#pragma unroll
            for (u32 part = 0; part < OF; part++) {
                *(float*)(to + (at >> 16) + 4 * OF * FURTHER * k + 8 * part) = of[part];
                if (part > 0) mean = add(mean, sums[part]);
            }
            *(float*)(to + (at & 0xffff) + 4 * FURTHER * k) = mean;
        }
    };

    // 2. One matrix for all tokens: its first rows are under way before what they meet is there.
    const u32 AHEAD = G::STAGES - 1;
    if (!p.tiles) {
        find_weights();
        if (G::KEPT) __syncthreads();
        for (u32 stage = 0; stage < min(AHEAD, stages); stage++) {
            if (!regular) bring_weights_slowly(stage, memory + stage * G::TILE);
            else if (has_turn(stage)) bring_weights(stage, memory + stage * G::TILE, m.data);
        }
        for (u32 stage = 0; stage < min(AHEAD + 1, stages); stage++) {
            if (!regular) bring_scales_slowly(stage, raw + stage * G::RAW);
            else if (has_turn(stage)) bring_scales(stage, raw + stage * G::RAW, true, false);
        }
    }
    begin();
    const u32 tiles = p.tiles ? p.tiles[0] : (p.outputs + G::TOKENS - 1) / G::TOKENS;
    const u32 band = warp % BANDS, row_in_tile = band * 32 + lane / 4, chain = warp / BANDS, j = lane % 4;
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        u32 first = tile * G::TOKENS, count = min(G::TOKENS, p.outputs - first);
        if (p.tiles) {
            uint4 own = ((const uint4*)p.tiles)[1 + tile];
            m = p.table[own.x];
            first = own.y;
            count = own.z;
            // Skips an expert that is not on the device.
            if (m.kind != KIND_OF<F>) continue;
        }
        const u32 eights = (count + 7) / 8;
        __syncthreads();
        if (thread < G::TOKENS) {
            u32 at = first + min(thread, count - 1);
            outputs[thread] = p.tiles ? p.order[at] : at;
            inputs[thread] = outputs[thread] / p.per_row;
        }
        bool early = !p.tiles && tile == blockIdx.y;
        if (!early) find_weights();
        __syncthreads();
        find_inputs();
        if (G::KEPT) __syncthreads();
        for (u32 stage = 0; stage < AHEAD; stage++) {
            u8* to = memory + stage * G::TILE;
            if (stage < stages && regular) {
                if (!early && has_turn(stage)) bring_weights(stage, to, m.data);
                if (has_turn(stage)) bring_inputs(stage, to);
            } else if (stage < stages) {
                if (!early) bring_weights_slowly(stage, to);
                bring_inputs_slowly(stage, to);
            }
            for (u32 of = stage == 0 ? 0 : stage + 1; of < min(stage + 2, stages); of++) {
                u8* to = raw + of * G::RAW;
                if (regular) {
                    if (has_turn(of)) bring_scales(of, to, !early, true);
                } else {
                    if (!early) bring_scales_slowly(of, to);
                    bring_sums_slowly(of, to);
                }
            }
            cp_async_commit();
        }
        cp_async_wait<G::STAGES - 2>();
        __syncthreads();
        if (has_turn(0)) unfold(raw, floats);

        // 3. Sums: [rows of sixteen][tokens of eight][element of the tile]
        float acc[2][EIGHTS][4];
#pragma unroll
        for (u32 i = 0; i < 8 * EIGHTS; i++) acc[i / (4 * EIGHTS)][i / 4 % EIGHTS][i % 4] = 0.0f;
        u32 slot = 0, slot_before = AHEAD;
        // Where what a thread multiplies lies in a stage: its rows and activations, then scales of rows and of activations among the floats.
        u32 own_data = ((band * 32 + lane) * G::ROW_STRIDE + chain * OF * 16) << 16 | (G::A + chain * OF * 32 + j * 8 + lane / 4 * G::TOKEN_STRIDE);
        u32 own_floats = (chain * G::CHAIN + row_in_tile * 8) << 16 | (chain * G::CHAIN + j * 16);
        if (G::KEPT) {
            // Through a shuffle: what is plain arithmetic, the compiler does again at each stage.
            own_data = __shfl_sync(ALL, own_data, lane);
            own_floats = __shfl_sync(ALL, own_floats, lane);
        }
#pragma unroll 1
        for (u32 stage = 0; stage < stages; stage++) {
            const u8 *here = memory + slot * G::TILE, *scales = floats + stage % 2 * G::FLOATS;
            cp_async_wait<G::STAGES - 2>();
            // What this stage needs is there, and nobody reads any more what the one before it needed.
            __syncthreads();
            if (regular) {
                if (stage + AHEAD < stages && has_turn(stage + AHEAD)) {
                    bring_weights(stage + AHEAD, memory + slot_before * G::TILE, *data);
                    bring_inputs(stage + AHEAD, memory + slot_before * G::TILE);
                }
                if (stage + G::STAGES < stages && has_turn(stage + G::STAGES)) bring_scales(stage + G::STAGES, raw + slot * G::RAW, true, true);
            } else {
                if (stage + AHEAD < stages) {
                    bring_weights_slowly(stage + AHEAD, memory + slot_before * G::TILE);
                    bring_inputs_slowly(stage + AHEAD, memory + slot_before * G::TILE);
                }
                if (stage + G::STAGES < stages) {
                    bring_scales_slowly(stage + G::STAGES, raw + slot * G::RAW);
                    bring_sums_slowly(stage + G::STAGES, raw + slot * G::RAW);
                }
            }
            cp_async_commit();
            slot_before = slot;
            slot = slot + 1 == G::STAGES ? 0 : slot + 1;
            if (stage + 1 < stages && has_turn(stage + 1)) unfold(raw + slot * G::RAW, floats + (stage + 1) % 2 * G::FLOATS);
            if (!regular && stage * 4 + chain >= groups) continue;
            const u8* b = here + (own_data & 0xffff);
            const float* sx = (const float*)(scales + (own_floats & 0xffff) + G::SCALES_AT + (int)j * (8 * OF - 16));
            const float4* sums = (const float4*)(scales + (own_floats & 0xffff) + G::SUMS_AT);
            u32 a[OF][2][4];
#pragma unroll
            for (u32 part = 0; part < OF; part++) {
                if (F::BITS == 4) {
                    u32 words[4];
                    ldmatrix_x4(words, here + (own_data >> 16) + part * 16);
                    F::unpack_matrix(words, a[part]);
                    continue;
                }
                const u8* row = here + row_in_tile * G::ROW_STRIDE + (chain * OF + part) * 4 * F::BITS;
#pragma unroll
                for (u32 i = 0; i < 4; i++) F::unpack_lane(row + 8 * i * G::ROW_STRIDE, j, a[part][i / 2][i % 2], a[part][i / 2][i % 2 + 2]);
            }
            // Scale and bias of the rows lane / 4 and on, eight apart.
            float2 of_row[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) of_row[i] = ((const float2*)(scales + (own_floats >> 16)))[8 * i];
#pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) {
                // By two, so that one's products are on their way while the other's sums are made.
                if (n % 2 == 0 && n >= eights) break;
                float of[2 * OF];
                if (OF == 1) {
                    float2 v = *(const float2*)(sx + 8 * n);
                    of[0] = v.x, of[1] = v.y;
                } else {
#pragma unroll
                    for (u32 part = 0; part < OF; part += 2) {
                        float4 v = *(const float4*)(sx + 8 * n * OF + 2 * part);
                        of[2 * part] = v.x, of[2 * part + 1] = v.y, of[(2 * part + 2) % (2 * OF)] = v.z, of[(2 * part + 3) % (2 * OF)] = v.w;
                    }
                }
                float2 mean = ((const float2*)(sums + n / 2 * 4))[n % 2];
                uint2 q[OF];
#pragma unroll
                for (u32 part = 0; part < OF; part++) q[part] = *(const uint2*)(b + 8 * n * G::TOKEN_STRIDE + part * 32);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 d[OF][4];
#pragma unroll
                    for (u32 part = 0; part < OF; part++) mma_u8_i8(d[part], a[part][i], q[part].x, q[part].y);
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        float joined = mul(of[e % 2], sub(bits(d[0][e]), MAGIC_FLOAT));
#pragma unroll
                        for (u32 part = 1; part < OF; part++) joined = fma(of[2 * part + e % 2], sub(bits(d[part][e]), MAGIC_FLOAT), joined);
                        float2 own = of_row[2 * i + e / 2];
                        acc[i][n][e] = fma(own.y, e % 2 ? mean.y : mean.x, fma(own.x, joined, acc[i][n][e]));
                    }
                }
            }
        }

        // 4. Chains meet.
        float* meet = (float*)memory;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 8 * EIGHTS; i++) {
            u32 e = i % 4, n = i / 4 % EIGHTS, r = row_in_tile + i / (4 * EIGHTS) * 16 + e / 2 * 8, t = 8 * n + 2 * j + e % 2;
            meet[(chain * G::TOKENS + t) * G::MEET_STRIDE + r] = acc[i / (4 * EIGHTS)][n][e];
        }
        const u32 FAR = G::TOKENS * G::MEET_STRIDE;
        u32 quad = thread % (G::ROWS / 4) * 4;
        // Not in registers before the loop over stages, which takes all of them.
        materialize(quad);
        float* column = p.out.at + p.in_output(first_row + quad);
        // Four rows lie together and are there.
        const bool fours = first_row + G::ROWS <= p.rows && p.run % 4 == 0 && p.run_columns % 4 == 0 && p.out.stride % 4 == 0 && ((u64)p.out.at & 15) == 0;
        if (fours) {
            // A thread has the same rows of all its tokens. What is added to is under way before chains meet.
            const u32 DEEP = G::TOKENS / 16;
            float4 before[DEEP];
#pragma unroll
            for (u32 k = 0; k < DEEP; k++) {
                u32 t = min(thread / (G::ROWS / 4) + 16 * k, count - 1);
                before[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (p.accumulate) before[k] = *(const float4*)(column + outputs[t] * p.out.stride);
            }
            float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (p.bias) bias = make_float4(p.bias[first_row + quad], p.bias[first_row + quad + 1], p.bias[first_row + quad + 2], p.bias[first_row + quad + 3]);
            __syncthreads();
#pragma unroll
            for (u32 k = 0; k < DEEP; k++) {
                u32 t = thread / (G::ROWS / 4) + 16 * k;
                if (t >= count) break;
                const float* chains = meet + t * G::MEET_STRIDE + quad;
                float4 v[4];
#pragma unroll
                for (u32 c = 0; c < 4; c++) v[c] = *(const float4*)(chains + c * FAR);
                float4 y;
                y.x = add(add(v[0].x, v[2].x), add(v[1].x, v[3].x)), y.y = add(add(v[0].y, v[2].y), add(v[1].y, v[3].y));
                y.z = add(add(v[0].z, v[2].z), add(v[1].z, v[3].z)), y.w = add(add(v[0].w, v[2].w), add(v[1].w, v[3].w));
                if (p.bias) y = make_float4(add(y.x, bias.x), add(y.y, bias.y), add(y.z, bias.z), add(y.w, bias.w));
                if (p.accumulate) y = make_float4(add(before[k].x, y.x), add(before[k].y, y.y), add(before[k].z, y.z), add(before[k].w, y.w));
                *(float4*)(column + outputs[t] * p.out.stride) = y;
            }
            continue;
        }
        __syncthreads();
#pragma unroll 1
        for (u32 i = thread; i < G::ROWS * count; i += G::THREADS) {
            const float* chains = meet + i / G::ROWS * G::MEET_STRIDE + i % G::ROWS;
            float y = add(add(chains[0], chains[2 * FAR]), add(chains[FAR], chains[3 * FAR]));
            u32 r = first_row + i % G::ROWS;
            if (r < p.rows) put(p, outputs[i / G::ROWS], r, y);
        }
    }
}
