// Fused add + norm on the CPU: choice of the instruction set, split over threads, and the sums over
// chunks of rows.  What is computed and how many bytes it moves: add_layer_norm.h; the loops
// themselves: norm_rows.h.
//
// Rows are split into chunks whose number depends on the shape alone, and partial gradients of the
// parameters are added in chunk order: results are the same bits for any number of threads.
//
// Results larger than the last-level cache are written with non-temporal stores: the line need not
// be read before it is written, which makes 6 units of real traffic 4.  Smaller ones are left in the
// cache for whoever reads them next.

#include "add_layer_norm.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "dtypes.h"
#include "philox.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define AUTOSHARD_X86 1
#include <immintrin.h>
#else
#define AUTOSHARD_X86 0
#endif

#define AUTOSHARD_INLINE inline __attribute__((always_inline))
// Functions that run once a row: one copy each, which halves the compile time.
#define AUTOSHARD_OUTLINE __attribute__((noinline))
#define AUTOSHARD_INLINE_LAMBDA __attribute__((always_inline))

namespace autoshard {
namespace {

// One dropout with its keys read: the global index of row `row` is first + place of the row.
struct Keys {
  uint64_t seed;
  uint32_t step;
  uint32_t site;
  uint32_t threshold;
  float scale;
  int64_t first;
  int64_t inner_rows;
  int64_t outer_stride;
};

Keys keys_of(const Dropout* d) {
  if (d == nullptr) return {0, 0, 0, 0, 1.0f, 0, 1, 0};
  const int64_t sample = d->rng[2] * d->sample_elements;
  return {static_cast<uint64_t>(d->rng[0]), static_cast<uint32_t>(d->rng[1]), d->site,
          d->threshold,                     d->scale,                         d->first + sample,
          d->inner_rows,                    d->outer_stride};
}

// Arguments in the form that the loops want: parameters as padded float arrays in slot order.
struct Forward {
  int64_t hidden;
  const void* x;
  const void* residual;
  const float* weight;
  const float* bias;
  const float* input_bias;
  void* y;
  void* s;
  float* mean;
  float* rstd;
  double eps;
  bool stream;
  Keys dropout;
};

struct Backward {
  int64_t hidden;
  const void* dy;
  const void* ds;
  const void* s;
  const float* mean;
  const float* rstd;
  const float* weight;
  void* dresidual;
  void* dx;
  bool stream;
  Keys dropout;
};

struct Partials {
  float* dweight;
  float* dbias;
  float* dinput_bias;
};

// A NaN with nothing in the low half of its bits, so that rounding to bfloat16 keeps it a NaN.
inline float without_payload(float value) { return value == value ? value : bits_float(0x7fc00000u); }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> allocate(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return Buffer<T>(static_cast<T*>(memory));
}

}  // namespace

// One copy of the loops for each instruction set.  No header of the standard library may be
// included between the pragmas: its inline functions would be compiled for the wider set and could
// replace the portable ones at link time.
namespace portable {
namespace {
#include "vec_portable.h"
#include "norm_rows.h"
}  // namespace
}  // namespace portable

#if AUTOSHARD_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
namespace {
#include "vec_avx2.h"
#include "norm_rows.h"
}  // namespace
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
namespace avx512 {
namespace {
#include "vec_avx512.h"
#include "norm_rows.h"
}  // namespace
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // AUTOSHARD_X86

namespace {

constexpr int64_t kPadding = 64;       // elements; at least one group of any instruction set
constexpr int64_t kMaxChunks = 64;     // chunks of rows in a backward
constexpr int64_t kMinChunkRows = 64;  // keeps the partial sums small beside the rows
constexpr int64_t kMaxPartialFloats = 1 << 21;
constexpr int64_t kElementsPerThread = 1 << 15;  // below this a thread costs more than it brings
constexpr int64_t kDropPiece = 1 << 12;           // elements whose marks fit the first-level cache
constexpr int64_t kStreamBytes = 32 << 20;       // a shared cache reports more than one job gets

using ForwardRows = void (*)(const Forward&, int64_t, int64_t, float*, uint8_t*);
using BackwardRows = void (*)(const Backward&, int64_t, int64_t, const Partials&, uint8_t*);

using DropElements = void (*)(const Keys&, const void*, void*, int64_t, int64_t, bool, uint8_t*);

// The loops of one instruction set and one storage type.  Index: [RMSNorm][bias or dropout].
struct Loops {
  ForwardRows forward[2][2];
  BackwardRows backward[2][2];
  DropElements drop;
  void (*spread[2])(const void*, float*, int64_t);                     // [parameter is float32]
  void (*collect[2])(float*, int64_t, int64_t, void*, int64_t);
  int vector_bytes;
};

struct InstructionSet {
  const char* name;
  bool available;
  Loops loops[3];  // by DType
};

#define AUTOSHARD_LOOPS(isa, T)                                              \
  {{{isa::forward_rows<T, false, false>, isa::forward_rows<T, false, true>},  \
    {isa::forward_rows<T, true, false>, isa::forward_rows<T, true, true>}},   \
   {{isa::backward_rows<T, false, false>, isa::backward_rows<T, false, true>}, \
    {isa::backward_rows<T, true, false>, isa::backward_rows<T, true, true>}}, \
   isa::drop_elements<T>,                                                    \
   {isa::spread<T, T>, isa::spread<T, float>},                               \
   {isa::collect<T, T>, isa::collect<T, float>},                             \
   4 * isa::kLanes}
#define AUTOSHARD_SET(isa, available) \
  {#isa, available, {AUTOSHARD_LOOPS(isa, float), AUTOSHARD_LOOPS(isa, bf16), AUTOSHARD_LOOPS(isa, f16)}}

#if AUTOSHARD_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const InstructionSet kSets[] = {
#if AUTOSHARD_X86
    AUTOSHARD_SET(avx512, has_avx512()),
    AUTOSHARD_SET(avx2, has_avx2()),
#endif
    AUTOSHARD_SET(portable, true),
};

const InstructionSet* best_set() {
  return std::find_if(std::begin(kSets), std::end(kSets),
                      [](const InstructionSet& set) { return set.available; });
}
const InstructionSet* g_set = best_set();

const Loops& loops_of(DType dtype) { return g_set->loops[static_cast<int>(dtype)]; }

int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

int64_t padded(int64_t hidden) { return (hidden + kPadding - 1) / kPadding * kPadding; }

int64_t last_level_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (found > 0) return std::min<int64_t>(found, kStreamBytes);
#endif
  return kStreamBytes;
}

bool aligned_rows(const NormShape& shape, int vector_bytes, const void* a, const void* b) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                    static_cast<uintptr_t>(shape.hidden * element_bytes(shape.dtype));
  return bits % vector_bytes == 0;
}

bool should_stream(const NormShape& shape, int vector_bytes, const void* a, const void* b) {
  static const int64_t threshold = last_level_cache_bytes();
  const int64_t bytes = 2 * shape.rows * shape.hidden * element_bytes(shape.dtype);
  return bytes > threshold && aligned_rows(shape, vector_bytes, a, b);
}

// A parameter as floats in slot order, padded with zeros; `missing` everywhere if there is none.
Buffer<float> parameter(const NormShape& shape, const Loops& loops, const void* in, float missing) {
  Buffer<float> out = allocate<float>(padded(shape.hidden));
  if (in != nullptr) {
    loops.spread[shape.parameter_dtype == DType::kFloat32](in, out.get(), shape.hidden);
  } else if (missing != 0.0f) {
    std::fill(out.get(), out.get() + padded(shape.hidden), missing);
  }
  return out;
}

void write_gradient(const NormShape& shape, const Loops& loops, float* partials, int64_t chunks,
                    int64_t stride, void* out) {
  if (out == nullptr) return;
  const bool wide = shape.parameter_dtype == DType::kFloat32;
  loops.collect[wide](partials, chunks, stride, out, shape.hidden);
}

int thread_count(const NormShape& shape, int limit, int64_t pieces) {
  const int64_t useful = shape.rows * shape.hidden / kElementsPerThread;
  return static_cast<int>(std::max<int64_t>(1, std::min({useful, pieces, int64_t{limit}})));
}

// Runs body(piece) for each piece, `threads` at a time, each thread with neighbouring pieces.
template <class Body>
void each_piece(int64_t pieces, int threads, const Body& body) {
  if (threads <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) body(piece);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t piece = 0; piece < pieces; ++piece) body(piece);
}

}  // namespace

