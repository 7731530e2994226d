// GatedDeltaNet: the short convolution, norms and gates, the delta rule token by token, the gated norm of its output. Where no sequence has more than one token two
// kernels do all of that, the last ones here.
#pragma once
#include "tensor.cuh"

struct Delta {
    Tensor qkv;
    Tensor z;
    Tensor b;
    Tensor a;
    Tensor out;
    // [taps, channels]
    Tensor conv;
    // [rows, ..]: from this layer's part on.
    Tensor states;
    const float* a_log;
    const float* dt_bias;
    Norm norm;
    // [tokens, channels], [tokens, value_heads] each: what the kernels leave for one another.
    float* mixed;
    float* decays;
    float* beta;
    // [tokens]
    const u32* sequences;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    u32 tokens;
    u32 count;
    u32 key_heads;
    u32 value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 taps;
    float scale;
    // Whether q and k lie by the lanes of their sums: elements of one number modulo 4 beside one another.
    u32 by_lanes;
    u32 unused;
};

static const float L2_EPS = 1e-6f;

__device__ __forceinline__ u32 channels(const Delta& p) { return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim; }

// The last inputs of the convolution of a sequence: [taps - 1, channels].
__device__ __forceinline__ float* window(const Delta& p, u32 sequence) {
    return p.states.row(p.rows[sequence]) + (u64)p.value_heads * p.key_dim * p.value_dim;
}

// Input `i` of a channel, counted from the window's start.
__device__ __forceinline__ float input(const Delta& p, u32 sequence, u32 i, u32 channel) {
    u32 before = p.taps - 1;
    if (i < before) return window(p, sequence)[(u64)i * channels(p) + channel];
    return p.qkv.row(p.starts[sequence] + i - before)[channel];
}

static const u32 MOST_TAPS = 4, CONVOLVED = 16;

// What `div(1, x)` is, since it is rounded correctly too, in fewer instructions.
__device__ __forceinline__ float inverse(float x) { return __frcp_rn(x); }

// A thread takes a channel of CONVOLVED tokens, of which each has the inputs of those before it but for one.
extern "C" __global__ void convolve(const __grid_constant__ Delta p) {
    begin();
    const u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    auto put = [&](u32 t, float y) { p.mixed[(u64)t * all + channel] = mul(y, inverse(add(1.0f, exp_(sub(0.0f, y))))); };
    for (u32 first = blockIdx.y * CONVOLVED; first < p.tokens; first += gridDim.y * CONVOLVED) {
        const u32 end = min(first + CONVOLVED, p.tokens);
        if (p.taps != MOST_TAPS) {
            for (u32 t = first; t < end; t++) {
                const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
                float y = 0.0f;
                for (u32 tap = 0; tap < p.taps; tap++) y = fma(p.conv.row(tap)[channel], input(p, sequence, i + tap, channel), y);
                put(t, y);
            }
            continue;
        }
        float weights[MOST_TAPS], past[MOST_TAPS];
#pragma unroll
        for (u32 tap = 0; tap < MOST_TAPS; tap++) weights[tap] = p.conv.row(tap)[channel];
        for (u32 t = first, next; t < end; t = next) {
            const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
            next = min(end, p.starts[sequence + 1]);
#pragma unroll
            for (u32 tap = 0; tap + 1 < MOST_TAPS; tap++) past[tap] = input(p, sequence, i + tap, channel);
            const float* from = p.qkv.row(t) + channel;
#pragma unroll 4
            for (; t < next; t++, from += p.qkv.stride) {
                past[MOST_TAPS - 1] = *from;
                float y = 0.0f;
#pragma unroll
                for (u32 tap = 0; tap < MOST_TAPS; tap++) {
                    y = fma(weights[tap], past[tap], y);
                    if (tap > 0) past[tap - 1] = past[tap];
                }
                put(t, y);
            }
        }
    }
}

// The last inputs become the window: a thread takes a channel of a sequence. Ascending, so that what is read was not written.
extern "C" __global__ void slide(const Delta p) {
    begin();
    u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    for (u32 s = blockIdx.y; s < p.count; s += gridDim.y) {
        u32 n = p.starts[s + 1] - p.starts[s];
        for (u32 i = 0; i + 1 < p.taps; i++) window(p, s)[(u64)i * all + channel] = input(p, s, i + n, channel);
    }
}

static const u32 MOST_BY_LANES = 128;

