// attention_backward and attention_weights_backward on the CPU: one pass over the keys for dQ, dK
// and dV, one over the bias if it wants a gradient, and the sinks.
#include <cstring>

#include "common/prepare.h"
#include "cpu/attention.h"
#include "cpu/launch.h"

namespace attention_ext::cpu {

namespace {

// The state that work items share, and whatever they left in it after an error.
class SharedState {
 public:
  SharedState(const kernels::BackwardParams& p, bool ordered) {
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
    if (p.grad_query.defined() && kernels::backward_ranges(p) > 1) {
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

void run_keys(kernels::BackwardParams& p, bool count) {
  const kernels::CpuKernels& tier = active_kernels();
  SharedState shared(p, p.grad_query.defined() || p.new_delta.defined());
  p.visited = count ? &visited_block_pairs() : nullptr;
  run_items(tier.backward_items(p), tier.backward_scratch(p), work_of(p, 5),
            [&](kernels::WorkQueue& queue, void* memory) {
              tier.backward(p, shared.get(), queue, memory);
            });
}

void run_bias(const kernels::BackwardParams& p) {
  if (!p.grad_bias.defined() || kernels::bias_with_keys(p)) return;  // done on the way
  const kernels::CpuKernels& tier = active_kernels();
  run_items(tier.bias_gradient_items(p), tier.bias_gradient_scratch(p), work_of(p, 2),
            [&](kernels::WorkQueue& queue, void* memory) { tier.bias_gradient(p, queue, memory); });
}

void run_sinks(const kernels::BackwardParams& p) {
  if (p.grad_sinks == nullptr) return;
  run_items(p.heads, 0, work_of(p, 1) / 16,
            [&](kernels::WorkQueue& queue, void*) { active_kernels().sink_gradient(p, queue); });
}

// delta of attention weights, which the other passes read.
void run_delta(const kernels::BackwardParams& p) {
  kernels::BackwardParams pass = p;
  pass.new_delta = p.delta;
  pass.delta = pass.grad_query = pass.grad_key = pass.grad_bias = kernels::View{};
  run_keys(pass, /*count=*/false);
}

}  // namespace

Tensor5 attention_backward(const std::optional<at::Tensor>& grad_output,
                           const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options, const at::Tensor& output,
                           const at::Tensor& logsumexp, const at::Tensor& logsumexp_residual,
                           const std::optional<at::Tensor>& output_residual,
                           std::array<bool, 5> wanted) {
  GradientCall call(/*on_device=*/false, grad_output, grad_logsumexp, query, key, value, options,
                    output, logsumexp, logsumexp_residual, output_residual, wanted);
  kernels::BackwardParams& p = call.params;
  if (call.value_is_zero()) {
    // zero_() may start threads, which a forked child lacks.
    std::memset(call.grad_value.data_ptr(), 0, call.grad_value.nbytes());
  }
  if (wanted[0] || wanted[1] || p.grad_value.defined()) run_keys(p, /*count=*/true);
  run_bias(p);
  run_sinks(p);
  return std::move(call).gradients(options);
}

Tensor4 attention_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                   const at::Tensor& key, const AttentionOptions& options,
                                   const at::Tensor& logsumexp,
                                   const at::Tensor& logsumexp_residual, std::array<bool, 4> wanted,
                                   bool average_heads) {
  GradientCall call(/*on_device=*/false, grad_weights, query, key, options, logsumexp,
                    logsumexp_residual, wanted, average_heads);
  run_delta(call.params);
  if (wanted[0] || wanted[1]) run_keys(call.params, /*count=*/false);
  run_bias(call.params);
  run_sinks(call.params);
  return std::move(call).weights_gradients(options);
}

}  // namespace attention_ext::cpu
