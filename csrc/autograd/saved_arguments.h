// The tensors and options of one call as an autograd node keeps them: only what was given is saved
// (each saved variable runs the user's pack hooks), the dropout state only when there is dropout.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <vector>

#include "ops/signature.h"

namespace attention_ext {

class SavedArguments {
 public:
  // Tensors come back from `Unpacked` in the order in which they were kept.
  void keep(const std::optional<at::Tensor>& tensor, bool is_output = false) {
    const bool given = tensor.has_value() && tensor->defined();
    slots_.push_back(!given ? kAbsent : is_output ? kOutput : kInput);
    if (given) variables_.emplace_back(*tensor, is_output);
  }

  void keep(const AttentionOptions& options) {
    scalars_ = scalars_of(options);
    for_each_tensor(options, [&](const std::optional<at::Tensor>& tensor) {
      const bool idle = &tensor == &options.rng_state && options.dropout_p == 0.0;
      keep(idle ? std::nullopt : tensor);
    });
  }

  void reserve(size_t tensors) {
    variables_.reserve(tensors);
    slots_.reserve(tensors + kOptionTensors);
  }

  void release() {
    for (auto& variable : variables_) variable.reset_data();
  }

  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    size_t variable = 0;
    for (const char slot : slots_) {
      args.collect(slot);
      if (slot != kAbsent) args.collect(variables_[variable++], /*is_output=*/slot == kOutput);
    }
    args.collect(scalars_.query_offset);
    args.collect(scalars_.window_left);
    args.collect(scalars_.window_right);
    args.collect(scalars_.is_causal);
    args.collect(scalars_.scale);
    args.collect(scalars_.softcap);
    args.collect(scalars_.dropout_p);
  }

  void before(torch::dynamo::autograd::SwapSavedVariables& saved) {
    for (auto& variable : variables_) saved.before(variable);
    saved.before(scalars_.query_offset);
    saved.before(scalars_.window_left);
    saved.before(scalars_.window_right);
  }

  void after(torch::dynamo::autograd::SwapSavedVariables& saved) {
    for (auto& variable : variables_) saved.after(variable);
    saved.after(scalars_.query_offset);
    saved.after(scalars_.window_left);
    saved.after(scalars_.window_right);
  }

  class Unpacked {
   public:
    Unpacked(const SavedArguments& saved, torch::autograd::Node* node)
        : saved_(saved), node_(node) {}

    std::optional<at::Tensor> optional() {
      const char slot = saved_.slots_[slot_++];
      if (slot == kAbsent) return std::nullopt;
      const auto& variable = saved_.variables_[variable_++];
      return slot == kOutput ? variable.unpack(node_->getptr()) : variable.unpack();
    }

    at::Tensor tensor() { return *optional(); }

    AttentionOptions options() {
      AttentionOptions options = saved_.scalars_;
      for_each_tensor(options, [&](std::optional<at::Tensor>& tensor) { tensor = optional(); });
      return options;
    }

   private:
    const SavedArguments& saved_;
    torch::autograd::Node* node_;
    size_t slot_ = 0, variable_ = 0;
  };

 private:
  enum Slot : char { kAbsent, kInput, kOutput };

  std::vector<torch::autograd::SavedVariable> variables_;
  c10::SmallVector<char, 16> slots_;
  AttentionOptions scalars_;
};

// What all our nodes do alike; each adds its name and apply.
class AttentionNode : public torch::autograd::Node {
 public:
  using Node::Node;

  SavedArguments saved;

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    saved.collect(args);
  }

  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& inputs,
      torch::dynamo::autograd::SwapSavedVariables& swap) override {
    saved.before(swap);
    auto result = apply(torch::autograd::variable_list(inputs));
    saved.after(swap);
    return result;
  }

 protected:
  template <size_t N>
  std::array<bool, N> wanted_outputs() const {
    std::array<bool, N> wanted;
    for (size_t n = 0; n < N; ++n) wanted[n] = task_should_compute_output(n);
    return wanted;
  }
};

inline std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

template <typename... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

}  // namespace attention_ext
