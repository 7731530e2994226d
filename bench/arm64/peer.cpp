// llama.cpp's own inner loops, one product again and again: peer KERNEL ROWS COLUMNS TOKENS TIMES. Linked with arch/arm/quants.c and arch/arm/repack.cpp of ggml.
//
// It multiplies zeros and small numbers: the instructions do not depend on them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
typedef void dot(int, float *, size_t, const void *, size_t, const void *, size_t, int);
typedef void some(int, float *, size_t, const void *, const void *, int, int);
dot ggml_vec_dot_q4_0_q8_0, ggml_vec_dot_q4_K_q8_K;
some ggml_gemv_q4_0_4x4_q8_0, ggml_gemv_q4_0_4x8_q8_0, ggml_gemv_q4_K_8x4_q8_K, ggml_gemv_q4_K_8x8_q8_K;
some ggml_gemm_q4_0_4x4_q8_0, ggml_gemm_q4_0_4x8_q8_0, ggml_gemm_q4_K_8x4_q8_K, ggml_gemm_q4_K_8x8_q8_K;
}

// Bytes of a row's weights, and of a token's activations, for each 256 columns.
struct Kernel {
  const char *name;
  size_t weights, activations;
  dot *row_by_row;
  // Rows interleaved; one token, or four interleaved ones.
  some *one, *four;
};

static const Kernel kernels[] = {
    {"q4_0", 8 * 18, 8 * 34, ggml_vec_dot_q4_0_q8_0, nullptr, nullptr},
    {"q4_k", 144, 292, ggml_vec_dot_q4_K_q8_K, nullptr, nullptr},
    {"q4_0_4x4", 8 * 18, 8 * 34, nullptr, ggml_gemv_q4_0_4x4_q8_0, ggml_gemm_q4_0_4x4_q8_0},
    {"q4_0_4x8", 8 * 18, 8 * 34, nullptr, ggml_gemv_q4_0_4x8_q8_0, ggml_gemm_q4_0_4x8_q8_0},
    {"q4_k_8x4", 144, 292, nullptr, ggml_gemv_q4_K_8x4_q8_K, ggml_gemm_q4_K_8x4_q8_K},
    {"q4_k_8x8", 144, 292, nullptr, ggml_gemv_q4_K_8x8_q8_K, ggml_gemm_q4_K_8x8_q8_K},
};

int main(int, char **args) {
  const Kernel *kernel = kernels;
  while (strcmp(kernel->name, args[1]) != 0) kernel++;
  const int rows = atoi(args[2]), cols = atoi(args[3]), tokens = atoi(args[4]), times = atoi(args[5]);
  const size_t row = cols / 256 * kernel->weights, token = cols / 256 * kernel->activations;
  std::vector<uint8_t> w(rows * row + 64), x((tokens + 4) * token + 64);
  std::vector<float> y(size_t(rows) * (tokens + 4));
  for (int n = 0; n < times; n++) {
    if (kernel->row_by_row) {
#ifdef PAIRS
      // Two rows times two tokens, as ggml does it where there are products of matrices.
      for (int t = 0; tokens > 1 && t < tokens; t += 2)
        for (int r = 0; r < rows; r += 2) kernel->row_by_row(cols, &y[t * rows + r], rows, &w[r * row], row, &x[t * token], token, 2);
      if (tokens == 1)
#endif
      for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) kernel->row_by_row(cols, &y[t * rows + r], 0, &w[r * row], 0, &x[t * token], 0, 1);
    } else if (tokens == 1) {
      kernel->one(cols, y.data(), rows, w.data(), x.data(), 1, rows);
    } else {
      kernel->four(cols, y.data(), rows, w.data(), x.data(), tokens, rows);
    }
  }
  float sum = 0;
  for (float v : y) sum += v;
  printf("%g\n", sum);
}
