// What a device can do at best: read its memory, multiply integers on its tensor cores, begin kernels. A module of its own, which only `sluice bench roofline`
// has the driver compile.

typedef unsigned int u32;
typedef unsigned long long u64;

// Reads `n` vectors of 16 bytes, four of each thread under way at a time. Only sums that never occur are written, so that no read can be left out.
extern "C" __global__ void __launch_bounds__(512) probe_read(const uint4 *from, u64 n, u32 *out) {
    u64 step = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 *p = from + i + k * step;
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w) : "l"(p));
        }
#pragma unroll
        for (int k = 0; k < 4; k++) sum |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0xffffffffu) *out = sum;
}

// `rounds` times eight products of 16 x 32 and 32 x 8 in each warp, none of which waits for another of its round.
extern "C" __global__ void __launch_bounds__(256) probe_int8(u32 rounds, u32 *out) {
    int sums[8][4] = {};
    u32 a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = threadIdx.x * 0x01030507u + i;
    for (int i = 0; i < 2; i++) b[i] = threadIdx.x * 0x07050301u + i;
    for (u32 r = 0; r < rounds; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+r"(sums[k][0]), "+r"(sums[k][1]), "+r"(sums[k][2]), "+r"(sums[k][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    int sum = 0;
    for (int k = 0; k < 8; k++)
        for (int i = 0; i < 4; i++) sum |= sums[k][i];
    if (sum == 0x12345678) *out = sum;
}

extern "C" __global__ void probe_nothing() {}
