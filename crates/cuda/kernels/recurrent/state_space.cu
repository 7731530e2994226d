// Mamba-2 behind its short convolution: time steps, the recurrence token by token, and the norm of the gated output.
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/tensor.cuh"
#include "recurrent/convolution.cuh"

struct StateSpace {
    Tensor z;
    Tensor dt;
    Tensor out;
    // [rows, ..]: from this layer's part on, [state, head_dim] for each head.
    Tensor states;
    // [tokens, channels]: x, B and C behind the convolution.
    const float* mixed;
    // [heads] each
    const float* decay;
    const float* dt_bias;
    const float* skip;
    Norm norm;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    // As in `Convolution`.
    const u32* kept;
    u32 tokens;
    u32 count;
    u32 heads;
    u32 head_dim;
    u32 groups;
    u32 state;
};

// Where a token's x, B and C of a head are behind the convolution.
struct HeadInputs {
    u32 x;
    u32 b;
    u32 c;
    // From token to token.
    u64 stride;

    __device__ __forceinline__ HeadInputs(const StateSpace& p, u32 h) {
        const u32 inner = p.heads * p.head_dim, group = h / (p.heads / p.groups) * p.state;
        x = h * p.head_dim;
        b = inner + group;
        c = b + p.groups * p.state;
        stride = inner + 2 * p.groups * p.state;
    }
};

// A head's time step at a token, and what its state is multiplied by.
__device__ __forceinline__ float time_step(const StateSpace& p, u32 t, u32 h) { return softplus(add(p.dt.row(t)[h], p.dt_bias[h])); }
__device__ __forceinline__ float fade(const StateSpace& p, u32 h, float step) { return exp_(mul(p.decay[h], step)); }

__device__ __forceinline__ u32 kept_row(const StateSpace& p, u32 t) { return p.kept ? p.kept[t] : NOT_KEPT; }

// A thread takes a column of a head's state of a sequence through all its tokens; grid: (blocks of columns, heads, sequences). Shared memory: B and C of a token, [state] each.
extern "C" __global__ void state_space_recur(const __grid_constant__ StateSpace p) {
    begin();
    float *b = smem, *c = smem + p.state;
    const u32 h = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    const HeadInputs from(p, h);
    const bool inside = j < p.head_dim;
    const u64 place = (u64)h * p.state * p.head_dim + j;
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        float* state = p.states.row(p.rows[s]) + place;
        for (u32 t = p.starts[s]; t < p.starts[s + 1]; t++) {
            const float* mixed = p.mixed + t * from.stride;
            __syncthreads();
            for (u32 i = threadIdx.x; i < p.state; i += blockDim.x) b[i] = mixed[from.b + i], c[i] = mixed[from.c + i];
            __syncthreads();
            if (!inside) continue;
            const float step = time_step(p, t, h), faded = fade(p, h, step), x = mixed[from.x + j], u = mul(x, step);
            const u32 row = kept_row(p, t);
            float* kept = row == NOT_KEPT ? nullptr : p.states.row(row) + place;
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.state; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.state) {
                        const u64 at = (u64)(i + lane) * p.head_dim;
                        const float next = fma(b[i + lane], u, mul(state[at], faded));
                        state[at] = next;
                        if (kept) kept[at] = next;
                        sums[lane] = fma(next, c[i + lane], sums[lane]);
                    }
                }
            }
            p.out.row(t)[h * p.head_dim + j] = fma(p.skip[h], x, add(add(sums[0], sums[2]), add(sums[1], sums[3])));
        }
    }
}

// The same where a state has STATE rows: four threads of a warp have a column, which stays in their registers through all tokens, each the rows that are one number modulo 4, which
// are a lane of the sum. Tokens come STATE_BATCH at a time while those before them are computed.
static const u32 STATE_COLUMNS = 32, STATE_BATCH = 8, STATE_WARPS = 4;

