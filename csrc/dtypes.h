// 16-bit storage types and their scalar conversions, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace autoshard {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(f16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Moved into place, the exponent is 112 too small: one exact multiplication mends it, and
  // subnormal halves with it.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline void from_float(float value, float& out) { out = value; }

inline void from_float(float value, bf16& out) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(bits >> 16 | 0x40u);  // quiet NaN: never rounded to infinity
    return;
  }
  out.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void from_float(float value, f16& out) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
    return;
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    out.bits = static_cast<uint16_t>(sign | 0x7c00u);
    return;
  }
  if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 puts its last bit at the last bit of the sum, rounded to even.
    const uint32_t sum = float_bits(bits_float(magnitude) + 0.5f);
    out.bits = static_cast<uint16_t>(sign | (sum - 0x3f000000u));
    return;
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  out.bits = static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

}  // namespace autoshard
