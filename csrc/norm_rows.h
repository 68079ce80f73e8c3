// The CPU kernels over a range of rows, written once and compiled for each instruction set: included
// inside a namespace by add_layer_norm.cpp after one of vec_*.h.
//
// A row is walked in groups of 2 * kLanes elements.  The last, short group goes through a zeroed
// buffer on the stack, so that hidden sizes of any kind run the same vector code; zeros add nothing
// to the sums (the one sum where they would, masks them).
//
// Parameters and partial gradients lie in buffers padded to whole groups, in the slot order of T.

constexpr int kGroup = 2 * kLanes;
// Partial sums are folded into a second accumulator this often, so that the rounding error of a sum
// grows with the square root of its length and not with the length.
constexpr int kFold = 32;
// Squared distance of centre and mean, in variances, above which the moments lose digits: 2 bits.
constexpr double kFarCentre = 4.0;

AUTOSHARD_INLINE Pair add(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
AUTOSHARD_INLINE Pair sub(Pair x, Vec y) { return {x.a - y, x.b - y}; }
AUTOSHARD_INLINE Pair mul(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
AUTOSHARD_INLINE Pair mul(Pair x, Vec y) { return {x.a * y, x.b * y}; }
AUTOSHARD_INLINE Pair fma(Pair x, Pair y, Pair z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
AUTOSHARD_INLINE Pair fma(Pair x, Vec y, Pair z) { return {fma(x.a, y, z.a), fma(x.b, y, z.b)}; }
AUTOSHARD_INLINE Pair fma(Pair x, Vec y, Vec z) { return {fma(x.a, y, z), fma(x.b, y, z)}; }
AUTOSHARD_INLINE Pair zeros() { return {splat(0.0f), splat(0.0f)}; }

AUTOSHARD_INLINE Pair load_floats(const float* p) { return {load_vec(p), load_vec(p + kLanes)}; }
AUTOSHARD_INLINE void store_floats(float* p, Pair v) {
  store_vec(p, v.a);
  store_vec(p + kLanes, v.b);
}

// Asks for a group that will be read soon.  An address past the end of an array is harmless.
template <class T>
AUTOSHARD_INLINE void fetch_group(const T* p) {
  for (int i = 0; i < kGroup; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 3);
}

struct Sum {
  Pair inner, outer;
};
AUTOSHARD_INLINE void fold(Sum& sum) {
  sum.outer = add(sum.outer, sum.inner);
  sum.inner = zeros();
}
AUTOSHARD_OUTLINE double total(Sum sum) {
  float lanes[kGroup];
  double wide[kGroup];
  store_floats(lanes, add(sum.outer, sum.inner));
  for (int i = 0; i < kGroup; ++i) wide[i] = lanes[i];
  for (int half = kGroup / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) wide[i] += wide[i + half];
  }
  return wide[0];
}

// How a group is reached: whole, or its first `count` elements.
struct Whole {};
struct Part {
  int count;
};
template <class T>
AUTOSHARD_INLINE Pair load(const T* p, Whole) {
  return load_pair(p);
}
template <class T>
AUTOSHARD_INLINE Pair load(const T* p, Part part) {
  T buffer[kGroup] = {};
  __builtin_memcpy(buffer, p, part.count * sizeof(T));
  return load_pair(buffer);
}
template <class T>
AUTOSHARD_INLINE void store(T* p, Pair v, Whole, bool stream) {
  store_pair(p, v, stream);
}
template <class T>
AUTOSHARD_INLINE void store(T* p, Pair v, Part part, bool) {
  T buffer[kGroup];
  store_pair(buffer, v, false);
  __builtin_memcpy(p, buffer, part.count * sizeof(T));
}
template <class T>
AUTOSHARD_INLINE Pair store_and_round(T* p, Pair v, Whole, bool stream) {
  return store_rounded(p, v, stream);
}
template <class T>
AUTOSHARD_INLINE Pair store_and_round(T* p, Pair v, Part part, bool) {
  T buffer[kGroup];
  v = store_rounded(buffer, v, false);
  __builtin_memcpy(p, buffer, part.count * sizeof(T));
  return v;
}
template <class T>
AUTOSHARD_INLINE Pair keep_valid(Pair v, Whole) {
  return v;
}
template <class T>
AUTOSHARD_INLINE Pair keep_valid(Pair v, Part part) {
  float lanes[kGroup];
  store_floats(lanes, v);
  for (int i = part.count; i < kGroup; ++i) lanes[slot<T>(i)] = 0.0f;
  return load_floats(lanes);
}

// Calls body(first element, Whole or Part) for each group and fold() every kFold groups.
template <class Body, class Fold>
AUTOSHARD_INLINE void each_group(int64_t hidden, Body&& body, Fold&& fold_sums) {
  int64_t i = 0;
  while (i + kGroup <= hidden) {
    const int64_t whole = hidden - hidden % kGroup;
    const int64_t end = whole - i < kFold * kGroup ? whole : i + kFold * kGroup;
    for (; i < end; i += kGroup) body(i, Whole{});
    fold_sums();
  }
  if (i < hidden) body(i, Part{static_cast<int>(hidden - i)});
}

template <class T>
inline int64_t slot_of(int64_t element) {
  return element - element % kGroup + slot<T>(static_cast<int>(element % kGroup));
}

// ---- forward -----------------------------------------------------------------------------------

// Sums over a row of the distance to `centre`, and of its square.
struct Moments {
  double sum, squares;
};

// Pass 1: s to memory and, as floats, to `wide`; its moments around `centre`.  For RMSNorm the
// centre is zero and only the squares are summed.
template <class T, bool kRms, bool kDrop>
AUTOSHARD_OUTLINE Moments add_row(const Forward& f, const T* x, const T* residual, T* s,
                                  float* wide, const uint8_t* dropped, float centre) {
  Sum sum = {zeros(), zeros()}, squares = {zeros(), zeros()};
  const Vec scale = splat(f.dropout.scale), from = splat(centre);
  const float* input_bias = f.input_bias;
  const bool stream = f.stream;
  each_group(
      f.hidden,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        Pair v = load(x + i, part);
        if (kDrop) {
          v = add(v, load_floats(input_bias + i));
          v = mul(v, zero_dropped<T>(dropped + i, scale));
        }
        v = store_and_round(s + i, add(v, load(residual + i, part)), part, stream);
        store_floats(wide + i, v);
        if (!kRms) {
          v = keep_valid<T>(sub(v, from), part);
          sum.inner = add(v, sum.inner);
        }
        squares.inner = fma(v, v, squares.inner);
      },
      [&]() AUTOSHARD_INLINE_LAMBDA {
        fold(sum);
        fold(squares);
      });
  return {kRms ? 0.0 : total(sum), total(squares)};
}

// The moments around another centre, from `wide`.
template <class T>
AUTOSHARD_OUTLINE Moments centre_row(const float* wide, int64_t hidden, float centre) {
  Sum sum = {zeros(), zeros()}, squares = {zeros(), zeros()};
  const Vec from = splat(centre);
  each_group(
      hidden,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        const Pair v = keep_valid<T>(sub(load_floats(wide + i), from), part);
        sum.inner = add(v, sum.inner);
        squares.inner = fma(v, v, squares.inner);
      },
      [&]() AUTOSHARD_INLINE_LAMBDA {
        fold(sum);
        fold(squares);
      });
  return {total(sum), total(squares)};
}

