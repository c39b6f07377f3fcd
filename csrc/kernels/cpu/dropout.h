// The keep mask of one tile as bytes [key][query lane], from kernels/philox.h's function, one
// vector of query rows at a time.
#pragma once

#include "kernels/cpu/pack.h"
#include "kernels/philox.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

using Wide = Vec<uint64_t>;
constexpr int kWideLanes = kVectorBytes / 8;

// Four words for kWideLanes counters that differ in the row only; results lie in the low halves of
// the lanes.
AE_INLINE void philox_rows(uint32_t offset, uint32_t head, Wide rows, uint32_t keys, PhiloxKey key,
                           Wide (&words)[4]) {
  const Wide m0 = Wide{} + kPhiloxM0, m1 = Wide{} + kPhiloxM1;
  Wide c0 = Wide{} + offset, c1 = Wide{} + head, c2 = rows, c3 = Wide{} + keys;
  AE_UNROLL for (int round = 0; round < kPhiloxRounds; ++round) {
    const Wide a = multiply_low_halves(c0, m0);
    const Wide b = multiply_low_halves(c2, m1);
    c0 = (b >> 32) ^ c1 ^ (Wide{} + key.low);
    c1 = b;
    c2 = (a >> 32) ^ c3 ^ (Wide{} + key.high);
    c3 = a;
    key.low += kPhiloxW0;
    key.high += kPhiloxW1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// keep[y * ld + x] = 255 or 0 for keys y < nk and lanes x < lanes (a multiple of the vector).
template <class T>
void keep_tile(const DropoutParams& d, int64_t b, int64_t h, int64_t i0, int64_t lanes, int64_t j0,
               int64_t nk, uint8_t* keep, int64_t ld) {
  constexpr int W = kLanes<T>;
  using I = IntOf<T>;
  const PhiloxKey key = philox_key(d);
  const uint32_t head = philox_head(d, b, h);
  const Vec<I> threshold = Vec<I>{} + static_cast<I>(d.threshold);
  const int64_t first = d.first_key + j0;
  Wide steps;
  for (int x = 0; x < kWideLanes; ++x)
    steps[x] = static_cast<uint64_t>(x) * (sizeof(T) == 4 ? 2 : 1);
  for (int64_t x = 0; x < lanes; x += W) {
    const Wide rows = steps + (Wide{} + static_cast<uint64_t>(d.first_row + i0 + x));
    for (int64_t group = first >> 3; group <= (first + nk - 1) >> 3; ++group) {
      Wide words[4];
      philox_rows(static_cast<uint32_t>(d.offset), head, rows, static_cast<uint32_t>(group), key,
                  words);
      if constexpr (sizeof(T) ==
                    4) {  // even rows above, odd rows here: interleave their low halves
        Wide odd[4];
        philox_rows(static_cast<uint32_t>(d.offset), head, rows + 1, static_cast<uint32_t>(group),
                    key, odd);
        AE_UNROLL for (int w = 0; w < 4; ++w) {
          words[w] = (words[w] & 0xffffffffu) | (odd[w] << 32);
        }
      }
      AE_UNROLL for (int t = 0; t < 8; ++t) {
        const int64_t y = group * 8 + t - first;
        if (y >= 0 && y < nk) {
          const Vec<I> word = (Vec<I>)words[t / 2];
          const Vec<I> half = (t & 1) != 0 ? (word >> 16) & 0xffff : word & 0xffff;
          mask_to_bytes<T>(keep + y * ld + x, at_least(half, threshold));
        }
      }
    }
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
