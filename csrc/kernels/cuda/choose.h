// Which kernels take a call. The tensor-core kernels take what their 16-byte copies and their head
// sizes allow; everything else goes to the SIMT kernels, which take all. A rule on the params and
// the device only, so that it is the same in every pass that asks.
//
// A call goes to the tensor cores if all of this holds:
//   - the type is float16 or bfloat16, and the device is compute capability 8.0 or newer;
//   - 8 <= E, Ev <= 256, both multiples of 8;
//   - rows of query, key and value (backward: of the output's gradient, too) have adjacent columns
//     and begin at multiples of 16 bytes; gradients are ours and always do;
//   - the batch folds into one stride, and sequences are not packed.
// There every option is taken: masks, biases of any broadcast, windows, dropout, softcap, sinks,
// ALiBi, grouped heads.
#pragma once

#include "kernels/cuda/launch.h"

namespace attention_ext::kernels::cuda {

// Head sizes that kernels are compiled for: others are padded with zeros in shared memory.
AE_INLINE int64_t padded_size(const AttentionParams& p) {
  const int64_t size = p.qk_size > p.v_size ? p.qk_size : p.v_size;
  return size <= 64 ? 64 : size <= 128 ? 128 : 256;
}

// Whether rows can be copied 16 bytes at a time.
AE_INLINE bool rows_are_aligned(const View& view) {
  if (view.batch_offsets != nullptr || view.stride[3] != 1) return false;
  for (int d = 0; d < 3; ++d) {
    if (view.stride[d] % 8 != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

AE_INLINE bool tensor_cores_take(const AttentionParams& p, const DeviceLimits& device) {
  const bool half = p.type == ScalarType::kFloat16 || p.type == ScalarType::kBFloat16;
  const auto fits = [](int64_t size) { return size >= 8 && size <= 256 && size % 8 == 0; };
  return half && device.major >= 8 && !p.packed() && fits(p.qk_size) && fits(p.v_size) &&
         rows_are_aligned(p.query) && rows_are_aligned(p.key) && rows_are_aligned(p.value);
}

// The same for the passes of the backward; attention weights have no value and go to SIMT.
AE_INLINE bool tensor_cores_take(const BackwardParams& p, const DeviceLimits& device) {
  const AttentionParams& forward = p;
  return tensor_cores_take(forward, device) && !p.grad_weights.defined() && p.value.defined() &&
         (!p.grad_output.defined() || rows_are_aligned(p.grad_output));
}

// Whether a call needs the instance that takes every option; the plain one takes windows, bool
// masks and sinks, which keeps more registers for products.
AE_INLINE bool needs_general(const AttentionParams& p) {
  return p.attn_bias.defined() || p.softcap > 0 || p.alibi_slopes != nullptr ||
         !(static_cast<float>(p.scale) > 0) || p.dropout.threshold != 0 ||
         (p.key_mask.defined() && !p.key_mask_is_bool);
}

// f<size, general>() for the instance that takes a call.
template <class F>
const char* for_instance(const AttentionParams& p, F&& f) {
  const bool general = needs_general(p);
  switch (padded_size(p)) {
    case 64:
      return general ? f.template operator()<64, true>() : f.template operator()<64, false>();
    case 128:
      return general ? f.template operator()<128, true>() : f.template operator()<128, false>();
    default:
      return general ? f.template operator()<256, true>() : f.template operator()<256, false>();
  }
}

}  // namespace attention_ext::kernels::cuda