// A warp takes a head of q or k of a token; the block's first threads, its gates.
extern "C" __global__ void gates(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < 2 * p.key_heads; h += blockDim.x / WARP) {
            float* head = p.mixed + (u64)t * channels(p) + (u64)h * p.key_dim;
            float inv = div(1.0f, __fsqrt_rn(add(squares(head, p.key_dim), L2_EPS)));
            float scale = h < p.key_heads ? p.scale : 1.0f;
            if (p.by_lanes) {
                float x[MOST_BY_LANES / WARP];
#pragma unroll
                for (u32 m = 0; m < MOST_BY_LANES / WARP; m++) {
                    if (m * WARP < p.key_dim) x[m] = head[m * WARP + lane];
                }
                __syncwarp();
#pragma unroll
                for (u32 m = 0; m < MOST_BY_LANES / WARP; m++) {
                    if (m * WARP < p.key_dim) head[lane % 4 * (p.key_dim / 4) + m * WARP / 4 + lane / 4] = mul(mul(x[m], inv), scale);
                }
                continue;
            }
            __syncwarp();
            for (u32 i = lane; i < p.key_dim; i += WARP) head[i] = mul(mul(head[i], inv), scale);
        }
        for (u32 h = threadIdx.x; h < p.value_heads; h += blockDim.x) {
            u64 at = (u64)t * p.value_heads + h;
            p.decays[at] = exp_(mul(sub(0.0f, exp_(p.a_log[h])), softplus(add(p.a.row(t)[h], p.dt_bias[h]))));
            p.beta[at] = sigmoid(p.b.row(t)[h]);
        }
    }
}

// A thread takes a column of a value head's state of a sequence through all its tokens; grid: (blocks of columns, value heads, sequences). Shared memory:
// q and k of a token [key_dim] each.
extern "C" __global__ void recur(const Delta p) {
    begin();
    float *q = room, *k = room + p.key_dim;
    u32 h = blockIdx.y, all = channels(p), keys = p.key_heads * p.key_dim;
    u32 key_head = h / (p.value_heads / p.key_heads);
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
            float decay = p.decays[(u64)t * p.value_heads + h], beta = p.beta[(u64)t * p.value_heads + h];
            float v = mixed[2 * keys + h * p.value_dim + j];
            float held[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        held[lane] = fma(mul(state[(u64)(i + lane) * p.value_dim], decay), k[i + lane], held[lane]);
                    }
                }
            }
            float d = mul(sub(v, add(add(held[0], held[2]), add(held[1], held[3]))), beta);
            float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        float* at = state + (u64)(i + lane) * p.value_dim;
                        float next = fma(k[i + lane], d, mul(*at, decay));
                        *at = next;
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
// Shared memory: of RECUR_TOKENS tokens q and k by lanes, v of this block's columns, the decay and beta; RECUR_BATCH of them are brought at once.
static const u32 RECUR_COLUMNS = 32, RECUR_TOKENS = 32, RECUR_BATCH = RECUR_TOKENS / 4;

