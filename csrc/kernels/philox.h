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

// The params of this call, with the state read from the device if it lies there: seed, offset,
// heads_total (0 = this call's heads), first_head, first_row, first_key.
AE_INLINE DropoutParams with_state(DropoutParams d, int64_t heads) {
  if (d.threshold == 0 || d.state == nullptr) return d;
  d.seed = static_cast<uint64_t>(d.state[0]);
  d.offset = static_cast<uint64_t>(d.state[1]);
  d.heads_total = d.state[2] != 0 ? d.state[2] : heads;
  d.first_head = d.state[3];
  d.first_row = d.state[4];
  d.first_key = d.state[5];
  return d;
}

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

// Eight keys share one call: bit t says whether key 8 * group + t, counted from first_key's zero,
// is kept. Lane t is the 16-bit half t of the four words.
AE_INLINE uint32_t keep_group(const DropoutParams& d, int64_t b, int64_t h, int64_t i,
                              int64_t group) {
  uint32_t counter[4] = {static_cast<uint32_t>(d.offset), philox_head(d, b, h),
                         static_cast<uint32_t>(d.first_row + i), static_cast<uint32_t>(group)};
  philox(counter, philox_key(d));
  uint32_t bits = 0;
  for (int lane = 0; lane < 8; ++lane) {
    const uint32_t half = (counter[lane >> 1] >> (16 * (lane & 1))) & 0xffffu;
    bits |= static_cast<uint32_t>(half >= d.threshold) << lane;
  }
  return bits;
}

// One position.
AE_INLINE bool keep(const DropoutParams& d, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t key = d.first_key + j;
  return (keep_group(d, b, h, i, key >> 3) >> (key & 7) & 1) != 0;
}

}  // namespace attention_ext::kernels
