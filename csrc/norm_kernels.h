// The CUDA kernels of fused add + norm.  What is computed and how many bytes it moves: add_layer_norm.h.
//
// A row is cut into chunks of kWidth elements: 16 bytes, one load instruction, when the addresses
// allow it, else one element.  `blockDim.x` threads share a row, `blockDim.y` rows share a block:
//   short rows    one warp a row, several rows a block; no barriers between passes
//   longer rows   one block a row
// A thread holds chunks threadIdx.x + k * blockDim.x.  The first few of them stay in
// registers in storage form between the passes over a row; those of still longer rows are read
// again, from the second-level cache.
//
// The backward keeps as many blocks as the device runs at once.  Each walks over many rows and adds
// its share of the parameters' gradients in registers; a second kernel adds the blocks' shares in
// a fixed order.  No atomics: the same device gives the same bits every time.
//
// The code compiles as plain C++ too, against tests/cuda/host_shim.h, where every CUDA thread is a
// thread of the host and the sanitizers watch.

#pragma once

#include "add_layer_norm.h"
#include "dtypes.h"
#include "philox.h"

#if defined(AUTOSHARD_HOST_SHIM)
#include "host_shim.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define AUTOSHARD_LAUNCH(kernel, grid, block, stream, args) kernel<<<grid, block, 0, stream>>>(args)
#endif

namespace autoshard {
namespace {

constexpr int kWarp = 32;
#if defined(AUTOSHARD_HOST_SHIM)
constexpr int kMostThreads = 64;  // fewer, so that tests reach every path with few threads
constexpr int kDropThreads = 64;
constexpr int kShortThreads = 64;
constexpr int kFinishRows = 2;
#else
constexpr int kMostThreads = 512;  // of a block: leaves each thread 128 registers
constexpr int kDropThreads = 256;  // the same for a backward that adds up a third gradient
constexpr int kShortThreads = 128;  // of a block of several short rows
constexpr int kFinishRows = 16;     // threads that share a column in the last sum
#endif
constexpr unsigned kAll = 0xffffffffu;

// How many chunks of a row a thread keeps in registers: as many as compile without spilling.  The
// backward keeps two inputs and adds up float32 gradients for each element.
constexpr int kForwardKept = 3;
constexpr int kBackwardKept = 2;

#if defined(AUTOSHARD_HOST_SHIM)
__device__ inline float widen(bf16 v) { return to_float(v); }
__device__ inline float widen(f16 v) { return to_float(v); }
__device__ inline void narrow(float v, bf16& out) { from_float(v, out); }
__device__ inline void narrow(float v, f16& out) { from_float(v, out); }
#else
__device__ inline float widen(bf16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
__device__ inline float widen(f16 v) { return __half2float(__ushort_as_half(v.bits)); }
__device__ inline void narrow(float v, bf16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(v));
}
__device__ inline void narrow(float v, f16& out) { out.bits = __half_as_ushort(__float2half_rn(v)); }
#endif
__device__ inline float widen(float v) { return v; }
__device__ inline void narrow(float v, float& out) { out = v; }

// A chunk in storage form.  The union lets 16 bytes move as one register quadruple.
template <class T, int kWidth>
struct Chunk {
  static_assert(sizeof(T) * kWidth == sizeof(uint4), "a wide chunk is one 16-byte load");
  union {
    uint4 raw;
    T value[kWidth];
  };
};
template <class T>
struct Chunk<T, 1> {
  union {
    T raw;
    T value[1];
  };
};

template <class T, int kWidth>
__device__ inline Chunk<T, kWidth> load_chunk(const void* row, int64_t chunk) {
  using Raw = decltype(Chunk<T, kWidth>::raw);
  Chunk<T, kWidth> out;
  out.raw = static_cast<const Raw*>(row)[chunk];
  return out;
}

template <class T, int kWidth>
__device__ inline void store_chunk(void* row, int64_t chunk, const float (&value)[kWidth]) {
  using Raw = decltype(Chunk<T, kWidth>::raw);
  Chunk<T, kWidth> out;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) narrow(value[j], out.value[j]);
  static_cast<Raw*>(row)[chunk] = out.raw;
}

// A parameter's elements of one chunk, whatever it is stored as; `missing` without a parameter.
template <class T, int kWidth>
__device__ inline void load_parameter(const void* parameter, bool is_float, int chunk,
                                      float missing, float (&out)[kWidth]) {
  if (parameter == nullptr) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = missing;
  } else if (is_float) {
    const float* from = static_cast<const float*>(parameter) + chunk * kWidth;
    if constexpr (kWidth == 1) {
      out[0] = from[0];
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + j);
        out[j] = four.x, out[j + 1] = four.y, out[j + 2] = four.z, out[j + 3] = four.w;
      }
    }
  } else {
    const Chunk<T, kWidth> stored = load_chunk<T, kWidth>(parameter, chunk);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = widen(stored.value[j]);
  }
}

