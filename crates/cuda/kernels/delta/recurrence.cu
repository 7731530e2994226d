// The delta rule, any number of tokens: the recurrence token by token, and the gated norm of its output.
#include "delta/delta.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

// A thread takes a column of a value head's state of a sequence through all its tokens; grid: (blocks of columns, value heads, sequences). Shared memory:
// q and k of a token [key_dim] each.
extern "C" __global__ void delta_recur(const Delta p) {
    begin();
    float *q = smem, *k = smem + p.key_dim;
    u32 h = blockIdx.y, all = channels(p), keys = p.key_heads * p.key_dim;
    u32 key_head = key_head_of(p, h);
    u32 j = blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = j < p.value_dim;
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        float* state = p.states.row(p.rows[s]) + (u64)h * p.key_dim * p.value_dim + j;
        for (u32 t = p.starts[s]; t < p.starts[s + 1]; t++) {
            const float* mixed = p.mixed + (u64)t * all;
            __syncthreads();
            for (u32 i = threadIdx.x; i < p.key_dim; i += blockDim.x) {
                q[i] = mixed[key_head * p.key_dim + i];
                k[i] = mixed[keys + key_head * p.key_dim + i];
            }
            __syncthreads();
            if (!inside) continue;
            const u64 of_head = (u64)t * p.value_heads + h;
            const float *decays = p.decays + of_head * (p.by_channel ? p.key_dim : 1), beta = p.beta[of_head];
            const float of_all = decays[0];
            auto decay = [&](u32 i) { return p.by_channel ? decays[i] : of_all; };
            float v = mixed[2 * keys + h * p.value_dim + j];
            float held[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        held[lane] = fma(mul(state[(u64)(i + lane) * p.value_dim], decay(i + lane)), k[i + lane], held[lane]);
                    }
                }
            }
            float d = mul(sub(v, add(add(held[0], held[2]), add(held[1], held[3]))), beta);
            const u32 row = p.kept ? p.kept[t] : NOT_KEPT;
            float* kept = row == NOT_KEPT ? nullptr : p.states.row(row) + (u64)h * p.key_dim * p.value_dim + j;
            float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        float* at = state + (u64)(i + lane) * p.value_dim;
                        float next = fma(k[i + lane], d, mul(*at, decay(i + lane)));
                        *at = next;
                        if (kept) kept[(u64)(i + lane) * p.value_dim] = next;
                        o[lane] = fma(next, q[i + lane], o[lane]);
                    }
                }
            }
            p.out.row(t)[h * p.value_dim + j] = add(add(o[0], o[2]), add(o[1], o[3]));
        }
    }
}

// The same where keys have KEYS elements: four threads of a warp have a column, which stays in their registers through all tokens, each the keys that are one number modulo
// 4, which are a lane of both sums. Tokens come some at a time while those before them are computed. From a token to the next one there is one chain: a sum of KEYS / 4
// products, that of the four lanes, d. So the state's decay and the first sum of the next token stand beside what this one makes of the state, and everything that they need
// is in registers before.
//
// Shared memory: of RECUR_TOKENS tokens, or of RECUR_TOKENS_BY_CHANNEL, q and k by lanes, v of this block's columns, the decay and beta; a quarter of them is brought at once. Decays of
// channels lie behind k, as it does, and at the end are ones, by which the state stays as it is.
static const u32 RECUR_COLUMNS = 32, RECUR_TOKENS = 32, RECUR_TOKENS_BY_CHANNEL = 16;

