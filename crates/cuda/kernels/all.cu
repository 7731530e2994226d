// Everything in one module.
#include "attention.cu"
#include "delta.cu"
#include "encode.cu"
#include "matmul.cu"
#include "mixture.cu"
