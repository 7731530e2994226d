// Blocks of the kernels that are routers.
#pragma once
#include "format/quads.cuh"

// Rows of a block, one for each half of its first warp; OF_ROW threads bring each of these, and the norm's weights.
static const u32 ROUTER_ROWS = 2, ROUTE_THREADS = (ROUTER_ROWS + 1) * OF_ROW;
