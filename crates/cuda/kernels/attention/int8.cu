// Attention on integers of prompts, on integer tensor cores: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all
// partitions in turn. A warp has sixteen rows and all keys of a partition: their sums, weights and outputs stay in its registers. Sums of integers are exact,
// so that positions may meet in any order: weights are multiplied with values in the order in which they lie in a warp's registers. Grid: (tiles of tokens, KV
// heads).
//
// Shared memory: keys [128][DIM] and values [128][DIM] as they lie in the cache, each row sixteen bytes longer; values across, [DIM][128], likewise.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/tiles.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 INT8_THREADS = 128, ACROSS_STRIDE = PARTITION + 16;

// Rows of a partition as they lie. What nobody sees is zero.
template <u32 DIM> __device__ __forceinline__ void bring_integers(const u8* const* keys, u64 behind, u8* to) {
    const u32 PIECES = DIM / 16, AT_ONCE = INT8_THREADS / PIECES;
    const u32 piece = threadIdx.x % PIECES * 16;
#pragma unroll
    for (u32 position = threadIdx.x / PIECES, i = 0; i < PARTITION / AT_ONCE; i++, position += AT_ONCE) {
        bring_later(keys[position], behind + piece, to + position * (DIM + 16) + piece);
    }
}

// Values across: a word has a column of the four positions whose weights a thread has in a word, 2q, 2q + 1, 8 + 2q and 9 + 2q of sixteen.
template <u32 DIM> __device__ __forceinline__ void turn_across(const u8* values, u8* across) {
    const u32 word = threadIdx.x % 8, from = word / 4 * 16 + word % 4 * 2, four = threadIdx.x / 8 % 4, rest = threadIdx.x / WARP;
#pragma unroll 2
    for (u32 i = rest; i < PARTITION / 32 * DIM / 16; i += INT8_THREADS / WARP) {
        const u32 chunk = i % (PARTITION / 32), column = (i / (PARTITION / 32) * 4 + four) * 4;
        const u8* at = values + (chunk * 32 + from) * (DIM + 16) + column;
        const u32 a = *(const u32*)at, b = *(const u32*)(at + DIM + 16), c = *(const u32*)(at + 8 * (DIM + 16)), d = *(const u32*)(at + 9 * (DIM + 16));
        const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140), ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
        u8* to = across + column * ACROSS_STRIDE + (chunk * 8 + word) * 4;
        *(u32*)to = __byte_perm(ab, cd, 0x5410);
        *(u32*)(to + ACROSS_STRIDE) = __byte_perm(ab, cd, 0x7632);
        *(u32*)(to + 2 * ACROSS_STRIDE) = __byte_perm(ab_high, cd_high, 0x5410);
        *(u32*)(to + 3 * ACROSS_STRIDE) = __byte_perm(ab_high, cd_high, 0x7632);
    }
}

// How two rows' sums stand, `lane / 4` and eight further; the same in the four threads that have them.
struct IntegerRows {
    u32 first[2], last[2];
    bool has[2];
    float top[2], sum[2], scale[2];
};

// What is shared of known size.
struct OfIntegers {
    Places places[2];
    float q_scales[ATTEND_ROWS], tops[ATTEND_ROWS], sums[ATTEND_ROWS];
};

// Seldom wanted, and long: one piece of code for all scores.
__device__ __noinline__ float softly_capped(float score, float cap) { return mul(tanh_(div(score, cap)), cap); }

