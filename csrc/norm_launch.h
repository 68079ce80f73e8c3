// Launching of the CUDA kernels: how many threads a row gets, how many blocks run, and the choice
// between 16-byte chunks and single elements.
#pragma once

#include "norm_kernels.h"

namespace autoshard {
namespace {

inline int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class... Pointers>
bool allows_wide(const NormShape& shape, const Dropout* dropout, Pointers... pointers) {
  if (shape.hidden * element_bytes(shape.dtype) % 16 != 0 || !(is_aligned(pointers) && ...)) {
    return false;
  }
  if (dropout == nullptr) return true;
  return (dropout->sample_elements | dropout->first | dropout->outer_stride) % 4 == 0;
}

struct Layout {
  dim3 block;
  int64_t rows_per_block;
};

inline Layout layout_of(const NormShape& shape, int width, int kept, int most_threads) {
  const int64_t chunks = shape.hidden / width;
  const int64_t warps = (chunks + kept * kWarp - 1) / (kept * kWarp);
  const int64_t wanted = (warps > 0 ? warps : 1) * kWarp;
  const int threads = static_cast<int>(wanted < most_threads ? wanted : most_threads);
  const int rows = threads > kWarp ? 1 : kShortThreads / kWarp;
  return {dim3(threads, rows), rows};
}

inline Layout backward_layout(const NormShape& shape, int width, bool drops) {
  return layout_of(shape, width, kBackwardKept, drops ? kDropThreads : kMostThreads);
}

inline int backward_blocks(const NormShape& shape, const Layout& layout) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  // One wave: about 512 threads of 128 registers fill a multiprocessor.
  const int64_t each = kMostThreads / (layout.block.x * layout.block.y);
  const int64_t wave = processors * each;
  const int64_t needed = (shape.rows + layout.rows_per_block - 1) / layout.rows_per_block;
  return static_cast<int>(needed < wave ? (needed > 0 ? needed : 1) : wave);
}

template <class T, int kWidth>
int launch_forward(const ForwardArgs& args, cudaStream_t stream) {
  const Layout layout = layout_of(args.f.shape, kWidth, kForwardKept, kMostThreads);
  const int64_t blocks = (args.f.shape.rows + layout.rows_per_block - 1) / layout.rows_per_block;
  if (blocks == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (args.f.mean == nullptr) {
    AUTOSHARD_LAUNCH((forward_kernel<T, kWidth, true>), grid, layout.block, stream, args);
  } else {
    AUTOSHARD_LAUNCH((forward_kernel<T, kWidth, false>), grid, layout.block, stream, args);
  }
  return cudaGetLastError();
}

template <class T, int kWidth, bool kDrop>
void launch_gradient(const BackwardArgs& args, dim3 grid, dim3 block, cudaStream_t stream) {
  if (args.b.mean == nullptr) {
    AUTOSHARD_LAUNCH((backward_kernel<T, kWidth, true, kDrop>), grid, block, stream, args);
  } else {
    AUTOSHARD_LAUNCH((backward_kernel<T, kWidth, false, kDrop>), grid, block, stream, args);
  }
}

template <class T, int kWidth>
int launch_backward(const BackwardArgs& args, cudaStream_t stream) {
  const NormBackward& b = args.b;
  const NormShape& shape = b.shape;
  const Layout layout = backward_layout(shape, kWidth, b.dx != nullptr);
  const int blocks = backward_blocks(shape, layout);
  const size_t bytes = sizeof(float) * kGradients * blocks * shape.hidden;
  const int cleared = cudaMemsetAsync(args.partials, 0, bytes, stream);
  if (cleared != cudaSuccess) return cleared;
  const dim3 grid(blocks);
  if (b.dx == nullptr) {
    launch_gradient<T, kWidth, false>(args, grid, layout.block, stream);
  } else {
    launch_gradient<T, kWidth, true>(args, grid, layout.block, stream);
  }
  if (b.dweight == nullptr && b.dbias == nullptr && b.dinput_bias == nullptr) {
    return cudaGetLastError();
  }
  const FinishArgs finish = {args.partials, blocks, shape.hidden, shape.parameter_dtype,
                             b.dweight,      b.dbias, b.dinput_bias};
  const dim3 columns(static_cast<unsigned>((shape.hidden + kWarp - 1) / kWarp), kGradients);
  AUTOSHARD_LAUNCH(finish_kernel, columns, dim3(kWarp, kFinishRows), stream, finish);
  return cudaGetLastError();
}

template <class T>
int forward_as(const NormForward& f, cudaStream_t stream) {
  const ForwardArgs args = {f, f.dropout == nullptr ? Dropout{} : *f.dropout,
                            f.dropout != nullptr || f.input_bias != nullptr,
                            f.shape.parameter_dtype == DType::kFloat32};
  const bool wide = allows_wide(f.shape, f.dropout, f.x, f.residual, f.y, f.s, f.weight, f.bias,
                                f.input_bias);
  return wide ? launch_forward<T, 16 / sizeof(T)>(args, stream) : launch_forward<T, 1>(args, stream);
}

template <class T>
int backward_as(const NormBackward& b, float* workspace, cudaStream_t stream) {
  const BackwardArgs args = {b, b.dropout == nullptr ? Dropout{} : *b.dropout,
                             b.shape.parameter_dtype == DType::kFloat32, workspace};
  const bool wide = allows_wide(b.shape, b.dropout, b.dy, b.ds, b.s, b.weight, b.dresidual, b.dx);
  return wide ? launch_backward<T, 16 / sizeof(T)>(args, stream)
              : launch_backward<T, 1>(args, stream);
}

template <class T, int kWidth>
int launch_dropout(const DropoutCall& call, cudaStream_t stream) {
  const DropoutArgs args = {call, call.run / kWidth};
  const int64_t blocks = (call.runs * args.chunks + kShortThreads - 1) / kShortThreads;
  if (blocks == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(blocks));
  AUTOSHARD_LAUNCH((dropout_kernel<T, kWidth>), grid, dim3(kShortThreads), stream, args);
  return cudaGetLastError();
}

template <class T>
int dropout_as(const DropoutCall& call, cudaStream_t stream) {
  const NormShape shape = {call.runs, call.run, call.dtype, call.dtype};
  return allows_wide(shape, &call.dropout, call.x, call.y)
             ? launch_dropout<T, 16 / sizeof(T)>(call, stream)
             : launch_dropout<T, 1>(call, stream);
}

// Floats of workspace that a backward may need.  Alignment and dropout choose the layout at launch:
// this is room for the largest.
inline int64_t backward_floats(const NormShape& shape) {
  const int wide = static_cast<int>(16 / element_bytes(shape.dtype));
  int most = 0;
  for (const int width : {1, wide}) {
    for (const bool drops : {false, true}) {
      const int blocks = backward_blocks(shape, backward_layout(shape, width, drops));
      most = blocks > most ? blocks : most;
    }
  }
  return kGradients * shape.hidden * static_cast<int64_t>(most);
}

}  // namespace
}  // namespace autoshard
