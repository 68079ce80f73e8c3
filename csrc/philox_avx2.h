// Philox4x32-10 for eight groups at a time.  Each 32-bit word of the state lies in the low half of
// a 64-bit lane: the widening multiplication wants it there, and whatever the high half holds is
// never read.  About five instructions a word.  Included inside a namespace by vec_*.h.

struct PhiloxState {
  __m256i c0, c1, c2, c3;
};

AUTOSHARD_INLINE PhiloxState philox_start(uint64_t group, const Keys& dropout) {
  const __m256i first = _mm256_set1_epi64x(static_cast<long long>(group));
  const __m256i c0 = _mm256_add_epi64(first, _mm256_set_epi64x(3, 2, 1, 0));
  return {c0, _mm256_srli_epi64(c0, 32), _mm256_set1_epi64x(dropout.step),
          _mm256_set1_epi64x(dropout.site)};
}

AUTOSHARD_INLINE PhiloxState philox_round(PhiloxState s, __m256i k0, __m256i k1) {
  const __m256i p0 = _mm256_mul_epu32(s.c0, _mm256_set1_epi64x(kPhiloxMultiplier0));
  const __m256i p1 = _mm256_mul_epu32(s.c2, _mm256_set1_epi64x(kPhiloxMultiplier1));
  // Word and key are combined while the product is under way.
  const __m256i c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(s.c1, k0));
  const __m256i c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(s.c3, k1));
  return {c0, p1, c2, p0};
}

// 16-bit masks of 16 elements in order: all ones where the word is below the threshold.
AUTOSHARD_INLINE __m256i philox_dropped(PhiloxState s, __m256i threshold) {
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i words01 = _mm256_blend_epi32(s.c0, _mm256_slli_epi64(s.c1, 32), 0xaa);
  const __m256i words23 = _mm256_blend_epi32(s.c2, _mm256_slli_epi64(s.c3, 32), 0xaa);
  const __m256i below01 = _mm256_cmpgt_epi32(threshold, _mm256_xor_si256(words01, sign));
  const __m256i below23 = _mm256_cmpgt_epi32(threshold, _mm256_xor_si256(words23, sign));
  return _mm256_packs_epi32(_mm256_unpacklo_epi64(below01, below23),
                            _mm256_unpackhi_epi64(below01, below23));
}

// Writes 0xff for each dropped element of `groups` groups of four, 0 for each kept one; writes up
// to 32 bytes past them.
inline void drop_bytes(uint8_t* out, uint64_t group, int64_t groups, const Keys& dropout) {
  const __m256i threshold =
      _mm256_set1_epi32(static_cast<int>(dropout.threshold ^ 0x80000000u));
  int64_t keys[2 * kPhiloxRounds];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t turn = static_cast<uint32_t>(round);
    keys[2 * round] = static_cast<uint32_t>(dropout.seed) + turn * kPhiloxWeyl0;
    keys[2 * round + 1] = static_cast<uint32_t>(dropout.seed >> 32) + turn * kPhiloxWeyl1;
  }
  for (int64_t i = 0; i < groups; i += 8) {
    PhiloxState low = philox_start(group + i, dropout);
    PhiloxState high = philox_start(group + i + 4, dropout);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i k0 = _mm256_set1_epi64x(keys[2 * round]);
      const __m256i k1 = _mm256_set1_epi64x(keys[2 * round + 1]);
      low = philox_round(low, k0, k1);
      high = philox_round(high, k0, k1);
    }
    const __m256i bytes =
        _mm256_packs_epi16(philox_dropped(low, threshold), philox_dropped(high, threshold));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4 * i),
                        _mm256_permute4x64_epi64(bytes, 0xd8));
  }
}
