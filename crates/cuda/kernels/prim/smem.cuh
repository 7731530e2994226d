// Dynamic shared memory: as many bytes as the kernel was launched with.
#pragma once

// What a kernel was launched with of shared memory.
extern __shared__ float smem[];
