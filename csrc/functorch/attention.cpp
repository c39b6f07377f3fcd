// vmap's rules: the vmapped dimension N becomes one more batch dimension, whatever inputs have it;
// what does not have it is broadcast by strides, never copied. Sinks that differ between the N
// elements (or whose gradient must) and packed sequences place N into the heads instead. What fits
// neither, and dropout, whose counters must be those of a loop, is a loop here in C++. The ops are
// pure functions of their inputs, so a vmapped call always equals a loop: under
// randomness="different" the Python API draws a state per element.
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <vector>

#include "common/checks.h"
#include "ops/signature.h"

namespace attention_ext {
namespace {

// A tensor without its wrapper; if batched, dimension 0 is the vmapped one.
struct Argument {
  at::Tensor tensor;
  bool batched = false;

  int64_t rank() const { return tensor.dim() - (batched ? 1 : 0); }
};

using OptionalArgument = std::optional<Argument>;

enum OptionIndex { kMask, kBias, kKeyMask, kSinks, kSlopes, kOffsets, kCuQ, kCuK, kState };

// How one op looks to the rules. Distances of the head dimension are from the end: 3 for (H, L, E).
struct Operation {
  const char* name;
  std::vector<int64_t> tensor_heads;  // for each op tensor; empty: N does not fit into the heads
  std::vector<int64_t> result_heads;
  size_t query;      // the query's place among the tensors
  int bias_result;   // which result is attn_bias's gradient, or -1
  int sinks_result;  // the same for sinks
};

using Tensors = std::vector<std::optional<at::Tensor>>;
using Results = std::vector<at::Tensor>;

template <typename Run>
class VmappedCall {
 public:
  VmappedCall(const Operation& operation, Tensors tensors, const AttentionOptions& options,
              bool wants_bias, bool wants_sinks, const Run& run)
      : operation_(operation),
        scalars_(scalars_of(options)),
        wants_bias_(wants_bias),
        wants_sinks_(wants_sinks),
        run_(run) {
    level_ = at::functorch::maybeCurrentDynamicLayer()->layerId();
    for (const auto& tensor : tensors) tensors_.push_back(unwrap(tensor));
    size_t n = 0;
    for_each_tensor(
        options, [&](const std::optional<at::Tensor>& tensor) { options_[n++] = unwrap(tensor); });
  }

  Results operator()() {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
    if (!any_batched_) return run_(pick(0), picked_options(0));
    check_ranks();
    const bool packed = options_[kCuQ] || options_[kCuK];
    const bool own_sinks = options_[kSinks] && (options_[kSinks]->batched || wants_sinks_);
    Results results;
    if (scalars_.dropout_p > 0.0) {
      results = loop();
    } else if (packed || own_sinks) {
      results = fits_heads() ? fold_into_heads() : loop();
    } else {
      results = fold_into_batch();
    }
    for (auto& result : results) {
      if (result.defined()) result = at::functorch::makeBatched(result, 0, level_);
    }
    return results;
  }

 private:
  OptionalArgument unwrap(const std::optional<at::Tensor>& tensor) {
    if (!tensor || !tensor->defined()) return std::nullopt;
    auto [value, dim] = at::functorch::unwrapTensorAtLevel(*tensor, level_);
    if (!dim) return Argument{value, false};
    any_batched_ = true;
    Argument argument{value.movedim(*dim, 0), true};
    size_ = argument.tensor.sym_size(0);
    return argument;
  }

  int64_t query_rank() const { return tensors_[operation_.query]->rank(); }

  // The ranks seen by one element: after folding, a wrong one could look right.
  void check_ranks() const {
    const char* op = operation_.name;
    const auto query = query_rank();
    const auto rank = [&](OptionIndex index) {
      return options_[index] ? options_[index]->rank() : -1;
    };
    CHECK_ARGUMENT(op, query >= 3,
                   "query under vmap must have at least 3 dimensions (heads, length, size), got ",
                   query);
    const auto mask = rank(kMask), bias = rank(kBias), sinks = rank(kSinks), slopes = rank(kSlopes);
    CHECK_ARGUMENT(op, mask == -1 || mask == 2 || mask == query,
                   "attn_mask under vmap must be (L, S) or have the query's number of dimensions, ",
                   query, ", got ", mask);
    CHECK_ARGUMENT(op, bias == -1 || bias == 2 || bias == query,
                   "attn_bias under vmap must be (L, S) or have the query's number of dimensions, ",
                   query, ", got ", bias);
    CHECK_ARGUMENT(op, sinks == -1 || sinks == 1, "sinks under vmap must have one dimension, got ",
                   sinks);
    CHECK_ARGUMENT(
        op, slopes == -1 || slopes == 1 || slopes == query - 2,
        "alibi_slopes under vmap must be (H) or have the query's batch dimensions and H, ",
        query - 2, " dimensions, got ", slopes);
  }