// Sums over the threads of a row.  The exchange buffers alternate, so that one barrier a sum is
// enough: a buffer is written again only after the barrier of the other one.
struct RowSum {
  float (*exchange)[2][kMostThreads / kWarp];
  int turn = 0;

  __device__ void operator()(float& a, float& b) {
    warp_sum(a, b);
    if (blockDim.x == kWarp) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float(*here)[kMostThreads / kWarp] = exchange[turn];
    turn ^= 1;
    if (lane == 0) here[0][warp] = a, here[1][warp] = b;
    __syncthreads();
    const int warps = blockDim.x / kWarp;
    a = lane < warps ? here[0][lane] : 0.0f;
    b = lane < warps ? here[1][lane] : 0.0f;
    warp_sum(a, b);
  }

  __device__ static void warp_sum(float& a, float& b) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      a += __shfl_xor_sync(kAll, a, step);
      b += __shfl_xor_sync(kAll, b, step);
    }
  }
};

// Calls body(k, chunk) for each chunk of this thread; `k` is a constant below kKept for those kept
// in registers, and kKept for all others.
template <int kKept, class Body>
__device__ inline void each_chunk(int chunks, Body&& body) {
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const int chunk = threadIdx.x + k * blockDim.x;
    if (chunk < chunks) body(k, chunk);
  }
  for (int chunk = threadIdx.x + kKept * blockDim.x; chunk < chunks; chunk += blockDim.x) {
    body(kKept, chunk);
  }
}

// ---- dropout -----------------------------------------------------------------------------------

__device__ inline int64_t row_start(const Dropout& d, int64_t row, int64_t hidden) {
  return d.rng[2] * d.sample_elements + d.first + row / d.inner_rows * d.outer_stride +
         row % d.inner_rows * hidden;
}

__device__ inline uint32_t pick(const PhiloxWords& words, int lane) {
  return lane < 2 ? (lane == 0 ? words.word[0] : words.word[1])
                  : (lane == 2 ? words.word[2] : words.word[3]);
}

// Scales kept elements, zeroes dropped ones.  A wide chunk starts at a whole group of four words
// (the launcher sees to it); a single element picks its word.
template <int kWidth>
__device__ inline void drop(const Dropout& d, int64_t index, float (&value)[kWidth]) {
  if (d.threshold == 0) return;
  const uint32_t step = static_cast<uint32_t>(d.rng[1]);
  const uint64_t seed = static_cast<uint64_t>(d.rng[0]);
  if constexpr (kWidth == 1) {
    const PhiloxWords words = philox(static_cast<uint64_t>(index) >> 2, step, d.site, seed);
    value[0] *= pick(words, static_cast<int>(index & 3)) < d.threshold ? 0.0f : d.scale;
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const PhiloxWords words = philox(static_cast<uint64_t>(index + j) >> 2, step, d.site, seed);
#pragma unroll
      for (int w = 0; w < 4; ++w) value[j + w] *= words.word[w] < d.threshold ? 0.0f : d.scale;
    }
  }
}

struct DropoutArgs {
  DropoutCall call;
  int64_t chunks;  // of one run
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kShortThreads) dropout_kernel(DropoutArgs args) {
  const DropoutCall& call = args.call;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= call.runs * args.chunks) return;
  const int64_t run = at / args.chunks, chunk = at % args.chunks;
  const Chunk<T, kWidth> x = load_chunk<T, kWidth>(call.x, at);
  float value[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) value[j] = widen(x.value[j]);
  const int64_t first = row_start(call.dropout, run, 0);
  drop<kWidth>(call.dropout, first + chunk * kWidth, value);
  store_chunk<T, kWidth>(call.y, at, value);
}

