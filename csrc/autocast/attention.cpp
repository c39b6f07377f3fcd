// Under autocast, query, key and value are cast as torch casts those of
// scaled_dot_product_attention: to the autocast dtype, float64 left alone. Biases, sinks and slopes
// are never cast down (finfo.min of a float32 bias would become -inf); a 16-bit one that is no
// longer in the query's dtype goes up to float32. The backward ops have no kernel here: autocast
// leaves them alone.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/signature.h"

namespace attention_ext {
namespace {

at::Tensor cast(const at::Tensor& tensor, c10::DeviceType device) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

AttentionOptions widen(const AttentionOptions& options, at::ScalarType query_dtype) {
  AttentionOptions wide = options;
  for_each_tensor(wide, [&](std::optional<at::Tensor>& tensor) {
    if (!tensor || tensor->scalar_type() == query_dtype) return;
    const auto dtype = tensor->scalar_type();
    if (dtype == at::kHalf || dtype == at::kBFloat16) tensor = tensor->to(at::kFloat);
  });
  return wide;
}

template <c10::DeviceType kDevice>
Tensor4 attention_autocast(TensorArg query, TensorArg key, TensorArg value,
                           const AttentionOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto q = cast(query, kDevice);
  return attention(q, cast(key, kDevice), cast(value, kDevice), widen(options, q.scalar_type()));
}

template <c10::DeviceType kDevice>
at::Tensor attention_weights_autocast(TensorArg query, TensorArg key,
                                      const AttentionOptions& options, TensorArg logsumexp,
                                      TensorArg logsumexp_residual, bool average_heads) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto q = cast(query, kDevice);
  return attention_weights(q, cast(key, kDevice), widen(options, q.scalar_type()), logsumexp,
                           logsumexp_residual, average_heads);
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, AutocastCPU, m) {
  m.impl("attention", AttentionOp::unboxed<attention_autocast<c10::DeviceType::CPU>>);
  m.impl("attention_weights",
         AttentionWeightsOp::unboxed<attention_weights_autocast<c10::DeviceType::CPU>>);
}

TORCH_LIBRARY_IMPL(attention_ext, AutocastCUDA, m) {
  m.impl("attention", AttentionOp::unboxed<attention_autocast<c10::DeviceType::CUDA>>);
  m.impl("attention_weights",
         AttentionWeightsOp::unboxed<attention_weights_autocast<c10::DeviceType::CUDA>>);
}

}  // namespace attention_ext