  // (N, ...), expanded by stride 0 if this one does not differ between the elements.
  at::Tensor full(const Argument& argument) const {
    if (argument.batched) return argument.tensor;
    c10::SymDimVector sizes{size_};
    sizes.append(argument.tensor.sym_sizes().begin(), argument.tensor.sym_sizes().end());
    return argument.tensor.unsqueeze(0).expand_symint(sizes);
  }

  // Ones between dimension 0 and the last `kept`.
  at::Tensor pad(at::Tensor tensor, int64_t rank) const {
    while (tensor.dim() < rank) tensor = tensor.unsqueeze(1);
    return tensor;
  }

  AttentionOptions with_tensors(
      const std::array<std::optional<at::Tensor>, kOptionTensors>& tensors) const {
    AttentionOptions options = scalars_;
    size_t n = 0;
    for_each_tensor(options, [&](std::optional<at::Tensor>& tensor) { tensor = tensors[n++]; });
    return options;
  }

  // One element of everything, for the loop.
  Tensors pick(int64_t element) const {
    Tensors picked;
    for (const auto& argument : tensors_) picked.push_back(pick(argument, element));
    return picked;
  }

  static std::optional<at::Tensor> pick(const OptionalArgument& argument, int64_t element) {
    if (!argument) return std::nullopt;
    return argument->batched ? argument->tensor.select(0, element) : argument->tensor;
  }

  AttentionOptions picked_options(int64_t element) const {
    std::array<std::optional<at::Tensor>, kOptionTensors> picked;
    for (size_t n = 0; n < kOptionTensors; ++n) picked[n] = pick(options_[n], element);
    return with_tensors(picked);
  }

  Results loop() const {
    std::vector<Results> columns(operation_.result_heads.size());
    const auto elements = size_.guard_int(__FILE__, __LINE__);
    CHECK_ARGUMENT(operation_.name, elements > 0,
                   "query under vmap must have at least one element to loop over, got ", elements);
    for (int64_t element = 0; element < elements; ++element) {
      auto results = run_(pick(element), picked_options(element));
      for (size_t n = 0; n < results.size(); ++n) columns[n].push_back(results[n]);
    }
    Results stacked;
    for (const auto& column : columns) {
      stacked.push_back(column[0].defined() ? at::stack(column) : at::Tensor());
    }
    return stacked;
  }

  Results fold_into_batch() const {
    Tensors tensors;
    for (const auto& argument : tensors_) {
      tensors.push_back(argument ? std::optional<at::Tensor>(full(*argument)) : std::nullopt);
    }
    std::array<std::optional<at::Tensor>, kOptionTensors> options;
    for (const auto index : {kMask, kBias}) {
      if (options_[index])
        options[index] = scores_in_batch(*options_[index], index == kBias && wants_bias_);
    }
    if (options_[kKeyMask]) options[kKeyMask] = full(*options_[kKeyMask]);
    if (options_[kOffsets]) options[kOffsets] = full(*options_[kOffsets]);
    if (options_[kSinks]) options[kSinks] = options_[kSinks]->tensor;
    if (options_[kSlopes]) options[kSlopes] = slopes_in_batch(*options_[kSlopes]);
    auto results = run_(tensors, with_tensors(options));
    if (operation_.bias_result >= 0 && results[operation_.bias_result].defined()) {
      const auto& bias = *options_[kBias];
      auto& grad = results[operation_.bias_result];
      if (bias.rank() == 2) {
        grad = grad.reshape_symint({size_, bias.tensor.sym_size(-2), bias.tensor.sym_size(-1)});
      }
    }
    return results;
  }

