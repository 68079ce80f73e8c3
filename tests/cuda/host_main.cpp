// Runs the CUDA kernels on the host over shapes that reach each of their paths, and compares every
// result with sums in double.  Buffers have their exact size on the heap: one element too far is a
// sanitizer's report.  Prints "ok" or the first wrong value.

#define AUTOSHARD_HOST_SHIM 1
#if defined(ONLY_FLOAT32)
#include "norm_launch.h"
#else
#include "add_layer_norm.cu"
#endif

#include <cstdio>
#include <cstdlib>

using namespace autoshard;

namespace {

constexpr double kEps = 1e-5;

// Deterministic numbers around zero, exact in every storage type.
float draw(int64_t i, int salt) { return static_cast<float>((i * 37 + salt * 11) % 29 - 14) / 8.0f; }

template <class T>
struct Array {
  explicit Array(int64_t count) : size(count), data(new T[static_cast<size_t>(count)]) {}
  Array(int64_t count, int salt) : Array(count) {
    for (int64_t i = 0; i < size; ++i) from_float(draw(i, salt), data[i]);
  }
  ~Array() { delete[] data; }
  Array(const Array&) = delete;
  double operator[](int64_t i) const { return to_float(data[i]); }
  int64_t size;
  T* data;
};

struct Problem {
  const char* name;
  int64_t rows, hidden;
  bool rms, drops;
};

void expect(const Problem& p, const char* what, int64_t at, double found, double truth, double allowed) {
  if (std::fabs(found - truth) <= allowed * (1.0 + std::fabs(truth))) return;
  std::printf("wrong %s[%ld] in '%s': %g, expected %g\n", what, static_cast<long>(at), p.name, found, truth);
  std::exit(1);
}

struct Keys {
  int64_t rng[3] = {77, 5, 1};
  Dropout dropout;
  explicit Keys(const Problem& p) {
    dropout.rng = rng;
    dropout.site = 3;
    dropout.scale = p.drops ? 1.0f / 0.75f : 1.0f;
    dropout.threshold = p.drops ? 1u << 30 : 0;
    dropout.sample_elements = 8 * p.hidden;
    dropout.first = 4 * p.hidden;
    dropout.inner_rows = 2;
    dropout.outer_stride = 8 * p.hidden;
  }
  // The multiplier of an element, from the words as autoshard/ops/philox.py numbers them.
  double factor(const Problem& p, int64_t row, int64_t column) const {
    const int64_t index = (rng[2] + row / 2) * 8 * p.hidden + (4 + row % 2) * p.hidden + column;
    const PhiloxWords words = philox(index / 4, 5, 3, 77);
    return words.word[index % 4] < dropout.threshold ? 0.0 : dropout.scale;
  }
};

template <class T>
void run(const Problem& p, double allowed) {
  const int64_t n = p.rows * p.hidden, d = p.hidden;
  const Array<T> x(n, 1), residual(n, 2), weight(d, 3), bias(d, 4), input_bias(d, 5), dy(n, 6), ds(n, 7);
  Array<T> y(n), s(n), dresidual(n), dx(n), dweight(d), dbias(d), dinput_bias(d);
  Array<float> mean(p.rows), rstd(p.rows);
  const Keys keys(p);
  const DType dtype = sizeof(T) == 4 ? DType::kFloat32
                      : std::is_same<T, bf16>::value ? DType::kBFloat16 : DType::kFloat16;

  NormForward f;
  f.shape = {p.rows, d, dtype, dtype};
  f.x = x.data, f.residual = residual.data, f.weight = weight.data, f.bias = p.rms ? nullptr : bias.data;
  f.y = y.data, f.s = s.data, f.mean = p.rms ? nullptr : mean.data, f.rstd = rstd.data, f.eps = kEps;
  if (p.drops) f.dropout = &keys.dropout, f.input_bias = input_bias.data;
  forward_as<T>(f, nullptr);

  NormBackward b;
  b.shape = f.shape;
  b.dy = dy.data, b.ds = ds.data, b.s = s.data, b.mean = f.mean, b.rstd = rstd.data, b.weight = weight.data;
  b.dresidual = dresidual.data, b.dweight = dweight.data, b.dbias = p.rms ? nullptr : dbias.data;
  if (p.drops) b.dropout = &keys.dropout, b.dx = dx.data, b.dinput_bias = dinput_bias.data;
  const Array<float> workspace(backward_floats(b.shape));
  backward_as<T>(b, workspace.data, nullptr);

  std::vector<double> sum_weight(d), sum_bias(d), sum_input(d);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t at = row * d;
    double m = 0, v = 0;
    for (int64_t i = 0; i < d; ++i) {
      const double factor = p.drops ? keys.factor(p, row, i) : 1.0;
      const double t = p.drops ? (x[at + i] + input_bias[i]) * factor : x[at + i];
      expect(p, "s", at + i, s[at + i], t + residual[at + i], allowed);
      m += s[at + i] / d;
    }
    if (p.rms) m = 0;
    for (int64_t i = 0; i < d; ++i) v += (s[at + i] - m) * (s[at + i] - m) / d;
    const double r = 1.0 / std::sqrt(v + kEps);
    double g1 = 0, g2 = 0;
    for (int64_t i = 0; i < d; ++i) {
      const double h = (s[at + i] - m) * r, g = dy[at + i] * weight[i];
      expect(p, "y", at + i, y[at + i], h * weight[i] + (p.rms ? 0.0 : bias[i]), allowed);
      g1 += p.rms ? 0.0 : g / d, g2 += g * h / d;
      sum_weight[i] += dy[at + i] * h, sum_bias[i] += dy[at + i];
    }
    for (int64_t i = 0; i < d; ++i) {
      const double h = (s[at + i] - m) * r;
      const double total = r * (dy[at + i] * weight[i] - g1 - h * g2) + ds[at + i];
      expect(p, "dresidual", at + i, dresidual[at + i], total, allowed);
      if (!p.drops) continue;
      const double in = total * keys.factor(p, row, i);
      expect(p, "dx", at + i, dx[at + i], in, allowed);
      sum_input[i] += in;
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    expect(p, "dweight", i, dweight[i], sum_weight[i], allowed);
    if (!p.rms) expect(p, "dbias", i, dbias[i], sum_bias[i], allowed);
    if (p.drops) expect(p, "dinput_bias", i, dinput_bias[i], sum_input[i], allowed);
  }
}

// Dropout alone: two stretches, 60 elements apart in the global tensor.
template <class T>
void run_dropout(int64_t length, double allowed) {
  const Problem p = {"dropout alone", 2, length, false, true};
  const Array<T> x(2 * length, 1);
  Array<T> y(2 * length);
  Keys keys(p);
  keys.dropout.inner_rows = 1;
  keys.dropout.outer_stride = 60;
  DropoutCall call = {2, length, DType::kFloat32, x.data, y.data, keys.dropout};
  if (sizeof(T) == 2) call.dtype = DType::kFloat16;
  dropout_as<T>(call, nullptr);
  for (int64_t i = 0; i < 2 * length; ++i) {
    const int64_t first = keys.rng[2] * 8 * length + 4 * length;
    const int64_t index = first + i / length * 60 + i % length;
    const bool kept = philox(index / 4, 5, 3, 77).word[index % 4] >= keys.dropout.threshold;
    expect(p, "y", i, y[i], kept ? x[i] / 0.75 : 0.0, allowed);
  }
}

// 64 threads a block at most: 3 and 2 chunks a thread stay in registers, forward and backward.
const Problem kProblems[] = {
    {"one warp a row, 16-byte chunks", 5, 40, false, false},
    {"one warp a row, odd size", 5, 37, false, true},
    {"one block a row, barriers", 3, 600, false, true},
    {"one block a row, RMSNorm", 3, 600, true, false},
    {"more chunks than registers keep", 2, 1800, false, false},
    {"one element", 2, 1, true, false},
};

}  // namespace

int main() {
  for (const Problem& p : kProblems) {
    run<float>(p, 1e-5);
#if !defined(ONLY_FLOAT32)
    run<bf16>(p, 1.0 / 256);
    run<f16>(p, 1.0 / 2048);
#endif
  }
  for (const int64_t length : {1, 7, 40}) {
    run_dropout<float>(length, 1e-6);
#if !defined(ONLY_FLOAT32)
    run_dropout<f16>(length, 1.0 / 2048);
#endif
  }
  std::printf("ok\n");
}