// With KEEP the column is also written where the state after a token is kept.
template <u32 KEYS, bool BY_CHANNEL, bool KEEP> __device__ __forceinline__ void recur_kept(const Delta& p) {
    // Lanes are such that four of them meet in no bank.
    const u32 EACH = KEYS / 4, PADDED = EACH + 4, VALUES = (BY_CHANNEL ? 12 : 8) * PADDED, DECAY = VALUES + RECUR_COLUMNS, BETA = DECAY + 1, ROW = DECAY + 4;
    const u32 TOKENS = BY_CHANNEL ? RECUR_TOKENS_BY_CHANNEL : RECUR_TOKENS, BATCH = TOKENS / 4;
    const u32 h = blockIdx.y, first = blockIdx.x * RECUR_COLUMNS, all = channels(p), keys = p.key_heads * KEYS, key_head = key_head_of(p, h);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane / 8, c = warp * 8 + lane % 8;
    const bool inside = first + c < p.value_dim;
    const u64 step = 4 * p.value_dim;
    float* const ones = smem + TOKENS * ROW;
    for (u32 i = threadIdx.x; BY_CHANNEL && i < 4 * PADDED; i += blockDim.x) ones[i] = 1.0f;
#pragma unroll 1
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        const u32 start = p.starts[s], count = p.starts[s + 1] - start;
        if (count == 0) continue;
        auto place = [&](u32 n) { return smem + n % TOKENS * ROW; };
        // A part of the tokens from `n` on, each by two warps: one brings q and v, the other k and gates.
        auto ask = [&](u32 n) {
            const bool of_q = warp % 2 == 0;
            n += warp / 2;
            const u64 t = start + n;
            const u32 quads = EACH / 4;
            const float *row = p.mixed + t * all, *piece = row + (of_q ? 0 : keys) + key_head * KEYS + lane * 4;
            const float* other = of_q ? row + 2 * keys + h * p.value_dim + first + lane : (lane == 0 ? p.decays : p.beta) + t * p.value_heads + h;
            const bool has_piece = lane < KEYS / 4, has_other = of_q ? first + lane < p.value_dim : lane < 2 && !(BY_CHANNEL && lane == 0);
            const u64 further = of_q ? all : p.value_heads;
            float *to = place(n) + (of_q ? 0 : 4 * PADDED) + lane / quads * PADDED + lane % quads * 4, *other_to = place(n) + (of_q ? VALUES : DECAY) + lane;
#pragma unroll 1
            for (u32 end = min(n / BATCH * BATCH + BATCH, count); n < end; n += 2) {
                if (has_piece) cp_async_16(to, piece);
                if (has_other) cp_async_4(other_to, other);
                if (BY_CHANNEL && !of_q && has_piece) cp_async_16(to + 4 * PADDED, p.decays + ((u64)(start + n) * p.value_heads + h) * KEYS + lane * 4);
                piece += 2 * all, other += 2 * further, to += 2 * ROW, other_to += 2 * ROW;
            }
        };
        __syncthreads();
        ask(0);
        // Threads without a column compute the last one.
        float* const state = p.states.row(p.rows[s]) + ((u64)h * KEYS + part) * p.value_dim + min(first + c, p.value_dim - 1);
        float column[EACH], *at = state;
#pragma unroll
        for (u32 i = 0; i < EACH; i++, at += step) column[i] = *at;
        cp_async_wait_all();
        __syncthreads();
        ask(BATCH);
        // The elements of a token's q or k that a thread has.
        auto lanes = [&](const float* at, u32 of, float (&to)[EACH]) {
            const float4* from = (const float4*)(at + (of + part) * PADDED);
#pragma unroll
            for (u32 i = 0; i < EACH / 4; i++) {
                const float4 x = from[i];
                to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
            }
        };
        // Of this token and the next one. `fade`, or `fades`: what the state fades by behind this one; behind the last one it stays as it is.
        float q[2][EACH], k[2][EACH], fades[EACH], held = 0.0f, v = place(0)[VALUES + c], beta = place(0)[BETA], fade = count > 1 ? place(1)[DECAY] : 1.0f;
        if (BY_CHANNEL) lanes(place(0), 8, fades);
        lanes(place(0), 0, q[0]);
        lanes(place(0), 4, k[0]);
        lanes(place(min(1, count - 1)), 4, k[1]);
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            column[i] = mul(column[i], BY_CHANNEL ? fades[i] : place(0)[DECAY]);
            held = fma(column[i], k[0][i], held);
        }
        float* out = p.out.row(start) + h * p.value_dim + first + c;
        auto token = [&](u32 n, const float (&own_q)[EACH], float (&next_q)[EACH], float (&own_k)[EACH], const float (&next_k)[EACH]) {
            if ((n + 2) % BATCH == 0 && n + 2 < count) {
                // The next tokens are there, and all threads are done with those whose place is taken.
                cp_async_wait_all();
                __syncthreads();
                ask(n + 2 + BATCH);
            }
            const float *next = place(min(n + 1, count - 1)), *second = place(min(n + 2, count - 1));
            lanes(next, 0, next_q);
            const float next_v = next[VALUES + c], next_beta = next[BETA], next_fade = n + 2 < count ? second[DECAY] : 1.0f;
            held = add(held, __shfl_xor_sync(ALL, held, 16));
            held = add(held, __shfl_xor_sync(ALL, held, 8));
            const float d = mul(sub(v, held), beta);
            float o = 0.0f;
            held = 0.0f;
#pragma unroll
            for (u32 i = 0; i < EACH; i++) column[i] = fma(own_k[i], d, column[i]);
            if (KEEP && p.kept[start + n] != NOT_KEPT && inside) {
                float* kept = p.states.row(p.kept[start + n]) + ((u64)h * KEYS + part) * p.value_dim + first + c;
#pragma unroll
                for (u32 i = 0; i < EACH; i++, kept += step) *kept = column[i];
            }
            lanes(second, 4, own_k);
            if (BY_CHANNEL) lanes(n + 1 < count ? next + 8 * PADDED : ones, 0, fades);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                o = fma(column[i], own_q[i], o);
                column[i] = mul(column[i], BY_CHANNEL ? fades[i] : fade);
                held = fma(column[i], next_k[i], held);
            }
            o = add(o, __shfl_xor_sync(ALL, o, 16));
            o = add(o, __shfl_xor_sync(ALL, o, 8));
            if (part == 0 && inside) *out = o;
            out += p.out.stride;
            v = next_v, beta = next_beta, fade = next_fade;
        };
        // Two tokens at a time, without a branch between them: behind a branch, the second one's data would be read no sooner.
        u32 n = 0;