  at::Tensor scores_in_batch(const Argument& argument, bool each) const {
    if (!argument.batched && !each) {
      return argument.rank() == 2 ? argument.tensor : argument.tensor.unsqueeze(0);
    }
    return pad(full(argument), query_rank() + 1);
  }

  at::Tensor slopes_in_batch(const Argument& argument) const {
    if (argument.rank() == 1 && !argument.batched) return argument.tensor;
    const auto& query = *tensors_[operation_.query];
    const auto sizes = query.tensor.sym_sizes().slice(query.batched ? 1 : 0);
    c10::SymDimVector shape{size_};
    shape.append(sizes.begin(), sizes.end() - 2);
    shape.back() = argument.tensor.sym_size(-1);
    return pad(full(argument), query_rank() - 1).expand_symint(shape);
  }

  bool fits_heads() const {
    if (operation_.tensor_heads.empty()) return false;
    for (const auto index : {kOffsets, kCuQ, kCuK}) {
      if (options_[index] && options_[index]->batched) return false;
    }
    if (key_mask_differs() && (options_[kMask] || !key_mask_becomes_mask())) return false;
    return scores_fit_heads(kMask, false) && scores_fit_heads(kBias, wants_bias_);
  }

  bool key_mask_differs() const { return options_[kKeyMask] && options_[kKeyMask]->batched; }

  // Padding has no heads to hold N; a bool mask of one row for each head means the same.
  bool key_mask_becomes_mask() const {
    return options_[kKeyMask]->tensor.scalar_type() == at::kBool && !options_[kCuK];
  }

  at::Tensor key_mask_as_mask() const {
    const auto mask = options_[kKeyMask]->tensor.unsqueeze(-2).unsqueeze(-2);
    c10::SymDimVector sizes(mask.sym_sizes().begin(), mask.sym_sizes().end());
    sizes[sizes.size() - 3] = tensors_[operation_.query]->tensor.sym_size(-3);
    return fold(mask.expand_symint(sizes), 3);
  }

  // Dense masks and biases go into the heads as they are: broadcast over all heads, or one for
  // each.
  bool scores_fit_heads(OptionIndex index, bool each) const {
    if (!options_[index]) return true;
    const auto& argument = *options_[index];
    const bool one_head = argument.rank() == 2 || argument.tensor.sym_size(-3) == 1;
    return argument.batched ? !one_head : one_head && !each;
  }

  // (N, ..., H, ...) -> (..., N * H, ...)
  static at::Tensor fold(const at::Tensor& tensor, int64_t head) {
    return tensor.movedim(0, -head - 1).flatten(-head - 1, -head);
  }

  at::Tensor unfold(const at::Tensor& tensor, int64_t head) const {
    const c10::SymInt heads = tensor.sym_size(-head) / size_;
    return tensor.unflatten_symint(-head, {size_, heads}).movedim(-head - 1, 0);
  }

  Results fold_into_heads() const {
    Tensors tensors;
    for (size_t n = 0; n < tensors_.size(); ++n) {
      tensors.push_back(tensors_[n] ? std::optional<at::Tensor>(
                                          fold(full(*tensors_[n]), operation_.tensor_heads[n]))
                                    : std::nullopt);
    }
    std::array<std::optional<at::Tensor>, kOptionTensors> options;
    for (const auto index : {kMask, kBias}) {
      if (!options_[index]) continue;
      options[index] =
          options_[index]->batched ? fold(options_[index]->tensor, 3) : options_[index]->tensor;
    }
    for (const auto index : {kKeyMask, kOffsets, kCuQ, kCuK}) {
      if (options_[index]) options[index] = options_[index]->tensor;
    }
    if (key_mask_differs()) {
      options[kMask] = key_mask_as_mask();
      options[kKeyMask].reset();
    }
    for (const auto index : {kSinks, kSlopes}) {
      if (options_[index]) options[index] = fold(full(*options_[index]), 1);
    }
    auto results = run_(tensors, with_tensors(options));
    for (size_t n = 0; n < results.size(); ++n) {
      if (results[n].defined()) results[n] = unfold(results[n], operation_.result_heads[n]);
    }
    return results;
  }

