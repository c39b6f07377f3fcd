// What goes into the conformance kernels: the same numbers on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.cuh"

namespace conformance {

class Random {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 33);
  }
  // About -4 to 4, with few bits, so that products of 16-bit numbers are exact.
  float small() { return static_cast<float>(static_cast<int>(next() % 65) - 32) / 8.0f; }

 private:
  uint64_t state_ = 42;
};

inline uint16_t half_bits(float x) {  // of a small multiple of 1/8
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x == 0.0f) return 0;
  return static_cast<uint16_t>((u >> 16 & 0x8000) | ((u >> 23 & 0xff) - 112) << 10 |
                               (u >> 13 & 0x3ff));
}
inline uint16_t bfloat_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<uint16_t>(u >> 16);
}

inline std::vector<uint8_t> input_of(const Entry& entry) {
  std::vector<uint8_t> bytes(static_cast<size_t>(entry.in_bytes));
  Random random;
  auto put = [&](size_t at, const auto& value) { std::memcpy(&bytes[at], &value, sizeof value); };
  const size_t size = bytes.size();
  switch (entry.input) {
    case Input::kBytes:
      for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next());
      break;
    case Input::kHalves:
    case Input::kBFloats:
      for (size_t at = 0; at < 768; at += 2) {
        const float x = random.small();
        put(at, entry.input == Input::kHalves ? half_bits(x) : bfloat_bits(x));
      }
      for (size_t at = 768; at < size; at += 4) put(at, random.small());
      break;
    case Input::kExponents:
      for (size_t at = 0; at < size; at += 4) {
        put(at, static_cast<float>(static_cast<int>(random.next() % 300000) - 150000) / 1000.0f);
      }
      put(0, -INFINITY);
      put(4, INFINITY);
      put(8, NAN);
      put(12, 0.0f);
      break;
    case Input::kFloats:
      for (size_t at = 0; at < size; at += 4) {  // any exponent from 2^-30 to 2^20
        const float x = static_cast<float>(random.next() | 1u) / 2147483648.0f;
        put(at,
            std::ldexp(random.next() % 2 != 0 ? x : -x, static_cast<int>(random.next() % 51) - 30));
      }
      put(0, -INFINITY);
      put(4, NAN);
      put(8, 65519.0f);  // rounds to the largest float16
      put(12, 65520.0f);
      put(16, 1.00048828125f);  // halfway between two float16: to the even one
      put(20, 1.00390625f);     // and between two bfloat16
      break;
    case Input::kAllHalves:
      for (size_t n = 0; n < size / 2; ++n) put(2 * n, static_cast<uint16_t>(n));
      break;
  }
  return bytes;
}

}  // namespace conformance
