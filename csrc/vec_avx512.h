// Vectors of 16 floats for AVX-512 (F, BW, VL, DQ).  Included inside a namespace, with these targets
// switched on, by add_layer_norm.cpp.  See vec_avx2.h for the meaning of each part.

typedef __m512 Vec;
constexpr int kLanes = 16;

struct Pair {
  Vec a, b;
};

AUTOSHARD_INLINE Vec splat(float value) { return _mm512_set1_ps(value); }
AUTOSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
AUTOSHARD_INLINE Vec load_vec(const float* p) { return _mm512_loadu_ps(p); }
AUTOSHARD_INLINE void store_vec(float* p, Vec v) { _mm512_storeu_ps(p, v); }

template <class T>
constexpr int slot(int element) {
  return element;
}
template <>
constexpr int slot<bf16>(int element) {
  return element % 2 * kLanes + element / 2;
}

AUTOSHARD_INLINE Pair load_pair(const float* p) {
  return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + kLanes)};
}
AUTOSHARD_INLINE Pair load_pair(const f16* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm512_cvtph_ps(_mm256_loadu_si256(from)), _mm512_cvtph_ps(_mm256_loadu_si256(from + 1))};
}
AUTOSHARD_INLINE Pair load_pair(const bf16* p) {
  const __m512i both = _mm512_loadu_si512(p);
  const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
}

AUTOSHARD_INLINE __m512i round_bf16(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

AUTOSHARD_INLINE void store_half(void* p, __m512i v, bool stream) {
  if (stream) {
    _mm512_stream_si512(static_cast<__m512i*>(p), v);
  } else {
    _mm512_storeu_si512(p, v);
  }
}
AUTOSHARD_INLINE void store_pair(float* p, Pair v, bool stream) {
  store_half(p, _mm512_castps_si512(v.a), stream);
  store_half(p + kLanes, _mm512_castps_si512(v.b), stream);
}
AUTOSHARD_INLINE void store_pair(f16* p, Pair v, bool stream) {
  const __m256i a = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i b = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  store_half(p, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), stream);
}
AUTOSHARD_INLINE void store_pair(bf16* p, Pair v, bool stream) {
  const __m512i even = _mm512_srli_epi32(round_bf16(v.a), 16);
  store_half(p, _mm512_mask_blend_epi16(0xaaaaaaaau, even, round_bf16(v.b)), stream);
}

AUTOSHARD_INLINE Pair store_rounded(float* p, Pair v, bool stream) {
  store_pair(p, v, stream);
  return v;
}
AUTOSHARD_INLINE Pair store_rounded(f16* p, Pair v, bool stream) {
  const __m256i a = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i b = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  store_half(p, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), stream);
  return {_mm512_cvtph_ps(a), _mm512_cvtph_ps(b)};
}
AUTOSHARD_INLINE Pair store_rounded(bf16* p, Pair v, bool stream) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i a = round_bf16(v.a), b = round_bf16(v.b);
  store_half(p, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b), stream);
  return {_mm512_castsi512_ps(_mm512_and_si512(a, mask)),
          _mm512_castsi512_ps(_mm512_and_si512(b, mask))};
}

template <class T>
AUTOSHARD_INLINE Pair zero_dropped(const uint8_t* dropped, Vec v) {
  const __m128i* from = reinterpret_cast<const __m128i*>(dropped);
  const __m512i a = _mm512_cvtepi8_epi32(_mm_loadu_si128(from));
  const __m512i b = _mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1));
  const __m512i bits = _mm512_castps_si512(v);
  return {_mm512_castsi512_ps(_mm512_andnot_si512(a, bits)),
          _mm512_castsi512_ps(_mm512_andnot_si512(b, bits))};
}
template <>
AUTOSHARD_INLINE Pair zero_dropped<bf16>(const uint8_t* dropped, Vec v) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dropped));
  const __m512i both = _mm512_cvtepi16_epi32(bytes);
  const __m512i odd = _mm512_srai_epi32(both, 8);
  const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24);
  const __m512i bits = _mm512_castps_si512(v);
  return {_mm512_castsi512_ps(_mm512_andnot_si512(even, bits)),
          _mm512_castsi512_ps(_mm512_andnot_si512(odd, bits))};
}

#include "philox_avx2.h"

inline void finish_streaming() { _mm_sfence(); }
