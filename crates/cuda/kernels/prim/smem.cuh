// Dynamic shared memory: as many bytes as the kernel was launched with.
#pragma once

// The shared memory that a kernel was launched with.
extern __shared__ float smem[];
