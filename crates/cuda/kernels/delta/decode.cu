// The delta rule where no sequence has more than one token: all of it in two kernels. The time from the end of the previous kernel to the end of these two is
// what counts. The state of a sequence, which only kernels of the previous step have written, is under way before the wait, and blocks compute for themselves
// what they share. What other kernels of this step have written is read past the first-level cache.
#include "delta/delta.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// `silu` of each, or `sigmoid`. An inverse has branches, which would serialise the exponentials between them.
template <int N> __device__ __forceinline__ void silu_of_all(float (&x)[N], bool is_sigmoid = false) {
    float under[N];
#pragma unroll
    for (int i = 0; i < N; i++) under[i] = add(1.0f, exp_(sub(0.0f, x[i])));
#pragma unroll
    for (int i = 0; i < N; i++) materialize(under[i]);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = is_sigmoid ? inverse(under[i]) : mul(x[i], inverse(under[i]));
}

// Columns of a value head's state, and their output before its norm; grid: (blocks of columns, value heads, sequences), four threads to a column. Thread l of them has
// the keys that are l modulo 4, which are lane l of both sums. The first two warps make q and k, the next ones v, and one the gates. Windows stay as they are, since
// other blocks read them.
template <int KEYS, int COLUMNS, bool BY_CHANNEL> __device__ __forceinline__ void recur_decode(const Delta& p) {
    // Keys of a thread; channels of q or k of a thread. Rows of q and k are such that no two threads meet in a bank when they write.
    const u32 EACH = KEYS / 4, HELD = KEYS / WARP, PADDED = EACH + 8;
    __shared__ __align__(16) float q[4 * PADDED], k[4 * PADDED], decays[BY_CHANNEL ? 4 * PADDED : 4];
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
    const u32 keys = p.key_heads * KEYS, key_head = key_head_of(p, h), all = channels(p), before = p.taps - 1;
    u32 from = warp * keys + key_head * KEYS, count = KEYS;
    if (warp >= 2) {
        u32 skipped = (warp - 2) * WARP;
        from = 2 * keys + h * p.value_dim + first + skipped;
        count = skipped < COLUMNS && first + skipped < p.value_dim ? min(WARP, p.value_dim - first - skipped) : 0;
    }
    const float *past = states + p.value_heads * KEYS * p.value_dim + from + lane, *taps = p.conv.at + from + lane;
    float weights[MAX_TAPS - 1][HELD], inputs[MAX_TAPS - 1][HELD], last[HELD], y[HELD];
#pragma unroll
    for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) {
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
    float rate = p.decay[h], biases[BY_CHANNEL ? HELD : 1];
#pragma unroll
    for (u32 m = 0; m < (BY_CHANNEL ? HELD : 1); m++) biases[m] = BY_CHANNEL ? p.dt_bias[h * KEYS + lane + WARP * m] : p.dt_bias[h];
    materialize(rate);
    if (t == end) return;
#pragma unroll
    for (u32 m = 0; m < HELD; m++) {
        y[m] = 0.0f;
#pragma unroll
        for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) y[m] = tap < before ? fma(weights[tap][m], inputs[tap][m], y[m]) : y[m];
        materialize(y[m]);
    }
    begin();
    // 3. q, k, v and the gates
    if (warp == 2 + COLUMNS / WARP) {
        const float b = __ldcg(p.b.row(t) + h);
        if (BY_CHANNEL) {
#pragma unroll
            for (u32 m = 0; m < HELD; m++) {
                const float a = __ldcg(p.a.row(t) + h * KEYS + lane + WARP * m);
                decays[lane % 4 * PADDED + lane / 4 + WARP / 4 * m] = channel_decay(p, rate, add(a, biases[BY_CHANNEL ? m : 0]));
            }
            if (lane == 0) beta = sigmoid(b);
        } else {
            const float a = __ldcg(p.a.row(t) + h);
            const float g = mul(rate, softplus(add(a, biases[0])));
            if (lane == 0) decay = exp_(g), beta = sigmoid(b);
        }
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
    const float4* own_decays = (const float4*)(decays + (BY_CHANNEL ? part * PADDED : 0));
    float4 fade = make_float4(decay, decay, decay, decay);
    float r = 0.0f, o = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) {
        float4 four = own_k[i / 4];
        if (BY_CHANNEL) fade = own_decays[i / 4];
        float of[4] = {four.x, four.y, four.z, four.w}, fades[4] = {fade.x, fade.y, fade.z, fade.w};
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            column[i + e] = mul(column[i + e], fades[e]);
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

#define DECODE(NAME, KEYS, BY_CHANNEL) \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME(const __grid_constant__ Delta p) { recur_decode<KEYS, 32, BY_CHANNEL>(p); }

DECODE(delta_decode_64, 64, false)
DECODE(delta_decode_128, 128, false)
DECODE(delta_decode_channels_64, 64, true)
DECODE(delta_decode_channels_128, 128, true)

// The gated norm, a warp to a value head, and behind these blocks the windows, a thread to a channel; grid: (blocks, sequences). z and the inputs of the convolution
// are there before the wait: they are older than the kernel before.
template <int THREADS> __device__ __forceinline__ void norm_and_slide(const Delta& p) {
    // Elements of a head that a thread has.
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
        silu_of_all(gates, p.sigmoid_gate);
#pragma unroll
        for (u32 m = 0; m < HELD; m++) materialize(gates[m]);
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
        float *to = window(p, s) + channel, x[MAX_TAPS - 1];
#pragma unroll
        for (u32 i = 0; i < MAX_TAPS - 1; i++) {
            const float* from = i + 1 < before ? to + (u64)(i + 1) * all : p.qkv.row(t) + channel;
            x[i] = i < before ? __ldcg(from) : 0.0f;
        }
        begin();
#pragma unroll
        for (u32 i = 0; i < MAX_TAPS - 1; i++) {
            if (i < before) to[(u64)i * all] = x[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) delta_decode_norm(const __grid_constant__ Delta p) {
    norm_and_slide<128>(p);
}