template <u32 DIM> __device__ __forceinline__ void attend_int8(const Attention& p) {
    __shared__ __align__(16) OfIntegers shared;
    const Cache& c = p.cache;
    const u32 STRIDE = DIM + 16, TILES = PARTITION / 8;
    const u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4;
    u8 *keys = (u8*)smem, *values = keys + PARTITION * STRIDE, *across = values + PARTITION * STRIDE;
    // Where a lane's rows of four matrices begin: eight rows, of four pieces one behind the other.
    const u8 *key_rows = keys + lane % 8 * STRIDE + lane / 8 * 16, *column_rows = across + lane % 8 * ACROSS_STRIDE + lane / 8 * 16;
    begin();
    // The last tokens see most: they come first, with all their heads.
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x, kv_head = block % gridDim.y;
    const u32 tile = gridDim.x - 1 - block / gridDim.y, end_of_tile = min((tile + 1) * per_tile, p.tokens);
#pragma unroll 1
    for (u32 first = tile * per_tile, next; first < end_of_tile; first = next) {
        // 1. Tokens of one sequence, and its first keys and values, which come beside queries
        const u32 sequence = p.sequences[first];
        for (next = first + 1; next < end_of_tile && p.sequences[next] == sequence;) next++;
        const u32 rows = (next - first) * group;
        const u32* table = p.tables + p.table_starts[sequence];
        const u32 lowest = first_seen(p, p.positions[first]), highest = p.positions[next - 1];
        u32 base = lowest / PARTITION * PARTITION;
        auto find = [&](u32 n, u32 at) { find_places(c, table, kv_head, at, lowest, highest + 1, shared.places[n % 2]); };
        __syncthreads();
        find(0, base);
        __syncthreads();
        bring_integers<DIM>(shared.places[0].keys, 0, keys);
        bring_integers<DIM>(shared.places[0].keys, values_behind(c), values);
        // 2. Queries, normed and turned, then as integers
        float* head = (float*)across + warp * DIM;
        u8* queries = across + 4 * 4 * DIM;
#pragma unroll 1
        for (u32 r = warp * 16; r < warp * 16 + 16; r++) {
            u8* to = queries + r * STRIDE;
            if (r < rows) {
                const u32 t = first + r / group, h = kv_head * group + r % group;
                turn(p.q.row(t) + (u64)h * DIM * (p.gated ? 2 : 1), head, DIM, p.q_norm, p.angles + (u64)p.positions[t] * 2 * p.half, p.half);
                const Rounding rounding = rounding_of(head, DIM);
                for (u32 d = lane; d < DIM; d += WARP) to[d] = (u8)to_i8(mul(head[d], rounding.inv));
                if (lane == 0) shared.q_scales[r] = rounding.scale;
                __syncwarp();
            } else {
                for (u32 d = lane; d < DIM; d += WARP) to[d] = 0;
            }
        }
        __syncwarp();
        u32 q[DIM / 32][4];
#pragma unroll
        for (u32 i = 0; i < DIM / 32; i++) ldmatrix_x4(q[i], queries + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 16 + i * 32);
        IntegerRows own;
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 r = warp * 16 + lane / 4 + 8 * e;
            own.has[e] = r < rows;
            own.last[e] = own.has[e] ? p.positions[first + r / group] : 0;
            own.first[e] = own.has[e] ? first_seen(p, own.last[e]) : 0;
            own.scale[e] = own.has[e] ? mul(p.scale, shared.q_scales[r]) : 0.0f;
            own.top[e] = own.sum[e] = 0.0f;
        }
        float out[DIM / 8][4];
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = -0.0f;
        const bool busy = warp * 16 < rows;
#pragma unroll 1
        for (u32 turns = 0; base <= highest; base += PARTITION, turns++) {
            cp_async_wait_all();
            __syncthreads();
            // 3. Sums of queries and keys; values across, and where the next ones lie
            const bool more = base + PARTITION <= highest;
            if (more) find(turns + 1, base + PARTITION);
            turn_across<DIM>(values, across);
            float s[TILES][4];
            if (busy) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    u32 sums[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
                    for (u32 i = 0; i < DIM / 32; i += 2) {
                        u32 k[4];
                        ldmatrix_x4(k, key_rows + n * 8 * STRIDE + i * 32);
                        mma_i8_i8_add(sums, q[i], k[0], k[1]);
                        mma_i8_i8_add(sums, q[i + 1], k[2], k[3]);
                    }
#pragma unroll
                    for (u32 e = 0; e < 4; e++) s[n][e] = sub(bits(sums[e]), MAGIC_FLOAT);
                }
            }
            __syncthreads();
            if (more) {
                const u8* const* next_keys = shared.places[(turns + 1) % 2].keys;
                bring_integers<DIM>(next_keys, 0, keys);
                bring_integers<DIM>(next_keys, values_behind(c), values);
            }
            if (!busy) continue;
            // 4. Scores, and what each row sees of them
            const float2 *k_scales = (const float2*)shared.places[turns % 2].k_scales + quad, *v_scales = (const float2*)shared.places[turns % 2].v_scales + quad;
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
                const float2 scale = k_scales[4 * n];
#pragma unroll
                for (u32 e = 0; e < 4; e++) s[n][e] = mul(mul(s[n][e], e % 2 ? scale.y : scale.x), own.scale[e / 2]);
            }
            if (p.capped) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) s[n][e] = softly_capped(s[n][e], p.cap);
                }
            }
            u32 from[2], seen[2];
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                from[e] = own.has[e] ? max(own.first[e], base) - base : 0;
                const u32 to = own.has[e] && own.last[e] >= base ? min(own.last[e] + 1 - base, PARTITION) : 0;
                seen[e] = to > from[e] ? to - from[e] : 0;
            }
            const bool all = __ballot_sync(ALL, seen[0] < PARTITION || seen[1] < PARTITION) == 0;
            // 5. Weights, in the place of scores, and as integers: four to a word, of each two tiles
            u32 w[TILES / 2][2];
            float kept[2], taken[2], scales[2];
            auto weigh_rows = [&](bool checked) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    auto visible = [&](u32 n, u32 j) { return !checked || 8 * n + 2 * quad + j - from[e] < seen[e]; };
                    // A NaN is no maximum; nor does the sign of a zero matter.
                    float top = bits(NEGATIVE_INFINITY);