#pragma unroll 1
        for (; n + 2 <= count; n += 2) {
            token(n, q[0], q[1], k[0], k[1]);
            token(n + 1, q[1], q[0], k[1], k[0]);
        }
        if (n < count) token(n, q[0], q[1], k[0], k[1]);
        at = state;
        if (!inside) continue;
#pragma unroll
        for (u32 i = 0; i < EACH; i++, at += step) *at = column[i];
    }
}

#define RECUR(NAME, KEYS, BY_CHANNEL, KEEP) \
    extern "C" __global__ void __launch_bounds__(128) NAME(const __grid_constant__ Delta p) { begin(); recur_kept<KEYS, BY_CHANNEL, KEEP>(p); }

RECUR(delta_recur_64, 64, false, false)
RECUR(delta_recur_128, 128, false, false)
RECUR(delta_recur_keep_64, 64, false, true)
RECUR(delta_recur_keep_128, 128, false, true)
RECUR(delta_recur_channels_64, 64, true, false)
RECUR(delta_recur_channels_128, 128, true, false)
RECUR(delta_recur_channels_keep_64, 64, true, true)
RECUR(delta_recur_channels_keep_128, 128, true, true)

// A warp takes a value head of a token: its norm, gated by z, where it lies.
extern "C" __global__ void delta_norm(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < p.value_heads; h += blockDim.x / WARP) {
            float* out = p.out.row(t) + h * p.value_dim;
            const float* z = p.z.row(t) + h * p.value_dim;
            float inv = inverse_rms(out, p.value_dim, p.norm.eps);
            __syncwarp();
            for (u32 i = lane; i < p.value_dim; i += WARP) {
                const float gate = sigmoid(z[i]);
                out[i] = mul(mul(mul(out[i], inv), p.norm.weight[i]), p.sigmoid_gate ? gate : mul(z[i], gate));
            }
        }
    }
}
