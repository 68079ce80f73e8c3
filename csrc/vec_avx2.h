// Vectors of 8 floats for AVX2 with FMA and F16C.  Included inside a namespace, with these targets
// switched on, by add_layer_norm.cpp.
//
// A Pair holds 2 * kLanes neighbouring elements as two float vectors.  Element i of them lies in
// slot<T>(i) of (a, b): in order for float32 and float16, even elements before odd ones for
// bfloat16, so that converting takes one shift and one mask a pair and never a shuffle.  Parameters
// are brought into the same order once a call.

typedef __m256 Vec;
constexpr int kLanes = 8;

struct Pair {
  Vec a, b;
};

AUTOSHARD_INLINE Vec splat(float value) { return _mm256_set1_ps(value); }
AUTOSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
AUTOSHARD_INLINE Vec load_vec(const float* p) { return _mm256_loadu_ps(p); }
AUTOSHARD_INLINE void store_vec(float* p, Vec v) { _mm256_storeu_ps(p, v); }

template <class T>
constexpr int slot(int element) {
  return element;
}
template <>
constexpr int slot<bf16>(int element) {
  return element % 2 * kLanes + element / 2;
}

AUTOSHARD_INLINE Pair load_pair(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + kLanes)};
}
AUTOSHARD_INLINE Pair load_pair(const f16* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
AUTOSHARD_INLINE Pair load_pair(const bf16* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}

// Adds half a unit of the last bfloat16 place, ties to even.  A NaN here has a clear low half (it
// comes from a 16-bit operand, a cleaned parameter or the machine's default NaN), so that it stays
// a NaN without a test.
AUTOSHARD_INLINE __m256i round_bf16(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

AUTOSHARD_INLINE void store_half(void* p, __m256i v, bool stream) {
  if (stream) {
    _mm256_stream_si256(static_cast<__m256i*>(p), v);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v);
  }
}
AUTOSHARD_INLINE void store_pair(float* p, Pair v, bool stream) {
  store_half(p, _mm256_castps_si256(v.a), stream);
  store_half(p + kLanes, _mm256_castps_si256(v.b), stream);
}
AUTOSHARD_INLINE void store_pair(f16* p, Pair v, bool stream) {
  const __m128i a = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m128i b = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  store_half(p, _mm256_set_m128i(b, a), stream);
}
AUTOSHARD_INLINE void store_pair(bf16* p, Pair v, bool stream) {
  const __m256i even = _mm256_srli_epi32(round_bf16(v.a), 16);
  store_half(p, _mm256_blend_epi16(even, round_bf16(v.b), 0xaa), stream);
}

// Stores a pair and returns what the stored elements are as floats.
AUTOSHARD_INLINE Pair store_rounded(float* p, Pair v, bool stream) {
  store_pair(p, v, stream);
  return v;
}
AUTOSHARD_INLINE Pair store_rounded(f16* p, Pair v, bool stream) {
  const __m128i a = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m128i b = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  store_half(p, _mm256_set_m128i(b, a), stream);
  return {_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)};
}
AUTOSHARD_INLINE Pair store_rounded(bf16* p, Pair v, bool stream) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i a = round_bf16(v.a), b = round_bf16(v.b);
  store_half(p, _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa), stream);
  return {_mm256_castsi256_ps(_mm256_and_si256(a, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}

// `v` in every lane whose element is kept, zero where its byte in `dropped` is 0xff.
template <class T>
AUTOSHARD_INLINE Pair zero_dropped(const uint8_t* dropped, Vec v) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(dropped));
  const __m256i a = _mm256_cvtepi8_epi32(bytes);
  const __m256i b = _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8));
  return {_mm256_andnot_ps(_mm256_castsi256_ps(a), v), _mm256_andnot_ps(_mm256_castsi256_ps(b), v)};
}
template <>
AUTOSHARD_INLINE Pair zero_dropped<bf16>(const uint8_t* dropped, Vec v) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(dropped));
  const __m256i both = _mm256_cvtepi16_epi32(bytes);
  const __m256i odd = _mm256_srai_epi32(both, 8);
  const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24);
  return {_mm256_andnot_ps(_mm256_castsi256_ps(even), v),
          _mm256_andnot_ps(_mm256_castsi256_ps(odd), v)};
}

#include "philox_avx2.h"

inline void finish_streaming() { _mm_sfence(); }
