// attention_weights on CUDA.
#include "common/prepare.h"
#include "cuda/attention.h"
#include "cuda/launch.h"

namespace attention_ext::cuda {

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options, const at::Tensor& logsumexp,
                             const at::Tensor& logsumexp_residual, bool average_heads) {
  const Target target("attention_weights", query);
  WeightsCall call(/*on_device=*/true, query, key, options, logsumexp, logsumexp_residual,
                   average_heads);
  if (call.weights.numel() > 0) {
    target.check(kernels::cuda::weights(call.params, target.limits(), target.stream()));
  }
  return call.weights;
}

}  // namespace attention_ext::cuda