void add_norm_forward_cpu(const NormForward& args, int threads) {
  const NormShape& shape = args.shape;
  const Loops& loops = loops_of(shape.dtype);
  const Buffer<float> weight = parameter(shape, loops, args.weight, 1.0f);
  const Buffer<float> bias = parameter(shape, loops, args.bias, 0.0f);
  const bool drops = args.dropout != nullptr || args.input_bias != nullptr;
  const Buffer<float> input_bias =
      drops ? parameter(shape, loops, args.input_bias, 0.0f) : Buffer<float>();
  const Forward forward = {
      shape.hidden, args.x,   args.residual, weight.get(), bias.get(),    input_bias.get(), args.y,
      args.s,       args.mean, args.rstd,    args.eps,
      should_stream(shape, loops.vector_bytes, args.y, args.s), keys_of(args.dropout)};
  const ForwardRows rows = loops.forward[args.mean == nullptr][drops];
  const int pieces = thread_count(shape, threads, shape.rows);
  each_piece(pieces, pieces, [&](int64_t piece) {
    const Buffer<float> wide = allocate<float>(padded(shape.hidden));
    const Buffer<uint8_t> bytes = allocate<uint8_t>(drops ? padded(shape.hidden) + kPadding : 1);
    rows(forward, shape.rows * piece / pieces, shape.rows * (piece + 1) / pieces, wide.get(),
         bytes.get());
  });
}