template <u32 KEYS> __device__ __forceinline__ void recur_kept(const Delta& p) {
    // Lanes are such that four of them meet in no bank.
    const u32 EACH = KEYS / 4, PADDED = EACH + 4, VALUES = 8 * PADDED, DECAY = VALUES + RECUR_COLUMNS, BETA = DECAY + 1, ROW = DECAY + 4;
    const u32 h = blockIdx.y, first = blockIdx.x * RECUR_COLUMNS, all = channels(p), keys = p.key_heads * KEYS, key_head = h / (p.value_heads / p.key_heads);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane / 8, c = warp * 8 + lane % 8;
    const bool inside = first + c < p.value_dim;
    const u64 step = 4 * p.value_dim;
#pragma unroll 1
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        const u32 start = p.starts[s], count = p.starts[s + 1] - start;
        if (count == 0) continue;
        auto place = [&](u32 n) { return room + n % RECUR_TOKENS * ROW; };
        // A part of the tokens from `n` on, each by two warps: one brings q and v, the other k and gates.
        auto ask = [&](u32 n) {
            const bool of_q = warp % 2 == 0;
            n += warp / 2;
            const u64 t = start + n;
            const u32 quads = EACH / 4;
            const float *row = p.mixed + t * all, *piece = row + (of_q ? 0 : keys) + key_head * KEYS + lane * 4;
            const float* other = of_q ? row + 2 * keys + h * p.value_dim + first + lane : (lane == 0 ? p.decays : p.beta) + t * p.value_heads + h;
            const bool has_piece = lane < KEYS / 4, has_other = of_q ? first + lane < p.value_dim : lane < 2;
            const u64 further = of_q ? all : p.value_heads;
            float *to = place(n) + (of_q ? 0 : 4 * PADDED) + lane / quads * PADDED + lane % quads * 4, *other_to = place(n) + (of_q ? VALUES : DECAY) + lane;
#pragma unroll 1
            for (u32 end = min(n / RECUR_BATCH * RECUR_BATCH + RECUR_BATCH, count); n < end; n += 2) {
                if (has_piece) copy_later(to, piece);
                if (has_other) copy_word_later(other_to, other);
                piece += 2 * all, other += 2 * further, to += 2 * ROW, other_to += 2 * ROW;
            }
        };
        __syncthreads();
        ask(0);
        // A column that is not there is the last.
        float* const state = p.states.row(p.rows[s]) + ((u64)h * KEYS + part) * p.value_dim + min(first + c, p.value_dim - 1);
        float column[EACH], *at = state;
#pragma unroll
        for (u32 i = 0; i < EACH; i++, at += step) column[i] = *at;
        copied();
        __syncthreads();
        ask(RECUR_BATCH);
        // What a thread has of a token's q or k.
        auto lanes = [&](const float* at, u32 of, float (&to)[EACH]) {
            const float4* from = (const float4*)(at + (of + part) * PADDED);
#pragma unroll
            for (u32 i = 0; i < EACH / 4; i++) {
                const float4 x = from[i];
                to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
            }
        };
        // Of this token and the next one. `fade`: what the state fades by behind this one; behind the last one it stays as it is.
        float q[2][EACH], k[2][EACH], held = 0.0f, v = place(0)[VALUES + c], beta = place(0)[BETA], fade = count > 1 ? place(1)[DECAY] : 1.0f;
        lanes(place(0), 0, q[0]);
        lanes(place(0), 4, k[0]);
        lanes(place(min(1, count - 1)), 4, k[1]);
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            column[i] = mul(column[i], place(0)[DECAY]);
            held = fma(column[i], k[0][i], held);
        }
        float* out = p.out.row(start) + h * p.value_dim + first + c;
        auto token = [&](u32 n, const float (&own_q)[EACH], float (&next_q)[EACH], float (&own_k)[EACH], const float (&next_k)[EACH]) {
            if ((n + 2) % RECUR_BATCH == 0 && n + 2 < count) {
                // Tokens from the second one behind this on are there, and all are through with those whose place is taken.
                copied();
                __syncthreads();
                ask(n + 2 + RECUR_BATCH);
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
            lanes(second, 4, own_k);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                o = fma(column[i], own_q[i], o);
                column[i] = mul(column[i], fade);
                held = fma(column[i], next_k[i], held);
            }
            o = add(o, __shfl_xor_sync(ALL, o, 16));
            o = add(o, __shfl_xor_sync(ALL, o, 8));
            if (part == 0 && inside) *out = o;
            out += p.out.stride;
            v = next_v, beta = next_beta, fade = next_fade;
        };
        // By two, with no question between them: what the second one needs would be read no sooner than there.
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

extern "C" __global__ void __launch_bounds__(128) recur_64(const __grid_constant__ Delta p) { begin(); recur_kept<64>(p); }
extern "C" __global__ void __launch_bounds__(128) recur_128(const __grid_constant__ Delta p) { begin(); recur_kept<128>(p); }

// A warp takes a value head of a token: its norm, gated by z, where it lies.
extern "C" __global__ void norm_gated(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < p.value_heads; h += blockDim.x / WARP) {
            float* out = p.out.row(t) + h * p.value_dim;
            const float* z = p.z.row(t) + h * p.value_dim;
            float inv = inverse_rms(out, p.value_dim, p.norm.eps);
            __syncwarp();
            for (u32 i = lane; i < p.value_dim; i += WARP) {
                out[i] = mul(mul(mul(out[i], inv), p.norm.weight[i]), silu(z[i]));
            }
        }
    }
}

// ---- a token of each sequence

// What counts is the time from the end of the kernel before to the end of these two: what the layer keeps of a sequence, which only kernels of the step before have
// written, is under way before the wait, and blocks compute for themselves what they share. What other kernels of this step have written is read past the first-level
// cache.

// `silu` of each. There are branches in an inverse, between which the exponentials would come one after the other.
template <int N> __device__ __forceinline__ void silu_of_all(float (&x)[N]) {
    float under[N];
#pragma unroll
    for (int i = 0; i < N; i++) under[i] = add(1.0f, exp_(sub(0.0f, x[i])));
#pragma unroll
    for (int i = 0; i < N; i++) computed(under[i]);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = mul(x[i], inverse(under[i]));
}

