// attention_backward and attention_weights_backward on the CPU: one pass over the keys for dQ, dK
// and dV, one over the bias if it wants a gradient, and the sinks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "common/make_params.h"
#include "cpu/attention.h"
#include "cpu/launch.h"
#include "cpu/outputs.h"

namespace attention_ext::cpu {

namespace {

// The state that work items share, and whatever they left in it after an error.
class SharedState {
 public:
  SharedState(const kernels::BackwardParams& p, bool ordered, bool sums) {
    state_.heads_at_once = at::get_num_threads();
    const int64_t blocks = kernels::query_blocks(p) * p.heads;
    if (ordered && kernels::backward_ranges(p) > 1) {
      added_ = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(blocks));
      state_.added = added_.get();
    }
    if (kernels::bias_with_keys(p)) {
      bias_added_ =
          std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(kernels::bias_turns(p)));
      state_.bias_added = bias_added_.get();
    }
    if (sums && kernels::backward_ranges(p) > 1) {
      heads_ = p.problems * p.heads;
      double_precision_ = p.type == kernels::ScalarType::kFloat64;
      sums_ = std::make_unique<std::atomic<void*>[]>(static_cast<size_t>(heads_));
      remaining_ =
          std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(p.problems * p.kv_heads));
      state_.sums = sums_.get();
      state_.remaining = remaining_.get();
    }
  }
  SharedState(const SharedState&) = delete;
  SharedState& operator=(const SharedState&) = delete;
  ~SharedState() {
    for (int64_t h = 0; h < heads_; ++h) {
      void* const left = sums_[h].load();
      double_precision_ ? delete[] static_cast<double*>(left) : delete[] static_cast<float*>(left);
    }
  }
  kernels::BackwardState& get() { return state_; }

 private:
  kernels::BackwardState state_;
  std::unique_ptr<std::atomic<int32_t>[]> added_, remaining_, bias_added_;
  std::unique_ptr<std::atomic<void*>[]> sums_;
  int64_t heads_ = 0;
  bool double_precision_ = false;
};

// The bias gradient is summed in the accumulation type, in the bias's own shape.
at::Tensor prepare_bias_grad(kernels::BackwardParams& p, const at::Tensor& bias,
                             const CallShape& shape, const at::TensorOptions& exact,
                             ParamsStorage& storage) {
  // With no batch or no heads nobody writes it.
  const bool written = shape.batch * shape.heads > 0;
  at::Tensor grad = written ? at::empty(bias.sizes(), exact) : at::zeros(bias.sizes(), exact);
  p.grad_bias = make_view(grad, shape.batch_sizes, storage);
  // Every element has a place: dimensions of size 1 are told by bias_size.
  p.bias_size[0] =
      bias.dim() > 3 ? c10::multiply_integers(bias.sizes().slice(0, bias.dim() - 3)) : 1;
  p.bias_size[1] = bias.dim() > 2 ? bias.size(-3) : 1;
  p.bias_size[2] = bias.size(-2);
  p.bias_size[3] = bias.size(-1);
  return grad;
}

void run_keys(kernels::BackwardParams& p, const CallShape& shape, bool count) {
  const kernels::CpuKernels& tier = active_kernels();
  const bool sums = p.grad_query.defined() && (p.type == kernels::ScalarType::kBFloat16 ||
                                               p.type == kernels::ScalarType::kFloat16);
  SharedState shared(p, p.grad_query.defined() || p.grad_statistics.defined(), sums);
  p.visited = count ? &visited_block_pairs() : nullptr;
  run_items(tier.backward_items(p), tier.backward_scratch(p), work_of(p, shape, 5),
            [&](kernels::WorkQueue& queue, void* memory) {
              tier.backward(p, shared.get(), queue, memory);
            });
}

