// Residual add + LayerNorm or RMSNorm, optionally with bias and dropout before the add: the
// arguments that the CPU and CUDA kernels share.
//
// What is fused, per row of `hidden` elements:
//   t = dropout(x + input_bias)          only with `dropout` or `input_bias`, in float32
//   s = t + residual                     rounded to the storage type, as an eager add rounds it
//   y = (s - mean) * rstd * weight + bias        LayerNorm
//   y = s * rstd * weight                        RMSNorm (mean is null)
//
// Storage: float32, bfloat16 or float16, one type for x, residual, s, y and their gradients.
// Weight and bias: that type or float32.  Statistics and all accumulation: float32.
//
// Memory traffic in units of rows * hidden elements (parameters and statistics are negligible):
//                               unfused                                          fused
//   forward                     add 3 + norm 2                       = 5         4
//   backward                    norm 3 + add 3                       = 6         4
//   forward, bias + dropout     bias 2 + dropout 2.25 + add 3 + norm 2 = 9.25    4
//   backward, bias + dropout    norm 3 + add 3 + dropout 2.25 + bias sum 1 = 9.25  5
// (a stored dropout mask is a quarter unit in float32; here it is recomputed, never stored).
#pragma once

#include <cstdint>

namespace autoshard {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The keys of the random generator, and where local rows lie in the global tensor.  `rng` points to
// three numbers on the device of the data: seed, step, and the global index of the micro-batch's
// first sample.  The global index of element `col` of local row `row` is
//   rng[2] * sample_elements + first + (row / inner_rows) * outer_stride
//     + (row % inner_rows) * hidden + col,
// which covers a shard of the batch, of the sequence, or of both.
struct Dropout {
  float scale = 1.0f;      // 1 / (1 - p)
  uint32_t threshold = 0;  // a word below it drops the element; 0 keeps all
  uint32_t site = 0;
  const int64_t* rng = nullptr;
  int64_t sample_elements = 0;
  int64_t first = 0;
  int64_t inner_rows = 1;
  int64_t outer_stride = 0;
};

struct NormShape {
  int64_t rows = 0;
  int64_t hidden = 0;
  DType dtype = DType::kFloat32;
  DType parameter_dtype = DType::kFloat32;
};

struct NormForward {
  NormShape shape;
  const void* x = nullptr;
  const void* residual = nullptr;
  const void* weight = nullptr;      // null: 1
  const void* bias = nullptr;        // null: 0
  const void* input_bias = nullptr;  // null: 0; added to x before dropout
  const Dropout* dropout = nullptr;  // null: none
  void* y = nullptr;
  void* s = nullptr;
  float* mean = nullptr;  // null: RMSNorm
  float* rstd = nullptr;
  double eps = 0.0;
};

struct NormBackward {
  NormShape shape;
  const void* dy = nullptr;
  const void* ds = nullptr;  // null: s has no other user
  const void* s = nullptr;
  const float* mean = nullptr;  // null: RMSNorm
  const float* rstd = nullptr;
  const void* weight = nullptr;
  const Dropout* dropout = nullptr;
  void* dresidual = nullptr;    // gradient of the sum
  void* dx = nullptr;           // null: equal to dresidual, and no dinput_bias
  void* dweight = nullptr;      // null: not wanted
  void* dbias = nullptr;        // null: not wanted
  void* dinput_bias = nullptr;  // null: not wanted
};

// Dropout alone, its own backward too: `runs` stretches of `run` neighbouring elements; stretch i
// begins at global index rng[2] * sample_elements + first + i * outer_stride.  Bytes moved: 2 units
// (eager moves 2.25 and stores the mask).
struct DropoutCall {
  int64_t runs = 0;
  int64_t run = 0;
  DType dtype = DType::kFloat32;
  const void* x = nullptr;
  void* y = nullptr;
  Dropout dropout;
};

// CPU. `threads` is an upper bound; results do not depend on it.
void dropout_cpu(const DropoutCall& args, int threads);
void add_norm_forward_cpu(const NormForward& args, int threads);
void add_norm_backward_cpu(const NormBackward& args, int threads);

// The instruction sets that this build has and this machine runs, best first.
const char* cpu_instruction_sets();
// Uses the named set ("avx512", "avx2", "portable") from now on; false if it is not available.
bool use_cpu_instruction_set(const char* name);

// CUDA, launched on `stream` without waiting; returns a cudaError_t.  `workspace` holds the partial
// sums of the parameters' gradients: `workspace_floats` floats.
int dropout_cuda(const DropoutCall& args, void* stream);
int add_norm_forward_cuda(const NormForward& args, void* stream);
int add_norm_backward_cuda(const NormBackward& args, float* workspace, void* stream);
int64_t workspace_floats(const NormShape& shape);
const char* cuda_error_text(int error);

}  // namespace autoshard
