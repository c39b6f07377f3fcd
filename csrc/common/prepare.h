// What the four ops do before their kernels run, alike on every device: allocate the results and
// fill the params that point at them. For csrc/cpu and csrc/cuda, which run the kernels.
#pragma once

#include "common/make_params.h"
#include "ops/attention.h"

namespace attention_ext {

// One call on its way to the kernels: nothing in it may move, since the params point inside.
template <class Params>
struct PreparedCall {
  CallShape shape;
  ParamsStorage storage;
  Params params;

  explicit PreparedCall(bool on_device) { storage.on_device = on_device; }
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;
};

struct ForwardCall : PreparedCall<kernels::AttentionParams> {
  at::Tensor output, logsumexp, residual, output_residual;

  ForwardCall(bool on_device, const at::Tensor& query, const at::Tensor& key,
              const at::Tensor& value, const AttentionOptions& options);
  Tensor4 results() && {
    return {std::move(output), std::move(logsumexp), std::move(residual),
            std::move(output_residual)};
  }
};

// Gradients that are wanted; those of attn_bias and sinks are summed in the accumulation type and
// take their own when they leave.
struct GradientCall : PreparedCall<kernels::BackwardParams> {
  at::Tensor grad_query, grad_key, grad_value, grad_bias, grad_sinks;
  at::Tensor delta;  // on a device, and for weights

  // attention_backward. Without grad_output the value's gradient is zero: it is allocated, and the
  // caller clears it.
  GradientCall(bool on_device, const std::optional<at::Tensor>& grad_output,
               const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
               const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options,
               const at::Tensor& output, const at::Tensor& logsumexp,
               const at::Tensor& logsumexp_residual,
               const std::optional<at::Tensor>& output_residual, std::array<bool, 5> wanted);
  // attention_weights_backward.
  GradientCall(bool on_device, const at::Tensor& grad_weights, const at::Tensor& query,
               const at::Tensor& key, const AttentionOptions& options, const at::Tensor& logsumexp,
               const at::Tensor& logsumexp_residual, std::array<bool, 4> wanted,
               bool average_heads);

  bool value_is_zero() const { return grad_value.defined() && !params.grad_value.defined(); }
  Tensor5 gradients(const AttentionOptions& options) &&;
  Tensor4 weights_gradients(const AttentionOptions& options) &&;

 private:
  void fill_query_and_key(const at::Tensor& query, const at::Tensor& key, bool wants_query,
                          bool wants_key);
  void fill_bias(const at::Tensor& bias, const at::TensorOptions& exact);
  void fill_sinks(const at::Tensor& sinks, const at::TensorOptions& exact);
  void fill_delta(const at::Tensor& logsumexp);
};

struct WeightsCall : PreparedCall<kernels::WeightsParams> {
  at::Tensor weights;

  WeightsCall(bool on_device, const at::Tensor& query, const at::Tensor& key,
              const AttentionOptions& options, const at::Tensor& logsumexp,
              const at::Tensor& logsumexp_residual, bool average_heads);
};

}  // namespace attention_ext
