// Vectors of 4 floats in the compiler's own vector extension: SSE2 on any x86-64, NEON on Arm.
// Included inside a namespace by add_layer_norm.cpp.  See vec_avx2.h for the meaning of each part.

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
constexpr int kLanes = 4;

struct Pair {
  Vec a, b;
};

AUTOSHARD_INLINE Vec splat(float value) { return Vec{value, value, value, value}; }
AUTOSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
AUTOSHARD_INLINE Vec load_vec(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
AUTOSHARD_INLINE void store_vec(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
AUTOSHARD_INLINE Vec zero_where(IntVec mask, Vec v) { return (Vec)(~mask & (IntVec)v); }

template <class T>
constexpr int slot(int element) {
  return element;
}

template <class T>
AUTOSHARD_INLINE Pair load_pair(const T* p) {
  Pair out;
  for (int i = 0; i < kLanes; ++i) {
    out.a[i] = to_float(p[i]);
    out.b[i] = to_float(p[kLanes + i]);
  }
  return out;
}

template <class T>
AUTOSHARD_INLINE void store_pair(T* p, Pair v, bool) {
  for (int i = 0; i < kLanes; ++i) {
    from_float(v.a[i], p[i]);
    from_float(v.b[i], p[kLanes + i]);
  }
}

template <class T>
AUTOSHARD_INLINE Pair store_rounded(T* p, Pair v, bool) {
  store_pair(p, v, false);
  return load_pair(p);
}

template <class T>
AUTOSHARD_INLINE Pair zero_dropped(const uint8_t* dropped, Vec v) {
  IntVec a, b;
  for (int i = 0; i < kLanes; ++i) {
    a[i] = -(dropped[i] >> 7);
    b[i] = -(dropped[kLanes + i] >> 7);
  }
  return {zero_where(a, v), zero_where(b, v)};
}

inline void drop_bytes(uint8_t* out, uint64_t group, int64_t groups, const Keys& dropout) {
  for (int64_t i = 0; i < groups; ++i) {
    const PhiloxWords words = philox(group + i, dropout.step, dropout.site, dropout.seed);
    for (int w = 0; w < 4; ++w) out[4 * i + w] = words.word[w] < dropout.threshold ? 0xff : 0;
  }
}

inline void finish_streaming() {}