// Columns of a value head's state, and their output before its norm; grid: (blocks of columns, value heads, sequences), four threads to a column. Thread l of them has
// the keys that are l modulo 4, which are lane l of both sums. The first two warps make q and k, the next ones v, and one the gates. Windows stay as they are, since
// other blocks read them.
template <int KEYS, int COLUMNS> __device__ __forceinline__ void recur_one(const Delta& p) {
    // Keys of a thread; channels of q or k of a thread. Rows of q and k are such that no two threads meet in a bank when they write.
    const u32 EACH = KEYS / 4, HELD = KEYS / WARP, PADDED = EACH + 8;
    __shared__ __align__(16) float q[4 * PADDED], k[4 * PADDED];
    __shared__ float v[COLUMNS], decay, beta, held[4][COLUMNS], sums[4][COLUMNS];
    const u32 s = blockIdx.z, h = blockIdx.y, first = blockIdx.x * COLUMNS, t = p.starts[s], end = p.starts[s + 1];
    float* states = p.states.row(p.rows[s]);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // 1. The column. Addresses go from row to row by one addition.
    const u32 part = threadIdx.x / COLUMNS, c = threadIdx.x % COLUMNS;
    const bool inside = first + c < p.value_dim;
    const u64 step = 4 * p.value_dim;
    float *state = states + (h * KEYS + part) * p.value_dim + first + c, *next_state = state;
    float column[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; i++, next_state += step) column[i] = inside ? __ldcg(next_state) : 0.0f;
    // 2. The convolution but for its last tap
    const u32 keys = p.key_heads * KEYS, key_head = h * p.key_heads / p.value_heads, all = channels(p), before = p.taps - 1;
    u32 from = warp * keys + key_head * KEYS, count = KEYS;
    if (warp >= 2) {
        u32 skipped = (warp - 2) * WARP;
        from = 2 * keys + h * p.value_dim + first + skipped;
        count = skipped < COLUMNS && first + skipped < p.value_dim ? min(WARP, p.value_dim - first - skipped) : 0;
    }
    const float *past = states + p.value_heads * KEYS * p.value_dim + from + lane, *taps = p.conv.at + from + lane;
    float weights[MOST_TAPS - 1][HELD], inputs[MOST_TAPS - 1][HELD], last[HELD], y[HELD];
#pragma unroll
    for (u32 tap = 0; tap + 1 < MOST_TAPS; tap++) {
#pragma unroll
        for (u32 m = 0; m < HELD; m++) {
            const bool there = lane + WARP * m < count && tap < before;
            inputs[tap][m] = there ? __ldcg(past + WARP * m) : 0.0f;
            weights[tap][m] = there ? taps[WARP * m] : 0.0f;
        }
        past += all;
        if (tap < before) taps += p.conv.stride;
    }
#pragma unroll
    for (u32 m = 0; m < HELD; m++) last[m] = lane + WARP * m < count ? taps[WARP * m] : 0.0f;
    float rate = sub(0.0f, exp_(p.a_log[h]));
    const float bias = p.dt_bias[h];
    computed(rate);
    if (t == end) return;
#pragma unroll
    for (u32 m = 0; m < HELD; m++) {
        y[m] = 0.0f;
#pragma unroll
        for (u32 tap = 0; tap + 1 < MOST_TAPS; tap++) y[m] = tap < before ? fma(weights[tap][m], inputs[tap][m], y[m]) : y[m];
        computed(y[m]);
    }
    begin();
    // 3. q, k, v and the gates
    if (warp == 2 + COLUMNS / WARP) {
        float a = __ldcg(p.a.row(t) + h), b = __ldcg(p.b.row(t) + h);
        float g = mul(rate, softplus(add(a, bias)));
        if (lane == 0) decay = exp_(g), beta = sigmoid(b);
    } else {
        const float* x = p.qkv.row(t) + from + lane;
        float now[HELD];
#pragma unroll
        for (u32 m = 0; m < HELD; m++) now[m] = lane + WARP * m < count ? __ldcg(x + WARP * m) : 0.0f;
#pragma unroll
        for (u32 m = 0; m < HELD; m++) y[m] = fma(last[m], now[m], y[m]);
        silu_of_all(y);
        if (warp < 2) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (u32 m = 0; m < HELD; m += 2) {
                low = fma(y[m], y[m], low);
                high = fma(y[m + 1], y[m + 1], high);
            }
            float inv = inverse(__fsqrt_rn(add(wide_tree(low, high), L2_EPS))), scale = warp == 0 ? p.scale : 1.0f;
            float* to = (warp == 0 ? q : k) + lane % 4 * PADDED + lane / 4;
#pragma unroll
            for (u32 m = 0; m < HELD; m++) to[WARP / 4 * m] = mul(mul(y[m], inv), scale);
        } else if (lane < count) {
            v[(warp - 2) * WARP + lane] = y[0];
        }
    }
    __syncthreads();
    // 4. The delta rule
    const float4 *own_q = (const float4*)(q + part * PADDED), *own_k = (const float4*)(k + part * PADDED);
    const float fade = decay;
    float r = 0.0f, o = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) {
        float4 four = own_k[i / 4];
        float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            column[i + e] = mul(column[i + e], fade);
            r = fma(column[i + e], of[e], r);
        }
    }
    held[part][c] = r;
    __syncthreads();
    const float d = mul(sub(v[c], add(add(held[0][c], held[2][c]), add(held[1][c], held[3][c]))), beta);
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) {
        float4 four_k = own_k[i / 4], four_q = own_q[i / 4];
        float of_k[4] = {four_k.x, four_k.y, four_k.z, four_k.w}, of_q[4] = {four_q.x, four_q.y, four_q.z, four_q.w};
#pragma unroll
        for (u32 e = 0; e < 4; e++, state += step) {
            float next = fma(of_k[e], d, column[i + e]);
            if (inside) *state = next;
            o = fma(next, of_q[e], o);
        }
    }
    sums[part][c] = o;
    __syncthreads();
    if (part == 0 && inside) p.out.row(t)[h * p.value_dim + first + c] = add(add(sums[0][c], sums[2][c]), add(sums[1][c], sums[3][c]));
}

