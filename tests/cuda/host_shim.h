// Just enough of CUDA on the host: a block is a set of C++20 threads, one for each CUDA thread, so
// that the sanitizers see every access of a kernel.  Blocks run one after another.
//
// Modelled: thread and block indices, __syncthreads, warp shuffles, __shared__ (static storage).
// Not modelled: warps in lockstep, races between blocks, weak memory order, speed.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x_, unsigned y_ = 1) : x(x_), y(y_) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host_shim {

constexpr int kLanes = 32;

struct Warp {
  std::barrier<> barrier{kLanes};
  float value[kLanes];
};

struct Block {
  explicit Block(int threads) : all(threads), next(threads), warps(threads / kLanes) {
    for (auto& warp : warps) warp = std::make_unique<Warp>();
  }
  std::barrier<> all;   // __syncthreads
  std::barrier<> next;  // between two blocks
  std::vector<std::unique_ptr<Warp>> warps;
};

inline thread_local Block* block = nullptr;

inline int thread_number() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

template <class Kernel, class Args>
void run_thread(Block& shared, int number, Kernel kernel, dim3 grid, dim3 shape, const Args& args) {
  block = &shared;
  gridDim = grid;
  blockDim = shape;
  threadIdx = dim3(number % shape.x, number / shape.x);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      kernel(args);
      shared.next.arrive_and_wait();
    }
  }
}

template <class Kernel, class Args>
void launch(Kernel kernel, dim3 grid, dim3 shape, const Args& args) {
  const int count = static_cast<int>(shape.x * shape.y);
  Block shared(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { run_thread(shared, i, kernel, grid, shape, args); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace host_shim

#define AUTOSHARD_LAUNCH(kernel, grid, block, stream, args) \
  (static_cast<void>(stream), host_shim::launch(kernel, grid, block, args))

inline void __syncthreads() { host_shim::block->all.arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int step) {
  const int number = host_shim::thread_number();
  host_shim::Warp& warp = *host_shim::block->warps[number / host_shim::kLanes];
  const int lane = number % host_shim::kLanes;
  warp.value[lane] = value;
  warp.barrier.arrive_and_wait();
  const float out = warp.value[lane ^ step];
  warp.barrier.arrive_and_wait();
  return out;
}

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t) {
  std::memset(p, byte, bytes);
  return cudaSuccess;
}