  const Operation& operation_;
  std::vector<OptionalArgument> tensors_;
  std::array<OptionalArgument, kOptionTensors> options_;
  AttentionOptions scalars_;
  bool wants_bias_, wants_sinks_;
  const Run& run_;
  int64_t level_ = 0;
  bool any_batched_ = false;
  c10::SymInt size_ = 0;
};

template <typename Tuple>
Results listed(Tuple&& results) {
  return std::apply([](auto&&... result) { return Results{std::move(result)...}; },
                    std::move(results));
}

const Operation kAttention{"attention", {3, 3, 3}, {3, 2, 2, 3}, 0, -1, -1};
const Operation kBackward{
    "attention_backward", {3, 2, 3, 3, 3, 3, 2, 2, 3}, {3, 3, 3, 3, 1}, 2, 3, 4};
const Operation kWeights{"attention_weights", {3, 3, 2, 2}, {3}, 0, -1, -1};
const Operation kWeightsBackward{
    "attention_weights_backward", {3, 3, 3, 2, 2}, {3, 3, 3, 1}, 1, 2, 3};
// Averages over the heads, which then are not those of one element.
const Operation kMeanWeights{"attention_weights", {}, {3}, 0, -1, -1};
const Operation kMeanWeightsBackward{"attention_weights_backward", {}, {3, 3, 3, 1}, 1, 2, 3};

Tensor4 attention_vmap(TensorArg query, TensorArg key, TensorArg value,
                       const AttentionOptions& options) {
  const auto run = [](const Tensors& t, const AttentionOptions& o) {
    return listed(attention(*t[0], *t[1], *t[2], o));
  };
  auto r = VmappedCall(kAttention, {query, key, value}, options, false, false, run)();
  return {r[0], r[1], r[2], r[3]};
}

Tensor5 attention_backward_vmap(OptionalArg grad_output, OptionalArg grad_logsumexp,
                                TensorArg query, TensorArg key, TensorArg value,
                                const AttentionOptions& options, TensorArg output,
                                TensorArg logsumexp, TensorArg logsumexp_residual,
                                OptionalArg output_residual, std::array<bool, 5> wanted) {
  const auto run = [&](const Tensors& t, const AttentionOptions& o) {
    return listed(
        attention_backward(t[0], t[1], *t[2], *t[3], *t[4], o, *t[5], *t[6], *t[7], t[8], wanted));
  };
  auto r = VmappedCall(kBackward,
                       {grad_output, grad_logsumexp, query, key, value, output, logsumexp,
                        logsumexp_residual, output_residual},
                       options, wanted[3], wanted[4], run)();
  return {r[0], r[1], r[2], r[3], r[4]};
}

at::Tensor attention_weights_vmap(TensorArg query, TensorArg key, const AttentionOptions& options,
                                  TensorArg logsumexp, TensorArg logsumexp_residual,
                                  bool average_heads) {
  const auto run = [&](const Tensors& t, const AttentionOptions& o) {
    return Results{attention_weights(*t[0], *t[1], o, *t[2], *t[3], average_heads)};
  };
  return VmappedCall(average_heads ? kMeanWeights : kWeights,
                     {query, key, logsumexp, logsumexp_residual}, options, false, false, run)()[0];
}

Tensor4 attention_weights_backward_vmap(TensorArg grad_weights, TensorArg query, TensorArg key,
                                        const AttentionOptions& options, TensorArg logsumexp,
                                        TensorArg logsumexp_residual, std::array<bool, 4> wanted,
                                        bool average_heads) {
  const auto run = [&](const Tensors& t, const AttentionOptions& o) {
    return listed(
        attention_weights_backward(*t[0], *t[1], *t[2], o, *t[3], *t[4], average_heads, wanted));
  };
  auto r = VmappedCall(average_heads ? kMeanWeightsBackward : kWeightsBackward,
                       {grad_weights, query, key, logsumexp, logsumexp_residual}, options,
                       wanted[2], wanted[3], run)();
  return {r[0], r[1], r[2], r[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(attention_ext, FuncTorchBatched, m) {
  m.impl("attention", AttentionOp::unboxed<attention_vmap>);
  m.impl("attention_backward", AttentionBackwardOp::unboxed<attention_backward_vmap>);
  m.impl("attention_weights", AttentionWeightsOp::unboxed<attention_weights_vmap>);
  m.impl("attention_weights_backward",
         AttentionWeightsBackwardOp::unboxed<attention_weights_backward_vmap>);
}

}  // namespace attention_ext
