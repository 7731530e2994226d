// Sizes of what gemm/int11_split.cu makes.
#pragma once
#include "prim/numerics.cuh"

static const u32 RECORD_ROWS = 128, RECORD_UNITS = 16384, RECORD_BYTES = RECORD_UNITS + 2 * RECORD_ROWS * 4;
