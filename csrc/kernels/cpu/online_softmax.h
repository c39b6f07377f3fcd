// Online softmax over tiles of scores [key][query lane]: running maximum, sum and what they do to
// older sums. Shared by the forward kernels.
#pragma once

#include "kernels/cpu/tile.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

// What is known of a query block after some of its keys: the unnormalised output (laid out as its
// kernel likes), row maximum, row sum, and whether a key was visible.
template <class T>
struct Partial {
  T* output;
  T* maximum;
  T* sum;
  uint8_t* seen;

  AE_INLINE void allocate(Arena& arena, int64_t output_size) {
    output = arena.take<T>(output_size);
    maximum = arena.take<T>(kBlock);
    sum = arena.take<T>(kBlock);
    seen = arena.take<uint8_t>(kBlock);
  }
  AE_INLINE void clear(int64_t output_size) const {
    __builtin_memset(output, 0, output_size * sizeof(T));
    __builtin_memset(sum, 0, kBlock * sizeof(T));
    __builtin_memset(seen, 0, kBlock);
    for (int64_t x = 0; x < kBlock; ++x) maximum[x] = -kInfinity<T>;
  }
};

// Running maximum and sum of lanes [x, x + NV vectors); scores become probabilities, once `last`
// steps have been taken, `scale` what the sums of older keys shrink by.
template <class T, int NV, class Last>
AE_INLINE void softmax_strip(T* scores, T* scale, const Partial<T>& part, int64_t x, KeyRange keys,
                             const Last& last) {
  constexpr int W = kLanes<T>;
  AE_UNROLL for (int v = 0; v < NV; ++v) {
    T* const s = scores + x + v * W;
    const Vec<T> before = load(part.maximum + x + v * W);
    const auto score = [&](int64_t y) {
      Vec<T> value = load(s + y * kBlock);
      if constexpr (Last::kAny) {
        value = last(value, y * kBlock + x + v * W);
        store(s + y * kBlock, value);
      }
      return value;
    };
    Vec<T> even = before, odd = before;
    int64_t y = keys.begin;
    for (; y + 2 <= keys.end; y += 2) {
      even = max(even, score(y));
      odd = max(odd, score(y + 1));
    }
    if (y < keys.end) even = max(even, score(y));
    const Vec<T> most = max(even, odd);
    // A row that has seen nothing finite yet keeps a maximum of -inf; its scores must not become
    // NaN.
    const Vec<T> base = select(equal(most, broadcast(-kInfinity<T>)), Vec<T>{}, most);
    Vec<T> sum_even{}, sum_odd{};
    for (y = keys.begin; y + 2 <= keys.end; y += 2) {
      const Vec<T> a = exp_bounded<T>(load(s + y * kBlock) - base);
      const Vec<T> b = exp_bounded<T>(load(s + (y + 1) * kBlock) - base);
      store(s + y * kBlock, a);
      store(s + (y + 1) * kBlock, b);
      sum_even += a;
      sum_odd += b;
    }
    if (y < keys.end) {
      const Vec<T> a = exp_bounded<T>(load(s + y * kBlock) - base);
      store(s + y * kBlock, a);
      sum_even += a;
    }
    const Vec<T> shrink = exp_bounded<T>(before - base);
    store(scale + x + v * W, shrink);
    store(part.maximum + x + v * W, most);
    store(part.sum + x + v * W, fma(load(part.sum + x + v * W), shrink, sum_even + sum_odd));
  }
}

// Dropped probabilities become 0; kept ones are rescaled with the output.
template <class T, int NV>
AE_INLINE void drop_strip(T* scores, const uint8_t* keep, int64_t x, KeyRange keys) {
  for_scores<T, NV>(scores + x, kBlock, keys, [&](Vec<T> value, int64_t y, int64_t lane) {
    return select(mask_from_bytes<T>(keep + y * kBlock + x + lane), value, Vec<T>{});
  });
}

// Remembers which rows have seen a key of this tile.
template <class T>
AE_INLINE void note_seen(const Tile<T>& tile, const Partial<T>& part) {
  if (!tile.mixed) {
    __builtin_memset(part.seen, 1, kBlock);
    return;
  }
  for (int64_t x = 0; x < tile.lanes; x += 16) {
    Bytes16 seen = load_bytes(part.seen + x);
    if (!any_byte((Bytes16)(seen == 0))) continue;
    for (int64_t y = 0; y < tile.nk; ++y) seen |= load_bytes(tile.visible + y * kBlock + x);
    __builtin_memcpy(part.seen + x, &seen, 16);
  }
}

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
