// Dropout's random function: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3", 2011) at a counter made of positions, so that the keep mask depends on the state and on
// (b, h, i, j) alone. Scalar form; cpu/dropout.h runs a vector of rows at a time and must give the
// same bits.
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxKey {
  uint32_t low, high;
};

// The high half of the offset goes into the key, its low half is the first counter word.
AE_INLINE PhiloxKey philox_key(const DropoutParams& d) {
  return {static_cast<uint32_t>(d.seed),
          static_cast<uint32_t>(d.seed >> 32) ^ static_cast<uint32_t>(d.offset >> 32)};
}

AE_INLINE uint32_t philox_head(const DropoutParams& d, int64_t b, int64_t h) {
  return static_cast<uint32_t>(b * d.heads_total + d.first_head + h);
}

AE_INLINE void philox(uint32_t (&counter)[4], PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxM0} * counter[0];
    const uint64_t b = uint64_t{kPhiloxM1} * counter[2];
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key.low;
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key.high;
    counter[3] = static_cast<uint32_t>(a);
    key.low += kPhiloxW0;
    key.high += kPhiloxW1;
  }
}

// One position: eight keys share one call, lane t is the 16-bit half t of its four words.
AE_INLINE bool keep(const DropoutParams& d, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t key = d.first_key + j;
  uint32_t counter[4] = {static_cast<uint32_t>(d.offset), philox_head(d, b, h),
                         static_cast<uint32_t>(d.first_row + i), static_cast<uint32_t>(key >> 3)};
  philox(counter, philox_key(d));
  const int lane = static_cast<int>(key & 7);
  return ((counter[lane >> 1] >> (16 * (lane & 1))) & 0xffffu) >= d.threshold;
}

}  // namespace attention_ext::kernels
