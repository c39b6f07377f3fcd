// attention on CUDA: the forward kernels.
#include "cuda/attention.h"

#include "common/prepare.h"
#include "cuda/launch.h"

namespace attention_ext::cuda {

Tensor4 attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const AttentionOptions& options) {
  const Target target("attention", query);
  ForwardCall call(/*on_device=*/true, query, key, value, options);
  call.params.visited = target.visited();
  const at::Tensor workspace =
      target.workspace(kernels::cuda::forward_workspace(call.params, target.limits()));
  target.check(
      kernels::cuda::forward(call.params, address(workspace), target.limits(), target.stream()));
  return std::move(call).results();
}

}  // namespace attention_ext::cuda