// ---- forward -----------------------------------------------------------------------------------

struct ForwardArgs {
  NormForward f;
  Dropout dropout;
  bool drops;
  bool parameter_is_float;
};

template <class T, int kWidth>
__device__ inline void add_chunk(const ForwardArgs& args, int64_t row, int chunk,
                                 const Chunk<T, kWidth>& x, const Chunk<T, kWidth>& residual,
                                 float (&s)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) s[j] = widen(x.value[j]);
  if (args.drops) {
    float bias[kWidth];
    load_parameter<T, kWidth>(args.f.input_bias, args.parameter_is_float, chunk, 0.0f, bias);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) s[j] += bias[j];
    const int64_t hidden = args.f.shape.hidden;
    drop<kWidth>(args.dropout, row_start(args.dropout, row, hidden) + chunk * kWidth, s);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) s[j] += widen(residual.value[j]);
}

template <class T, int kWidth, bool kRms>
__global__ void __launch_bounds__(kMostThreads) forward_kernel(ForwardArgs args) {
  __shared__ float exchange[2][2][kMostThreads / kWarp];
  constexpr int kKept = kForwardKept;
  const NormForward& f = args.f;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  // Only a block of one-warp rows, which has no barriers, can have threads without a row.
  if (row >= f.shape.rows) return;
  const int chunks = static_cast<int>(f.shape.hidden / kWidth);
  const int64_t at = row * f.shape.hidden;
  const T* x = static_cast<const T*>(f.x) + at;
  const T* residual = static_cast<const T*>(f.residual) + at;
  T* s_row = static_cast<T*>(f.s) + at;
  T* y_row = static_cast<T*>(f.y) + at;
  RowSum row_sum{exchange};
  Chunk<T, kWidth> kept[kKept];

  float sum = 0.0f, squares = 0.0f;
  Chunk<T, kWidth> kept_x[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k) {  // all loads before the first use
    const int chunk = threadIdx.x + k * blockDim.x;
    if (chunk >= chunks) continue;
    kept_x[k] = load_chunk<T, kWidth>(x, chunk);
    kept[k] = load_chunk<T, kWidth>(residual, chunk);
  }
  each_chunk<kKept>(chunks, [&](int k, int chunk) {
    float s[kWidth];
    if (k < kKept) {
      add_chunk<T, kWidth>(args, row, chunk, kept_x[k], kept[k], s);
    } else {
      add_chunk<T, kWidth>(args, row, chunk, load_chunk<T, kWidth>(x, chunk),
                           load_chunk<T, kWidth>(residual, chunk), s);
    }
    Chunk<T, kWidth> stored;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      narrow(s[j], stored.value[j]);
      s[j] = widen(stored.value[j]);
      sum += s[j];
      squares += s[j] * s[j];
    }
    if (k < kKept) kept[k] = stored;
    store_chunk<T, kWidth>(s_row, chunk, s);
  });
  row_sum(sum, squares);

  // LayerNorm: the variance around the mean, and the mean corrected by what is left of the sum.
  const float count = static_cast<float>(f.shape.hidden);
  float mean = 0.0f, variance = squares / count;
  if constexpr (!kRms) {
    const float centre = sum / count;
    sum = squares = 0.0f;
    each_chunk<kKept>(chunks, [&](int k, int chunk) {
      const Chunk<T, kWidth> s = k < kKept ? kept[k] : load_chunk<T, kWidth>(s_row, chunk);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float v = widen(s.value[j]) - centre;
        sum += v;
        squares += v * v;
      }
    });
    row_sum(sum, squares);
    mean = centre + sum / count;
    variance = squares / count - (sum / count) * (sum / count);
    variance = variance < 0.0f ? 0.0f : variance;  // written so that NaN stays
  }
  const float rstd = 1.0f / sqrtf(variance + static_cast<float>(f.eps));
  if (threadIdx.x == 0) {
    if (!kRms) f.mean[row] = mean;
    f.rstd[row] = rstd;
  }
  each_chunk<kKept>(chunks, [&](int k, int chunk) {
    const Chunk<T, kWidth> s = k < kKept ? kept[k] : load_chunk<T, kWidth>(s_row, chunk);
    float y[kWidth], weight[kWidth], bias[kWidth];
    load_parameter<T, kWidth>(f.weight, args.parameter_is_float, chunk, 1.0f, weight);
    load_parameter<T, kWidth>(f.bias, args.parameter_is_float, chunk, 0.0f, bias);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      y[j] = (widen(s.value[j]) - mean) * rstd * weight[j] + bias[j];
    }
    store_chunk<T, kWidth>(y_row, chunk, y);
  });
}