// Mean and variance of a LayerNorm row.  Pass 1 measured from the row's first element, which is as
// good a centre as the mean unless it is an outlier: far from the mean by the measure of the
// variance, the difference of the moments would lose digits.  Then the row is measured again from
// the mean (pass 2).  Written so that NaN takes neither branch and stays.
template <class T>
inline double mean_and_variance(const float* wide, int64_t hidden, float centre, Moments moments,
                                float& mean) {
  double shift = moments.sum / hidden;
  double variance = moments.squares / hidden - shift * shift;
  if (shift * shift > kFarCentre * variance) {
    centre = static_cast<float>(centre + shift);
    moments = centre_row<T>(wide, hidden, centre);
    shift = moments.sum / hidden;
    variance = moments.squares / hidden - shift * shift;
  }
  mean = static_cast<float>(centre + shift);
  return variance < 0.0 ? 0.0 : variance;
}

// Last pass: y from the floats of s, which are still in the cache.  Memory would be idle meanwhile, so
// the next row is fetched.
template <class T, bool kRms>
AUTOSHARD_OUTLINE void normalise_row(const Forward& f, const float* wide, int64_t row, float mean,
                                     float rstd) {
  const Vec centre = splat(mean), factor = splat(rstd);
  const int64_t at = row * f.hidden, next = at + f.hidden;
  const T* x = static_cast<const T*>(f.x) + next;
  const T* residual = static_cast<const T*>(f.residual) + next;
  T* y = static_cast<T*>(f.y) + at;
  const float* weight = f.weight;
  const float* bias = f.bias;
  const bool stream = f.stream;
  each_group(
      f.hidden,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        fetch_group(x + i);
        fetch_group(residual + i);
        Pair v = load_floats(wide + i);
        if (!kRms) v = sub(v, centre);
        v = mul(v, factor);
        v = kRms ? mul(v, load_floats(weight + i))
                 : fma(v, load_floats(weight + i), load_floats(bias + i));
        store(y + i, v, part, stream);
      },
      []() AUTOSHARD_INLINE_LAMBDA {});
}

