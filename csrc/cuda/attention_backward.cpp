// attention_backward and attention_weights_backward on CUDA: the passes of kernels/cuda/launch.h,
// in their order, on one stream.
#include "common/prepare.h"
#include "cuda/attention.h"
#include "cuda/launch.h"

namespace attention_ext::cuda {

namespace {

void run_passes(const Target& target, const kernels::BackwardParams& p) {
  const at::Tensor workspace =
      target.workspace(kernels::cuda::bias_gradient_workspace(p, target.limits()));
  target.check(kernels::cuda::backward_delta(p, target.limits(), target.stream()));
  target.check(kernels::cuda::backward_keys(p, target.limits(), target.stream()));
  target.check(kernels::cuda::backward_queries(p, target.limits(), target.stream()));
  target.check(
      kernels::cuda::bias_gradient(p, address(workspace), target.limits(), target.stream()));
  target.check(kernels::cuda::sink_gradient(p, target.limits(), target.stream()));
}

}  // namespace

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted) {
  const Target target("attention_backward", query);
  GradientCall call(/*on_device=*/true, grad_output, grad_logsumexp, query, key, value, options,
                    output, logsumexp, logsumexp_residual, output_residual, wanted);
  call.params.visited = target.visited();
  if (call.value_is_zero()) call.grad_value.zero_();
  run_passes(target, call.params);
  return std::move(call).gradients(options);
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, std::array<bool, 4> wanted,
                                   bool average_heads) {
  const Target target("attention_weights_backward", query);
  GradientCall call(/*on_device=*/true, grad_weights, query, key, options, logsumexp,
                    logsumexp_residual, wanted, average_heads);
  run_passes(target, call.params);
  return std::move(call).weights_gradients(options);
}

}  // namespace attention_ext::cuda