// ---- backward ----------------------------------------------------------------------------------

enum Gradient { kWeight = 0, kBias = 1, kInputBias = 2, kGradients = 3 };

struct BackwardArgs {
  NormBackward b;
  Dropout dropout;
  bool parameter_is_float;
  float* partials;  // [gradient][block][hidden]
};

// This thread's share of the parameters' gradients: in registers for kept chunks, in its block's
// row of `partials` for the others (which no other thread touches).
template <int kWidth>
struct Shares {
  static constexpr int kKept = kBackwardKept;
  float kept[kKept][kWidth] = {};
  float* row;

  __device__ void add(int k, int chunk, const float (&value)[kWidth]) {
    if (k < kKept) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) kept[k][j] += value[j];
    } else {
      add_floats(chunk, value);
    }
  }

  __device__ void add_floats(int chunk, const float (&value)[kWidth]) {
    float* at = row + chunk * kWidth;
    if constexpr (kWidth == 1) {
      at[0] += value[0];
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        float4 four = *reinterpret_cast<float4*>(at + j);
        four.x += value[j], four.y += value[j + 1], four.z += value[j + 2], four.w += value[j + 3];
        *reinterpret_cast<float4*>(at + j) = four;
      }
    }
  }

  // Rows of one block take turns, in order, so that the sum has one order.
  __device__ void finish(int chunks) {
    for (int turn = 0; turn < static_cast<int>(blockDim.y); ++turn) {
      if (turn == static_cast<int>(threadIdx.y)) {
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
          const int chunk = threadIdx.x + k * blockDim.x;
          if (chunk < chunks) add_floats(chunk, kept[k]);
        }
      }
      __syncthreads();
    }
  }
};

template <class T, int kWidth, bool kRms, bool kDrop>
__device__ inline void gradient_row(const BackwardArgs& args, int64_t row, int chunks,
                                    RowSum& row_sum, Shares<kWidth>& dweight, Shares<kWidth>& dbias,
                                    Shares<kWidth>& dinput_bias) {
  constexpr int kKept = kBackwardKept;
  const NormBackward& b = args.b;
  const int64_t hidden = b.shape.hidden, at = row * hidden;
  const T* dy_row = static_cast<const T*>(b.dy) + at;
  const T* s_row = static_cast<const T*>(b.s) + at;
  const T* ds_row = b.ds == nullptr ? nullptr : static_cast<const T*>(b.ds) + at;
  const float mean = kRms ? 0.0f : b.mean[row], rstd = b.rstd[row];
  Chunk<T, kWidth> kept_dy[kKept], kept_s[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k) {  // all loads before the first use
    const int chunk = threadIdx.x + k * blockDim.x;
    if (chunk >= chunks) continue;
    kept_dy[k] = load_chunk<T, kWidth>(dy_row, chunk);
    kept_s[k] = load_chunk<T, kWidth>(s_row, chunk);
  }
  float sum_g = 0.0f, sum_gh = 0.0f;
  each_chunk<kKept>(chunks, [&](int k, int chunk) {
    const Chunk<T, kWidth> dy = k < kKept ? kept_dy[k] : load_chunk<T, kWidth>(dy_row, chunk);
    const Chunk<T, kWidth> s = k < kKept ? kept_s[k] : load_chunk<T, kWidth>(s_row, chunk);
    float weight[kWidth];
    load_parameter<T, kWidth>(b.weight, args.parameter_is_float, chunk, 1.0f, weight);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float g = widen(dy.value[j]) * weight[j];
      sum_g += g;
      sum_gh += g * ((widen(s.value[j]) - mean) * rstd);
    }
  });
  row_sum(sum_g, sum_gh);
  const float mean_g = kRms ? 0.0f : sum_g / static_cast<float>(hidden);
  const float mean_gh = sum_gh / static_cast<float>(hidden);
  each_chunk<kKept>(chunks, [&](int k, int chunk) {
    const Chunk<T, kWidth> dy = k < kKept ? kept_dy[k] : load_chunk<T, kWidth>(dy_row, chunk);
    const Chunk<T, kWidth> s = k < kKept ? kept_s[k] : load_chunk<T, kWidth>(s_row, chunk);
    Chunk<T, kWidth> ds;
    if (ds_row != nullptr) ds = load_chunk<T, kWidth>(ds_row, chunk);
    float weight[kWidth], d[kWidth], for_weight[kWidth], for_bias[kWidth];
    load_parameter<T, kWidth>(b.weight, args.parameter_is_float, chunk, 1.0f, weight);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float h = (widen(s.value[j]) - mean) * rstd;
      for_bias[j] = widen(dy.value[j]);
      for_weight[j] = for_bias[j] * h;
      d[j] = rstd * (for_bias[j] * weight[j] - mean_g - h * mean_gh);
      if (ds_row != nullptr) d[j] += widen(ds.value[j]);
    }
    dweight.add(k, chunk, for_weight);
    if (!kRms) dbias.add(k, chunk, for_bias);
    store_chunk<T, kWidth>(static_cast<T*>(b.dresidual) + at, chunk, d);
    if constexpr (kDrop) {
      drop<kWidth>(args.dropout, row_start(args.dropout, row, hidden) + chunk * kWidth, d);
      store_chunk<T, kWidth>(static_cast<T*>(b.dx) + at, chunk, d);
      dinput_bias.add(k, chunk, d);
    }
  });
}