extern "C" __global__ void __launch_bounds__(128, 4) recur_one_64(const __grid_constant__ Delta p) {
    recur_one<64, 32>(p);
}

extern "C" __global__ void __launch_bounds__(128, 4) recur_one_128(const __grid_constant__ Delta p) {
    recur_one<128, 32>(p);
}

// The gated norm, a warp to a value head, and behind these blocks the windows, a thread to a channel; grid: (blocks, sequences). z and the inputs of the convolution
// are there before the wait: they are older than the kernel before.
template <int THREADS> __device__ __forceinline__ void norm_and_slide(const Delta& p) {
    // Elements of a head of a thread.
    const u32 HELD = 4, HEADS = THREADS / WARP;
    const u32 s = blockIdx.y, t = p.starts[s], blocks = (p.value_heads + HEADS - 1) / HEADS;
    if (p.starts[s + 1] == t) return;
    if (blockIdx.x < blocks) {
        const u32 lane = threadIdx.x % WARP, h = blockIdx.x * HEADS + threadIdx.x / WARP, count = h < p.value_heads ? p.value_dim : 0;
        const float *z = p.z.row(t) + h * p.value_dim + lane, *norm = p.norm.weight + lane;
        float* out = p.out.row(t) + h * p.value_dim + lane;
        float x[HELD], gates[HELD], weights[HELD];
#pragma unroll
        for (u32 m = 0; m < HELD; m++) {
            const bool there = lane + WARP * m < count;
            gates[m] = there ? __ldcg(z + WARP * m) : 0.0f;
            weights[m] = there ? norm[WARP * m] : 0.0f;
        }
        silu_of_all(gates);
#pragma unroll
        for (u32 m = 0; m < HELD; m++) computed(gates[m]);
        begin();
#pragma unroll
        for (u32 m = 0; m < HELD; m++) x[m] = lane + WARP * m < count ? __ldcg(out + WARP * m) : 0.0f;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (u32 m = 0; m < HELD; m += 2) {
            low = fma(x[m], x[m], low);
            high = fma(x[m + 1], x[m + 1], high);
        }
        float inv = inverse(__fsqrt_rn(add(div(wide_tree(low, high), (float)p.value_dim), p.norm.eps)));
#pragma unroll
        for (u32 m = 0; m < HELD; m++) {
            if (lane + WARP * m < count) out[WARP * m] = mul(mul(mul(x[m], inv), weights[m]), gates[m]);
        }
    } else {
        const u32 all = channels(p), channel = (blockIdx.x - blocks) * THREADS + threadIdx.x, before = channel < all ? p.taps - 1 : 0;
        float *to = window(p, s) + channel, x[MOST_TAPS - 1];
#pragma unroll
        for (u32 i = 0; i < MOST_TAPS - 1; i++) {
            const float* from = i + 1 < before ? to + (u64)(i + 1) * all : p.qkv.row(t) + channel;
            x[i] = i < before ? __ldcg(from) : 0.0f;
        }
        begin();
#pragma unroll
        for (u32 i = 0; i < MOST_TAPS - 1; i++) {
            if (i < before) to[(u64)i * all] = x[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) norm_gated_one(const __grid_constant__ Delta p) {
    norm_and_slide<128>(p);
}