template <u32 STATE> __device__ __forceinline__ void recur_in_registers(const StateSpace& p) {
    // Of a token: B and C by lanes, of which four meet in no bank, x of this block's columns, the time step and what the state is multiplied by.
    const u32 EACH = STATE / 4, PADDED = EACH + 8, X = 8 * PADDED, STEP = X + STATE_COLUMNS, FADE = STEP + 1, ROW = STEP + 4;
    __shared__ __align__(16) float rows[2 * STATE_BATCH * ROW];
    const u32 h = blockIdx.y, first = blockIdx.x * STATE_COLUMNS;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane / 8, c = warp * 8 + lane % 8;
    const bool inside = first + c < p.head_dim;
    const HeadInputs from(p, h);
    const u64 step = 4 * p.head_dim;
    // Threads without a column compute the last one.
    const u64 place = ((u64)h * STATE + part) * p.head_dim + min(first + c, p.head_dim - 1);
    const float skip = p.skip[h];
#pragma unroll 1
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        const u32 start = p.starts[s], count = p.starts[s + 1] - start;
        if (count == 0) continue;
        auto place_of = [&](u32 n) { return rows + n % (2 * STATE_BATCH) * ROW; };
        // The tokens of a batch from `n` on, a warp each.
        auto ask = [&](u32 n) {
            const u32 end = min(n + STATE_BATCH, count);
#pragma unroll 1
            for (n += warp; n < end; n += STATE_WARPS) {
                const float* mixed = p.mixed + (start + n) * from.stride;
                float* to = place_of(n);
#pragma unroll
                for (u32 i = lane; i < STATE; i += WARP) {
                    float* at = to + i % 4 * PADDED + i / 4;
                    cp_async_4(at, mixed + from.b + i);
                    cp_async_4(at + 4 * PADDED, mixed + from.c + i);
                }
                if (first + lane < p.head_dim) cp_async_4(to + X + lane, mixed + from.x + first + lane);
                if (lane == 0) {
                    const float own = time_step(p, start + n, h);
                    to[STEP] = own;
                    to[FADE] = fade(p, h, own);
                }
            }
        };
        __syncthreads();
        ask(0);
        float* const state = p.states.row(p.rows[s]) + place;
        float column[EACH], *at = state;
#pragma unroll
        for (u32 i = 0; i < EACH; i++, at += step) column[i] = *at;
        float* out = p.out.row(start) + h * p.head_dim + first + c;
#pragma unroll 1
        for (u32 n = 0; n < count; n++, out += p.out.stride) {
            if (n % STATE_BATCH == 0) {
                // This batch is there, and all threads are done with the one before, whose place the next one takes.
                cp_async_wait_all();
                __syncthreads();
                ask(n + STATE_BATCH);
            }
            const float* row = place_of(n);
            const float4 *of_b = (const float4*)(row + part * PADDED), *of_c = of_b + PADDED;
            const float x = row[X + c], u = mul(x, row[STEP]), faded = row[FADE];
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < EACH; i += 4) {
                const float4 four_b = of_b[i / 4], four_c = of_c[i / 4];
                const float b[4] = {four_b.x, four_b.y, four_b.z, four_b.w}, c[4] = {four_c.x, four_c.y, four_c.z, four_c.w};
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    column[i + e] = fma(b[e], u, mul(column[i + e], faded));
                    sum = fma(column[i + e], c[e], sum);
                }
            }
            const u32 keeps = kept_row(p, start + n);
            if (keeps != NOT_KEPT && inside) {
                float* kept = p.states.row(keeps) + place;
#pragma unroll
                for (u32 i = 0; i < EACH; i++, kept += step) *kept = column[i];
            }
            sum = add(sum, __shfl_xor_sync(ALL, sum, 16));
            sum = add(sum, __shfl_xor_sync(ALL, sum, 8));
            if (part == 0 && inside) *out = fma(skip, x, sum);
        }
        at = state;
        if (!inside) continue;
#pragma unroll
        for (u32 i = 0; i < EACH; i++, at += step) *at = column[i];
    }
}

extern "C" __global__ void __launch_bounds__(128) state_space_recur_64(const __grid_constant__ StateSpace p) { begin(); recur_in_registers<64>(p); }
extern "C" __global__ void __launch_bounds__(128) state_space_recur_128(const __grid_constant__ StateSpace p) { begin(); recur_in_registers<128>(p); }
extern "C" __global__ void __launch_bounds__(128) state_space_recur_256(const __grid_constant__ StateSpace p) { begin(); recur_in_registers<256>(p); }

// A block takes a group of heads of a token: it gates the output where it lies, and norms it. Grid: (tokens, groups).
extern "C" __global__ void __launch_bounds__(256) state_space_norm(const __grid_constant__ StateSpace p) {
    __shared__ float of_group;
    begin();
    const u32 width = p.heads / p.groups * p.head_dim;
    const u64 from = (u64)blockIdx.y * width;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        float* out = p.out.row(t) + from;
        const float* z = p.z.row(t) + from;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = mul(out[i], silu(z[i]));
        __syncthreads();
        if (threadIdx.x < WARP) {
            const float inv = inverse_rms(out, width, p.norm.eps);
            if (threadIdx.x == 0) of_group = inv;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = mul(mul(out[i], of_group), p.norm.weight[from + i]);
    }
}
