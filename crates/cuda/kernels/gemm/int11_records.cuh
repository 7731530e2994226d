// Sizes of what gemm/int11_records.cu makes.
#pragma once
#include "prim/numerics.cuh"

// Rows of a record, its integers' bytes, and those of one piece's scales.
static const u32 RECORD_ROWS = 128, RECORD_INTEGERS = 16384, RECORD_SCALES = 4 * RECORD_ROWS;
// Of 128 tokens: their integers' bytes, and with their sums.
static const u32 TOKEN_INTEGERS = 16384, TOKEN_BYTES = TOKEN_INTEGERS + 4 * RECORD_SCALES;