#pragma unroll
                    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                        for (u32 j = 0; j < 2; j++) top = visible(n, j) ? fmaxf(s[n][2 * e + j], top) : top;
                    }
                    top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
                    // Positions of one remainder by sixteen each: those of even tiles, and of odd ones.
                    float lanes[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
                    u32 greatest = 0;
#pragma unroll
                    for (u32 n = 0; n < TILES; n++) {
                        const float2 v_scale = v_scales[4 * n];
#pragma unroll
                        for (u32 j = 0; j < 2; j++) {
                            float& weight = s[n][2 * e + j];
                            weight = visible(n, j) ? exp_below(sub(weight, top)) : 0.0f;
                            lanes[n % 2][j] = add(lanes[n % 2][j], weight);
                            weight = mul(weight, j ? v_scale.y : v_scale.x);
                            if (visible(n, j)) greatest = max(greatest, bits(weight) & 0x7fffffffu);
                        }
                    }
                    // i and i + 8, i and i + 4, i and i + 2, 0 and 1.
                    float both[2];
#pragma unroll
                    for (u32 j = 0; j < 2; j++) {
                        both[j] = add(lanes[0][j], lanes[1][j]);
                        both[j] = add(both[j], __shfl_xor_sync(ALL, both[j], 2));
                        both[j] = add(both[j], __shfl_xor_sync(ALL, both[j], 1));
                    }
                    const float sum = add(both[0], both[1]);
                    greatest = max(greatest, __shfl_xor_sync(ALL, greatest, 1));
                    greatest = max(greatest, __shfl_xor_sync(ALL, greatest, 2));
                    // A row with NaN or infinity becomes zeros with a scale of NaN.
                    const float a = bits(greatest), inv = div(255.0f, a);
                    const bool some = is_finite(a) && is_finite(inv);
                    scales[e] = is_finite(a) ? div(a, 255.0f) : bits(NOT_A_NUMBER);
#pragma unroll
                    for (u32 n = 0; n < TILES; n += 2) {
                        u32 four[4];
#pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            const u32 rounded = bits(add(mul(s[n + j / 2][2 * e + j % 2], inv), MAGIC_FLOAT));
                            four[j] = some && visible(n + j / 2, j % 2) ? rounded : 0;
                        }
                        w[n / 2][e] = __byte_perm(__byte_perm(four[0], four[1], 0x0040), __byte_perm(four[2], four[3], 0x0040), 0x5410);
                    }
                    // 6. How the row's sums go on
                    kept[e] = 1.0f, taken[e] = 1.0f;
                    if (seen[e] == 0) {
                        // Nothing comes to it: -0.
                        taken[e] = -0.0f, scales[e] = 0.0f;
                    } else if (base <= own.first[e]) {
                        own.top[e] = top, own.sum[e] = sum;
                    } else {
                        const float m = greater(top, own.top[e]);
                        kept[e] = exp_below(sub(own.top[e], m)), taken[e] = exp_below(sub(top, m));
                        own.sum[e] = fma(own.sum[e], kept[e], mul(sum, taken[e]));
                        own.top[e] = m;
                    }
                }
            };
            if (all) weigh_rows(false);
            else weigh_rows(true);
            // 7. Values
#pragma unroll
            for (u32 j = 0; j < DIM / 8; j++) {
                u32 sums[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
                for (u32 i = 0; i < PARTITION / 32; i += 2) {
                    u32 v[4];
                    ldmatrix_x4(v, column_rows + j * 8 * ACROSS_STRIDE + i * 32);
                    const u32 one[4] = {w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1]}, two[4] = {w[2 * i + 2][0], w[2 * i + 2][1], w[2 * i + 3][0], w[2 * i + 3][1]};
                    mma_u8_i8_add(sums, one, v[0], v[1]);
                    mma_u8_i8_add(sums, two, v[2], v[3]);
                }
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float o = mul(sub(bits(sums[e]), MAGIC_FLOAT), scales[e / 2]);
                    out[j][e] = fma(out[j][e], kept[e / 2], mul(o, taken[e / 2]));
                }
            }
        }
        // 8. The end of each row, where keys and values were
        float* const ends = (float*)smem;
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 r = warp * 16 + lane / 4 + 8 * e;
            if (quad == 0) shared.tops[r] = own.top[e], shared.sums[r] = own.sum[e];
#pragma unroll
            for (u32 j = 0; j < DIM / 8; j++) *(float2*)(ends + r * DIM + 8 * j + 2 * quad) = make_float2(out[j][2 * e], out[j][2 * e + 1]);
        }
        __syncwarp();
#pragma unroll 1
        for (u32 r = warp * 16; r < min(warp * 16 + 16, rows); r++) {
            const u32 t = first + r / group, h = kv_head * group + r % group;
#pragma unroll
            for (u32 d = lane; d < DIM; d += WARP) finish(p, t, h, d, ends[r * DIM + d], shared.tops[r], shared.sums[r]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 3) attention_int8_64(const __grid_constant__ Attention p) { attend_int8<64>(p); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_int8_128(const __grid_constant__ Attention p) { attend_int8<128>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_int8_256(const __grid_constant__ Attention p) { attend_int8<256>(p); }