void add_norm_backward_cpu(const NormBackward& args, int threads) {
  const NormShape& shape = args.shape;
  const Loops& loops = loops_of(shape.dtype);
  const Buffer<float> weight = parameter(shape, loops, args.weight, 1.0f);
  const bool drops = args.dx != nullptr;
  const int64_t width = padded(shape.hidden), stride = 3 * width;
  const int64_t most = std::min(kMaxChunks, std::max<int64_t>(1, kMaxPartialFloats / stride));
  const int64_t chunk_rows = std::max(kMinChunkRows, (shape.rows + most - 1) / most);
  const int64_t chunks = std::max<int64_t>(1, (shape.rows + chunk_rows - 1) / chunk_rows);
  const Backward backward = {
      shape.hidden, args.dy, args.ds, args.s, args.mean, args.rstd, weight.get(), args.dresidual,
      args.dx, should_stream(shape, loops.vector_bytes, args.dresidual, args.dx),
      keys_of(args.dropout)};
  const BackwardRows rows = loops.backward[args.mean == nullptr][drops];
  const Buffer<float> partials = allocate<float>(chunks * stride);
  each_piece(chunks, thread_count(shape, threads, chunks), [&](int64_t chunk) {
    float* own = partials.get() + chunk * stride;
    const Buffer<uint8_t> bytes = allocate<uint8_t>(drops ? width + kPadding : 1);
    rows(backward, chunk * chunk_rows, std::min(shape.rows, (chunk + 1) * chunk_rows),
         Partials{own, own + width, own + 2 * width}, bytes.get());
  });
  write_gradient(shape, loops, partials.get(), chunks, stride, args.dweight);
  write_gradient(shape, loops, partials.get() + width, chunks, stride, args.dbias);
  write_gradient(shape, loops, partials.get() + 2 * width, chunks, stride, args.dinput_bias);
}

void dropout_cpu(const DropoutCall& args, int threads) {
  const Loops& loops = loops_of(args.dtype);
  const Keys keys = keys_of(&args.dropout);
  const NormShape shape = {args.runs, args.run, args.dtype, args.dtype};
  const bool stream = should_stream(shape, loops.vector_bytes, args.y, args.y);
  const int64_t pieces_of_run = (args.run + kDropPiece - 1) / kDropPiece;
  const int64_t pieces = args.runs * pieces_of_run, bytes = element_bytes(args.dtype);
  const int workers = thread_count(shape, threads, pieces);
  each_piece(workers, workers, [&](int64_t worker) {
    const Buffer<uint8_t> marks = allocate<uint8_t>(kDropPiece + 2 * kPadding);
    for (int64_t p = pieces * worker / workers; p < pieces * (worker + 1) / workers; ++p) {
      const int64_t run = p / pieces_of_run, begin = p % pieces_of_run * kDropPiece;
      const int64_t count = std::min(kDropPiece, args.run - begin), at = (run * args.run + begin) * bytes;
      loops.drop(keys, static_cast<const char*>(args.x) + at, static_cast<char*>(args.y) + at, count,
                 keys.first + run * keys.outer_stride + begin, stream, marks.get());
    }
  });
}

const char* cpu_instruction_sets() {
  static const std::string names = [] {
    std::string out;
    for (const InstructionSet& set : kSets) {
      if (set.available) out += (out.empty() ? "" : " ") + std::string(set.name);
    }
    return out;
  }();
  return names.c_str();
}

bool use_cpu_instruction_set(const char* name) {
  for (const InstructionSet& set : kSets) {
    if (set.available && std::strcmp(set.name, name) == 0) {
      g_set = &set;
      return true;
    }
  }
  return false;
}

}  // namespace autoshard
