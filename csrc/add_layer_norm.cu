// The CUDA side of add_layer_norm.h: picks the kernels of the storage type.  The kernels are in
// norm_kernels.h, their launch shapes in norm_launch.h.

#include "norm_launch.h"

namespace autoshard {

int add_norm_forward_cuda(const NormForward& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (args.shape.dtype) {
    case DType::kFloat32:
      return forward_as<float>(args, on);
    case DType::kBFloat16:
      return forward_as<bf16>(args, on);
    default:
      return forward_as<f16>(args, on);
  }
}

int add_norm_backward_cuda(const NormBackward& args, float* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (args.shape.dtype) {
    case DType::kFloat32:
      return backward_as<float>(args, workspace, on);
    case DType::kBFloat16:
      return backward_as<bf16>(args, workspace, on);
    default:
      return backward_as<f16>(args, workspace, on);
  }
}

int dropout_cuda(const DropoutCall& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (args.dtype) {
    case DType::kFloat32:
      return dropout_as<float>(args, on);
    case DType::kBFloat16:
      return dropout_as<bf16>(args, on);
    default:
      return dropout_as<f16>(args, on);
  }
}

int64_t workspace_floats(const NormShape& shape) { return backward_floats(shape); }

const char* cuda_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace autoshard
