// Paged attention: keys and values into their slots, and each query head of each token over what it sees.
#include "numerics.cuh"

// Where one layer's keys and values lie in a pool of blocks: src/attention.rs works the offsets out.
struct Cache {
    u8* pool;
    u64 block_bytes;
    // Bytes from a block's start to K, V and their scales.
    u64 k;
    u64 v;
    u64 k_scales;
    u64 v_scales;
    u32 block_tokens;
    u32 k_dim;
    u32 v_dim;
    u32 type;
};

static const u32 INT8 = 3;

__device__ __forceinline__ u32 size_of(u32 type) { return type == F32 ? 4 : type == INT8 ? 1 : 2; }

struct Place {
    u8* row;
    u8* scale;
};

// The scale of a row of integers, which may lie at any address.
__device__ __forceinline__ float read_scale(const u8* p) {
    if ((u64)p % 4 == 0) return *(const float*)p;
    return bits((u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24);
}

__device__ __forceinline__ void write_scale(u8* p, float scale) {
    for (u32 i = 0; i < 4; i++) p[i] = (u8)(bits(scale) >> 8 * i);
}

// One head's key or value in a slot (block number times tokens per block plus offset).
__device__ __forceinline__ Place place(const Cache& c, u64 rows, u64 scales, u32 dim, u64 slot, u32 kv_head) {
    u8* block = c.pool + slot / c.block_tokens * c.block_bytes;
    u64 row = (u64)kv_head * c.block_tokens + slot % c.block_tokens;
    return {block + rows + row * dim * size_of(c.type), block + scales + row * 4};
}

__device__ __forceinline__ float cached(const u8* row, u32 type, u32 i) {
    if (type == INT8) return (float)((const i8*)row)[i];
    return element(row, type, i);
}

// To bf16, denormals kept.
__device__ __forceinline__ u16 round_bf16(float x) {
    u32 b = bits(x);
    return is_nan(x) ? (u16)(b >> 16) | 0x40 : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Writes a row of `dim` elements, by a whole warp.
__device__ void store(const float* x, u32 dim, u32 type, Place to) {
    u32 lane = threadIdx.x % WARP;
    float inv = 0.0f;
    if (type == INT8) {
        u32 greatest = 0;
        for (u32 i = lane; i < dim; i += WARP) greatest = max(greatest, bits(x[i]) & 0x7fffffffu);
        float a = bits(warp_greatest(greatest));
        // With a NaN or an infinity: q = 0 and a scale of NaN.
        bool finite = is_finite(a);
        inv = div(127.0f, a);
        if (!finite || !is_finite(inv)) inv = 0.0f;
        if (lane == 0) write_scale(to.scale, finite ? div(a, 127.0f) : bits(0x7fc00000u));
    }
    for (u32 i = lane; i < dim; i += WARP) {
        float v = x[i];
        if (type == F32) ((float*)to.row)[i] = v;
        else if (type == F16) ((u16*)to.row)[i] = to_f16(v);
        else if (type == BF16) ((u16*)to.row)[i] = round_bf16(v);
        else ((i8*)to.row)[i] = (i8)to_i8(mul(v, inv));
    }
}

// A head in shared memory, normed and turned by a whole warp; its elements come from `x`.
__device__ void turn(const float* x, float* head, u32 dim, const Norm& norm, const float* angles, u32 half) {
    u32 lane = threadIdx.x % WARP;
    for (u32 i = lane; i < dim; i += WARP) head[i] = x[i];
    __syncwarp();
    if (norm.weight) {
        float inv = inverse_rms(head, dim, norm.eps);
        for (u32 i = lane; i < dim; i += WARP) head[i] = mul(mul(head[i], inv), norm.weight[i]);
        __syncwarp();
    }
    for (u32 i = lane; i < half; i += WARP) {
        float a = head[i], b = head[half + i], cos = angles[i], sin = angles[half + i];
        head[i] = fma(b, sub(0.0f, sin), mul(a, cos));
        head[half + i] = fma(a, sin, mul(b, cos));
    }
    __syncwarp();
}

struct Attention {
    Cache cache;
    Tensor q;
    Tensor k;
    Tensor v;
    Tensor out;
    Norm q_norm;
    Norm k_norm;
    // [positions, 2 * half]: cosines, then sines.
    const float* angles;
    // [heads]; null: none.
    const float* sinks;
    // [tokens]
    const u32* positions;
    const u32* sequences;
    const u64* slots;
    // The block tables of all sequences, and where each begins.
    const u32* tables;
    const u32* table_starts;
    u32 tokens;
    u32 heads;
    u32 kv_heads;
    u32 gated;
    u32 half;
    // 0: all positions.
    u32 window;
    float scale;
    float cap;
    u32 capped;
    u32 unused;
};

// A block of two warps takes a KV head of a token: one its key, the other its value. Shared memory: a key.
extern "C" __global__ void store_kv(const Attention p) {
    extern __shared__ float head[];
    u32 h = blockIdx.y;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        u64 slot = p.slots[t];
        const Cache& c = p.cache;
        if (threadIdx.x < WARP) {
            const float* angles = p.angles + (u64)p.positions[t] * 2 * p.half;
            turn(p.k.row(t) + h * c.k_dim, head, c.k_dim, p.k_norm, angles, p.half);
            store(head, c.k_dim, c.type, place(c, c.k, c.k_scales, c.k_dim, slot, h));
            __syncwarp();
        } else {
            store(p.v.row(t) + h * c.v_dim, c.v_dim, c.type, place(c, c.v, c.v_scales, c.v_dim, slot, h));
        }
    }
}

static const u32 PARTITION = 128;

// A block of four warps takes a query head of a token through all partitions in turn. Shared memory: q [k_dim] and o [v_dim].
extern "C" __global__ void __launch_bounds__(128) attend(const Attention p) {
    extern __shared__ float room[];
    __shared__ float scores[PARTITION];
    __shared__ float ends[2];
    const Cache& c = p.cache;
    float *q = room, *o = q + c.k_dim;
    u32 h = blockIdx.y, kv_head = h / (p.heads / p.kv_heads);
    u32 lane = threadIdx.x % 16, sixteen = threadIdx.x / 16;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        u32 position = p.positions[t];
        const u32* table = p.tables + p.table_starts[p.sequences[t]];
        const float* q_in = p.q.row(t) + (u64)h * c.k_dim * (p.gated ? 2 : 1);
        __syncthreads();
        // 1. the query
        if (threadIdx.x < WARP) turn(q_in, q, c.k_dim, p.q_norm, p.angles + (u64)position * 2 * p.half, p.half);
        __syncthreads();
        u32 seen = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
        float m = 0.0f, l = 0.0f;
        for (u32 base = seen / PARTITION * PARTITION; base <= position; base += PARTITION) {
            u32 from = max(seen, base), to = min(position + 1, base + PARTITION);
            // 2. scores: half a warp takes a position
            for (u32 i = sixteen; i < PARTITION; i += blockDim.x / 16) {
                u32 at = base + i;
                bool visible = at >= from && at < to;
                // Whole warps meet in the sum; what is not visible may not be there.
                if (!__any_sync(ALL, visible)) continue;
                float acc = 0.0f;
                Place key = {nullptr, nullptr};
                if (visible) {
                    u64 slot = (u64)table[at / c.block_tokens] * c.block_tokens + at % c.block_tokens;
                    key = place(c, c.k, c.k_scales, c.k_dim, slot, kv_head);
#pragma unroll 4
                    for (u32 d = 0; d < c.k_dim; d += 16) {
                        u32 e = d + lane;
                        bool inside = e < c.k_dim;
                        acc = fma(inside ? q[e] : 0.0f, inside ? cached(key.row, c.type, e) : 0.0f, acc);
                    }
                }
                float s = lane_tree(acc);
                if (visible && lane == 0) {
                    if (c.type == INT8) s = mul(s, read_scale(key.scale));
                    s = mul(s, p.scale);
                    if (p.capped) s = mul(tanh_(div(s, p.cap)), p.cap);
                    scores[i] = s;
                }
            }
            __syncthreads();
            // 3. weights: the first warp
            if (threadIdx.x < WARP) {
                float top = bits(NEGATIVE_INFINITY);
                for (u32 i = threadIdx.x; i < PARTITION; i += WARP) {
                    if (base + i >= from && base + i < to) top = greater(scores[i], top);
                }
                top = warp_greatest(top);
                float sum = 0.0f;
                for (u32 i = lane; i < PARTITION; i += 16) {
                    bool visible = base + i >= from && base + i < to;
                    float weight = visible ? exp_(sub(scores[i], top)) : 0.0f;
                    sum = add(sum, weight);
                    // Both halves of the warp have read it before one of them overwrites it.
                    __syncwarp();
                    if (visible && threadIdx.x < 16) {
                        if (c.type == INT8) {
                            u64 slot = (u64)table[(base + i) / c.block_tokens] * c.block_tokens + (base + i) % c.block_tokens;
                            weight = mul(weight, read_scale(place(c, c.v, c.v_scales, c.v_dim, slot, kv_head).scale));
                        }
                        scores[i] = weight;
                    }
                }
                sum = lane_tree(sum);
                if (threadIdx.x == 0) {
                    ends[0] = top;
                    ends[1] = sum;
                }
            }
            __syncthreads();
            // 4. the weighted sum of values, a thread a column, and its joining to what was before
            float m_next = ends[0], l_next = ends[1];
            bool first = base <= seen;
            float top = greater(m_next, m), a = exp_(sub(m, top)), b = exp_(sub(m_next, top));
            for (u32 d = threadIdx.x; d < c.v_dim; d += blockDim.x) {
                float sum = 0.0f;
#pragma unroll 4
                for (u32 at = from; at < to; at++) {
                    u64 slot = (u64)table[at / c.block_tokens] * c.block_tokens + at % c.block_tokens;
                    sum = fma(scores[at - base], cached(place(c, c.v, c.v_scales, c.v_dim, slot, kv_head).row, c.type, d), sum);
                }
                o[d] = first ? sum : fma(o[d], a, mul(sum, b));
            }
            l = first ? l_next : fma(l, a, mul(l_next, b));
            m = first ? m_next : top;
            __syncthreads();
        }
        // 5. the sink, the division, the gate
        float a = 1.0f;
        if (p.sinks) {
            float sink = p.sinks[h], top = greater(sink, m);
            a = exp_(sub(m, top));
            l = fma(l, a, exp_(sub(sink, top)));
        }
        float* out = p.out.row(t) + (u64)h * c.v_dim;
        for (u32 d = threadIdx.x; d < c.v_dim; d += blockDim.x) {
            float y = div(mul(o[d], a), l);
            if (p.gated) y = mul(y, sigmoid(q_in[c.k_dim + d]));
            out[d] = y;
        }
    }
}
