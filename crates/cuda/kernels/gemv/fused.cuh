// What the fused kernels for one token take, and how they load rows and deal them to warps.
#pragma once
#include "gemv/parts.cuh"
#include "prim/numerics.cuh"

// Where the rows of a matrix with interleaved heads go. Each `period` rows are a head with up to four runs, which begin at `starts`; the next head's run goes
// `columns` further in its output. Runs that do not exist start at the largest number.
struct Interleaved {
    float* outs[4];
    u32 starts[4];
    u32 columns[4];
    u32 period;
    u32 unused;
};

struct GemvFused {
    FusedMatrix parts[3];
    // Of each part, if `interleaved`.
    Interleaved heads[3];
    const float* x;
    // Null: no norm.
    const float* norm;
    u64 row_bytes;
    float eps;
    u32 cols;
    // Sets of rows that a warp takes together, over all matrices. Those of gate and up alternate.
    u32 sets;
    // The first sets of the second and of the third matrix.
    u32 second;
    u32 third;
    u32 log_lanes;
    u32 gated;
    u32 accumulate;
    u32 type;
    u32 interleaved;
};

// Where a row's result goes.
__device__ __forceinline__ float* result_of(const GemvFused& p, u32 set, u32 row, u32 rows_of_set) {
    const u32 part = p.gated || set < p.second ? 0 : set < p.third ? 1 : 2;
    if (!p.interleaved) return p.parts[part].out + row;
    const Interleaved& heads = p.heads[part];
    const u32 own = row - rows_of_set * (part == 0 ? 0 : part == 1 ? p.second : p.third), head = own / heads.period, at = own - head * heads.period;
    u32 run = 0;
#pragma unroll
    for (u32 i = 1; i < 4; i++) run += at >= heads.starts[i];
    return heads.outs[run] + (u64)head * heads.columns[run] + (at - heads.starts[run]);
}

// Eight floats; zeros if they are not `inside`.
__device__ __forceinline__ void load_eight(float (&v)[8], const float* x, u32 i, bool inside) {
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (inside) {
        a = ((const float4*)x)[2 * i];
        b = ((const float4*)x)[2 * i + 1];
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The same past the first-level cache, which may hold an older value.
__device__ __forceinline__ void load_eight_written(float (&v)[8], const float* x, u32 i, bool inside) {
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (inside) {
        a = __ldcg((const float4*)x + 2 * i);
        b = __ldcg((const float4*)x + 2 * i + 1);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The set that a warp takes next.
__device__ __forceinline__ u32 set_after(u32 set, u32 together, u32 task, u32 warps) {
    set += together;
    return set & (task - 1) ? set : set + (warps - 1) * task;
}