// Marks the dropped ones of `count` elements from global index `first` on; returns where the first
// one's mark is in `buffer`.
AUTOSHARD_OUTLINE const uint8_t* mark_dropped(const Keys& dropout, int64_t first, int64_t count,
                                              uint8_t* buffer) {
  if (dropout.threshold == 0) return buffer;  // zeroed by the caller: nothing is dropped
  const int64_t lead = first & 3;
  drop_bytes(buffer, static_cast<uint64_t>(first) >> 2, (lead + count + 3) >> 2, dropout);
  return buffer + lead;
}

inline const uint8_t* drop_row(const Keys& dropout, int64_t row, int64_t hidden, uint8_t* buffer) {
  const int64_t place = row / dropout.inner_rows * dropout.outer_stride + row % dropout.inner_rows * hidden;
  return mark_dropped(dropout, dropout.first + place, hidden, buffer);
}

// Dropout alone, of `count` neighbouring elements.
template <class T>
void drop_elements(const Keys& dropout, const void* from, void* to, int64_t count, int64_t first,
                   bool stream, uint8_t* bytes) {
  const T* x = static_cast<const T*>(from);
  T* y = static_cast<T*>(to);
  const uint8_t* dropped = mark_dropped(dropout, first, count, bytes);
  const Vec scale = splat(dropout.scale);
  each_group(
      count,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        store(y + i, mul(load(x + i, part), zero_dropped<T>(dropped + i, scale)), part, stream);
      },
      []() AUTOSHARD_INLINE_LAMBDA {});
  finish_streaming();
}

template <class T, bool kRms, bool kDrop>
void forward_rows(const Forward& f, int64_t begin, int64_t end, float* wide, uint8_t* bytes) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * f.hidden;
    const T* x = static_cast<const T*>(f.x) + at;
    const T* residual = static_cast<const T*>(f.residual) + at;
    const uint8_t* dropped = kDrop ? drop_row(f.dropout, row, f.hidden, bytes) : nullptr;
    T* s = static_cast<T*>(f.s) + at;
    const float centre = kRms ? 0.0f : to_float(x[0]) + to_float(residual[0]);
    const Moments moments = add_row<T, kRms, kDrop>(f, x, residual, s, wide, dropped, centre);
    float mean = 0.0f;
    double variance = moments.squares / f.hidden;
    if (!kRms) {
      variance = mean_and_variance<T>(wide, f.hidden, centre, moments, mean);
      f.mean[row] = mean;
    }
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(variance + f.eps));
    f.rstd[row] = rstd;
    normalise_row<T, kRms>(f, wide, row, mean, rstd);
  }
  finish_streaming();
}

// ---- backward ----------------------------------------------------------------------------------

// With h = (s - mean) * rstd and g = dy * weight, the gradient of the sum is
//   ds + rstd * (g - mean(g) - h * mean(g * h)),   mean(g) absent for RMSNorm.
struct RowStatistics {
  float mean, rstd;
  float minus_mean_g, minus_mean_gh;  // both times rstd
};

template <class T, bool kRms>
AUTOSHARD_OUTLINE RowStatistics gradient_means(const Backward& b, int64_t row) {
  const T* dy = static_cast<const T*>(b.dy) + row * b.hidden;
  const T* s = static_cast<const T*>(b.s) + row * b.hidden;
  const float mean = kRms ? 0.0f : without_payload(b.mean[row]);
  const float rstd = without_payload(b.rstd[row]);
  Sum sum_g = {zeros(), zeros()}, sum_gc = {zeros(), zeros()};
  const Vec centre = splat(mean);
  const float* weight = b.weight;
  each_group(
      b.hidden,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        const Pair g = mul(load(dy + i, part), load_floats(weight + i));
        Pair c = load(s + i, part);
        if (!kRms) {
          c = sub(c, centre);
          sum_g.inner = add(g, sum_g.inner);
        }
        sum_gc.inner = fma(g, c, sum_gc.inner);
      },
      [&]() AUTOSHARD_INLINE_LAMBDA {
        fold(sum_g);
        fold(sum_gc);
      });
  const double scale = rstd / static_cast<double>(b.hidden);
  const double mean_g = kRms ? 0.0 : -total(sum_g) * scale;
  return {mean, rstd, static_cast<float>(mean_g), static_cast<float>(-total(sum_gc) * scale * rstd)};
}

