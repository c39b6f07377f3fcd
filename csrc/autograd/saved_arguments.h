// The tensors and options of one call as an autograd node keeps them, and the node itself: what our
// four nodes do alike. Only what was given is saved (each saved variable runs the user's pack
// hooks), the dropout state only when there is dropout.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <vector>

#include "ops/signature.h"

namespace attention_ext {

using torch::autograd::variable_list;

// The arguments of a call, given back in the order in which they were kept.
class Arguments {
 public:
  Arguments(std::vector<std::optional<at::Tensor>> tensors, AttentionOptions scalars)
      : tensors_(std::move(tensors)), scalars_(std::move(scalars)) {}

  std::optional<at::Tensor> optional() { return std::move(tensors_[next_++]); }

  at::Tensor tensor() { return *optional(); }

  AttentionOptions options() {
    AttentionOptions options = std::move(scalars_);
    for_each_tensor(options, [&](std::optional<at::Tensor>& tensor) { tensor = optional(); });
    return options;
  }

 private:
  std::vector<std::optional<at::Tensor>> tensors_;
  AttentionOptions scalars_;
  size_t next_ = 0;
};

class SavedArguments {
 public:
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

  void reserve(size_t tensors) { variables_.reserve(tensors); }

  void release() {
    for (auto& variable : variables_) variable.reset_data();
  }

  std::vector<std::optional<at::Tensor>> unpack(torch::autograd::Node* node) const {
    std::vector<std::optional<at::Tensor>> tensors(slots_.size());
    size_t variable = 0;
    for (size_t n = 0; n < slots_.size(); ++n) {
      if (slots_[n] == kAbsent) continue;
      const auto& saved = variables_[variable++];
      tensors[n] = slots_[n] == kOutput ? saved.unpack(node->getptr()) : saved.unpack();
    }
    return tensors;
  }

  const AttentionOptions& scalars() const { return scalars_; }

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

  void before(torch::dynamo::autograd::SwapSavedVariables& swap) {
    for (auto& variable : variables_) swap.before(variable);
    swap.before(scalars_.query_offset);
    swap.before(scalars_.window_left);
    swap.before(scalars_.window_right);
  }

  void after(torch::dynamo::autograd::SwapSavedVariables& swap) {
    for (auto& variable : variables_) swap.after(variable);
    swap.after(scalars_.query_offset);
    swap.after(scalars_.window_left);
    swap.after(scalars_.window_right);
  }

 private:
  enum Slot : char { kAbsent, kInput, kOutput };

  std::vector<torch::autograd::SavedVariable> variables_;
  c10::SmallVector<char, 20> slots_;
  AttentionOptions scalars_;
};

// A node whose backward is Self::formula, a pure function of the incoming gradients and the saved
// arguments: compiled autograd puts a call of that very function into its graph.
template <typename Self, size_t kInputs>
class AttentionNode : public torch::autograd::Node {
 public:
  using Wanted = std::array<bool, kInputs>;

  SavedArguments saved;
  bool average_heads = false;

  std::string name() const override { return Self::kName; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    saved.collect(args);
    args.collect(average_heads);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    const auto& interface = compiled::getPyCompilerInterface();
    static const bool bound = [&] {
      interface->bind_function(swap.get_py_compiler(), Self::kName, call_packed, packed_types());
      return true;
    }();
    static_cast<void>(bound);
    saved.before(swap);
    compiled::PackedArgs packed;
    pack(packed, wanted(), average_heads, saved.unpack(this), saved.scalars());
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    auto result = interface->call_function(swap.get_py_compiler(), "apply_functional", Self::kName,
                                           grads, packed.vec(), metadata);
    saved.after(swap);
    return result;
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Self::formula(grads, Arguments(saved.unpack(this), saved.scalars()), wanted(),
                         average_heads);
  }

 private:
  using TensorList = std::vector<std::optional<at::Tensor>>;
  using Offset = std::optional<c10::SymInt>;

  Wanted wanted() const {
    Wanted wanted;
    for (size_t n = 0; n < kInputs; ++n) wanted[n] = this->task_should_compute_output(n);
    return wanted;
  }

  // The three functions below keep to one order.
  static void pack(torch::dynamo::autograd::PackedArgs& packed, const Wanted& wanted,
                   bool average_heads, const TensorList& tensors, const AttentionOptions& scalars) {
    packed.pack(wanted);
    packed.pack(average_heads);
    packed.pack(tensors);
    packed.pack(scalars.query_offset);
    packed.pack(scalars.window_left);
    packed.pack(scalars.window_right);
    packed.pack(scalars.is_causal);
    packed.pack(scalars.scale);
    packed.pack(scalars.softcap);
    packed.pack(scalars.dropout_p);
  }

  static variable_list call_packed(const variable_list& grads,
                                   const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto wanted = packed.unpack<Wanted>();
    const auto average_heads = packed.unpack<bool>();
    auto tensors = packed.unpack<TensorList>();
    AttentionOptions scalars;
    scalars.query_offset = packed.unpack<c10::SymInt>();
    scalars.window_left = packed.unpack<Offset>();
    scalars.window_right = packed.unpack<Offset>();
    scalars.is_causal = packed.unpack<bool>();
    scalars.scale = packed.unpack<std::optional<double>>();
    scalars.softcap = packed.unpack<double>();
    scalars.dropout_p = packed.unpack<double>();
    return Self::formula(grads, Arguments(std::move(tensors), std::move(scalars)), wanted,
                         average_heads);
  }

  template <typename... T>
  static std::vector<at::TypePtr> types_of() {
    return {torch::dynamo::autograd::IValuePacker<T>::packed_type()...};
  }

  static std::vector<at::TypePtr> packed_types() {
    return types_of<Wanted, bool, TensorList, c10::SymInt, Offset, Offset, bool,
                    std::optional<double>, double, double>();
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
