// Everything in one module.
#include "attend_last.cu"
#include "attention.cu"
#include "delta.cu"
#include "encode.cu"
#include "matmul.cu"
#include "mixture.cu"
#include "rows.cu"
#include "tiles.cu"