void run_bias(const kernels::BackwardParams& p, const CallShape& shape) {
  if (kernels::bias_with_keys(p)) return;  // done on the way
  const kernels::CpuKernels& tier = active_kernels();
  run_items(tier.bias_gradient_items(p), tier.bias_gradient_scratch(p), work_of(p, shape, 2),
            [&](kernels::WorkQueue& queue, void* memory) { tier.bias_gradient(p, queue, memory); });
}

}  // namespace

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted) {
  const CallShape shape = call_shape(query, key, value.size(-1));
  const at::ScalarType accumulation = accumulation_type(query.scalar_type());
  const auto exact = query.options().dtype(accumulation);

  ParamsStorage storage;
  kernels::BackwardParams p;
  fill_params(p, shape, query, key, value, options, storage);
  p.output = make_view(output, shape.batch_sizes, storage);
  if (output_residual && output_residual->defined()) {
    p.output_residual = make_view(*output_residual, shape.batch_sizes, storage);
  }
  p.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  p.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  if (grad_output && grad_output->defined()) {
    p.grad_output = make_view(*grad_output, shape.batch_sizes, storage);
  }
  if (grad_logsumexp && grad_logsumexp->defined()) {
    p.grad_logsumexp = make_row_view(*grad_logsumexp, shape.batch_sizes, storage);
  }

  at::Tensor grad_query, grad_key, grad_value, grad_bias, grad_sinks;
  if (wanted[0]) {
    grad_query = empty_heads(query, shape.heads, shape.q_length, shape.qk_size);
    p.grad_query = make_view(grad_query, shape.batch_sizes, storage);
  }
  if (wanted[1]) {
    grad_key = empty_heads(key, shape.kv_heads, shape.k_length, shape.qk_size);
    p.grad_key = make_view(grad_key, shape.batch_sizes, storage);
  }
  if (wanted[2]) {
    grad_value = empty_heads(value, shape.kv_heads, shape.k_length, shape.v_size);
    if (p.grad_output.defined()) {
      p.grad_value = make_view(grad_value, shape.batch_sizes, storage);
    } else {
      // Logsumexp does not depend on the values. (zero_() may start threads, which a forked child
      // lacks.)
      std::memset(grad_value.data_ptr(), 0, grad_value.nbytes());
    }
  }
  if (wanted[3]) grad_bias = prepare_bias_grad(p, *options.attn_bias, shape, exact, storage);
  if (wanted[0] || wanted[1] || p.grad_value.defined()) run_keys(p, shape, /*count=*/true);
  if (wanted[3]) {
    run_bias(p, shape);
    grad_bias = grad_bias.to(options.attn_bias->scalar_type());
  }
  if (wanted[4]) {
    grad_sinks = at::empty(options.sinks->sizes(), exact);
    p.grad_sinks = grad_sinks.data_ptr();
    run_items(p.heads, 0, work_of(p, shape, 1) / 16,
              [&](kernels::WorkQueue& queue, void*) { active_kernels().sink_gradient(p, queue); });
    grad_sinks = grad_sinks.to(options.sinks->scalar_type());
  }
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value), std::move(grad_bias),
          std::move(grad_sinks)};
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, bool average_heads,
                                   std::array<bool, 4> wanted) {
  const CallShape shape = call_shape(query, key, /*v_size=*/0);
  const auto exact = query.options().dtype(accumulation_type(query.scalar_type()));

  ParamsStorage storage;
  kernels::BackwardParams p;
  fill_params(p, shape, query, key, at::Tensor(), options, storage);
  p.logsumexp = make_row_view(logsumexp, shape.batch_sizes, storage);
  p.residual = make_row_view(logsumexp_residual, shape.batch_sizes, storage);
  p.grad_weights = make_view(average_heads ? grad_weights.unsqueeze(-3) : grad_weights,
                             shape.batch_sizes, storage);
  if (grad_weights.size(-1) == 1) p.grad_weights.stride[3] = 0;
  p.grad_weights_scale =
      average_heads && shape.heads > 0 ? 1.0 / static_cast<double>(shape.heads) : 1.0;

  at::Tensor grad_query, grad_key, grad_bias, grad_statistics;
  if (wanted[0]) {
    grad_query = empty_heads(query, shape.heads, shape.q_length, shape.qk_size);
    p.grad_query = make_view(grad_query, shape.batch_sizes, storage);
  }
  if (wanted[1]) {
    grad_key = empty_heads(key, shape.kv_heads, shape.k_length, shape.qk_size);
    p.grad_key = make_view(grad_key, shape.batch_sizes, storage);
  }
  if (wanted[3]) {
    grad_statistics = at::empty(logsumexp.sizes(), exact);
    p.grad_statistics = make_row_view(grad_statistics, shape.batch_sizes, storage);
  }
  if (wanted[2]) grad_bias = prepare_bias_grad(p, *options.attn_bias, shape, exact, storage);
  if (wanted[0] || wanted[1] || wanted[3]) run_keys(p, shape, /*count=*/false);
  if (wanted[2]) {
    run_bias(p, shape);
    grad_bias = grad_bias.to(options.attn_bias->scalar_type());
  }
  return {std::move(grad_query), std::move(grad_key), std::move(grad_bias),
          std::move(grad_statistics)};
}

}  // namespace attention_ext::cpu
