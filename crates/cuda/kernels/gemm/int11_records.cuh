// Sizes of what gemm/int11_records.cu makes.
#pragma once
#include "prim/numerics.cuh"

// Rows of a record, its integers' bytes, and those of one piece's scales.
static const u32 RECORD_ROWS = 128, RECORD_INTEGERS = 16384, RECORD_SCALES = 4 * RECORD_ROWS;
// Bytes of 128 tokens' integers, and of their sums.
static const u32 TOKEN_INTEGERS = 16384, TOKEN_SUMS = 4 * RECORD_SCALES;