// dresidual, dx and this row's share of the parameters' gradients.  dy and s are read for the second
// time, from the cache; memory brings ds and, ahead of time, the next row.
template <class T, bool kRms, bool kDrop>
AUTOSHARD_OUTLINE void gradient_row(const Backward& b, int64_t row, const Partials& partials,
                                    const uint8_t* dropped) {
  const RowStatistics stats = gradient_means<T, kRms>(b, row);
  const int64_t at = row * b.hidden, next = b.hidden;
  const T* dy = static_cast<const T*>(b.dy) + at;
  const T* s = static_cast<const T*>(b.s) + at;
  const T* ds = b.ds == nullptr ? nullptr : static_cast<const T*>(b.ds) + at;
  T* dresidual = static_cast<T*>(b.dresidual) + at;
  T* dx = kDrop ? static_cast<T*>(b.dx) + at : nullptr;
  float* dweight = partials.dweight;
  float* dbias = partials.dbias;
  float* dinput_bias = partials.dinput_bias;
  const float* weight = b.weight;
  const bool stream = b.stream;
  const Vec mean = splat(stats.mean), rstd = splat(stats.rstd), scale = splat(b.dropout.scale);
  const Vec minus_mean_g = splat(stats.minus_mean_g), minus_mean_gh = splat(stats.minus_mean_gh);
  each_group(
      b.hidden,
      [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA {
        fetch_group(dy + next + i);
        fetch_group(s + next + i);
        const Pair dy_here = load(dy + i, part);
        Pair h = load(s + i, part);
        if (!kRms) h = sub(h, mean);
        h = mul(h, rstd);
        store_floats(dweight + i, fma(dy_here, h, load_floats(dweight + i)));
        if (!kRms) store_floats(dbias + i, add(dy_here, load_floats(dbias + i)));
        const Pair g = mul(dy_here, load_floats(weight + i));
        Pair d = kRms ? mul(g, rstd) : fma(g, rstd, minus_mean_g);
        d = fma(h, minus_mean_gh, d);
        if (ds != nullptr) d = add(d, load(ds + i, part));
        store(dresidual + i, d, part, stream);
        if (!kDrop) return;
        d = mul(d, zero_dropped<T>(dropped + i, scale));
        store(dx + i, d, part, stream);
        store_floats(dinput_bias + i, add(d, load_floats(dinput_bias + i)));
      },
      []() AUTOSHARD_INLINE_LAMBDA {});
}

template <class T, bool kRms, bool kDrop>
void backward_rows(const Backward& b, int64_t begin, int64_t end, const Partials& partials,
                   uint8_t* bytes) {
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* dropped = kDrop ? drop_row(b.dropout, row, b.hidden, bytes) : nullptr;
    gradient_row<T, kRms, kDrop>(b, row, partials, dropped);
  }
  finish_streaming();
}

// ---- parameters --------------------------------------------------------------------------------

// A parameter stored as P, as floats in the slot order of T.
template <class T, class P>
void spread(const void* in, float* out, int64_t hidden) {
  const P* from = static_cast<const P*>(in);
  if (std::is_same<T, P>::value) {
    const T* same = static_cast<const T*>(in);
    each_group(
        hidden,
        [&](int64_t i, auto part) AUTOSHARD_INLINE_LAMBDA { store_floats(out + i, load(same + i, part)); },
        []() AUTOSHARD_INLINE_LAMBDA {});
    return;
  }
  for (int64_t i = 0; i < hidden; ++i) out[slot_of<T>(i)] = without_payload(to_float(from[i]));
}

// Adds up the partial sums of all chunks in chunk order, in place in the first one, and stores them
// as P in the order of the elements.
template <class T, class P>
void collect(float* partials, int64_t chunks, int64_t stride, void* out, int64_t hidden) {
  for (int64_t c = 1; c < chunks; ++c) {
    for (int64_t i = 0; i < hidden; i += kGroup) {
      store_floats(partials + i, add(load_floats(partials + i), load_floats(partials + c * stride + i)));
    }
  }
  for (int64_t i = 0; i < hidden; ++i) from_float(partials[slot_of<T>(i)], static_cast<P*>(out)[i]);
}