template <class T, int kWidth, bool kRms, bool kDrop>
__global__ void __launch_bounds__(kDrop ? kDropThreads : kMostThreads, 1)
    backward_kernel(BackwardArgs args) {
  __shared__ float exchange[2][2][kMostThreads / kWarp];
  const int64_t hidden = args.b.shape.hidden;
  const int chunks = static_cast<int>(hidden / kWidth);
  const int64_t plane = static_cast<int64_t>(gridDim.x) * hidden;
  float* row_of_block = args.partials + static_cast<int64_t>(blockIdx.x) * hidden;
  Shares<kWidth> dweight, dbias, dinput_bias;
  dweight.row = row_of_block + kWeight * plane;
  dbias.row = row_of_block + kBias * plane;
  dinput_bias.row = row_of_block + kInputBias * plane;
  RowSum row_sum{exchange};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < args.b.shape.rows; row += stride) {
    gradient_row<T, kWidth, kRms, kDrop>(args, row, chunks, row_sum, dweight, dbias, dinput_bias);
  }
  dweight.finish(chunks);
  if (!kRms) dbias.finish(chunks);
  if (kDrop) dinput_bias.finish(chunks);
}

// ---- the last sum ------------------------------------------------------------------------------

struct FinishArgs {
  const float* partials;
  int blocks;
  int64_t hidden;
  DType dtype;
  void* dweight;  // null: not wanted, as below
  void* dbias;
  void* dinput_bias;
};

// One column a threadIdx.x, one gradient a blockIdx.y; kFinishRows threads share a column.
__global__ void __launch_bounds__(kWarp* kFinishRows) finish_kernel(FinishArgs args) {
  __shared__ float sums[kFinishRows][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  void* out = blockIdx.y == kWeight ? args.dweight
              : blockIdx.y == kBias ? args.dbias
                                    : args.dinput_bias;
  if (out == nullptr) return;
  const float* plane = args.partials + static_cast<int64_t>(blockIdx.y) * args.blocks * args.hidden;
  float sum = 0.0f;
  if (column < args.hidden) {
    for (int block = threadIdx.y; block < args.blocks; block += kFinishRows) {
      sum += plane[block * args.hidden + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.hidden) return;
  for (int row = 1; row < kFinishRows; ++row) sum += sums[row][threadIdx.x];
  if (args.dtype == DType::kFloat32) {
    static_cast<float*>(out)[column] = sum;
  } else if (args.dtype == DType::kBFloat16) {
    narrow(sum, static_cast<bf16*>(out)[column]);
  } else {
    narrow(sum, static_cast<f16*>(out)[column]);
  }
}

}  // namespace
}  // namespace autoshard
