// Runs calls of the C++ API that tests/test_cpp_library.py wrote to a file and saves what came out:
//     library_cases CASES.pt RESULTS.pt
// A case is a dict; what its keys mean is said in that test. A result is a dict of tensors: the
// outputs and "grad." + name for every input and parameter that wants a gradient; or the text of an
// error.
#include <ATen/ATen.h>
#include <attention_ext/nn.h>
#include <torch/nn/modules/container/any_module_holder.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "pickle_file.h"

namespace {

namespace ae = attention_ext;
using Result = c10::Dict<std::string, at::Tensor>;

class Case {
 public:
  explicit Case(const c10::IValue& value) : dict_(value.toGenericDict()) {}

  bool has(const std::string& name) const {
    return dict_.contains(name) && !dict_.at(name).isNone();
  }
  c10::IValue at(const std::string& name) const { return dict_.at(name); }
  bool flag(const std::string& name) const { return has(name) && at(name).toBool(); }

  // Equal tensors of the file stay one tensor; those listed under "wants_grad" become leaves.
  at::Tensor tensor(const std::string& name) {
    if (!has(name)) return {};
    const at::Tensor saved = at(name).toTensor();
    const auto [entry, added] = tensors_.try_emplace(saved.unsafeGetTensorImpl(), saved);
    for (const c10::IValue& wanted : dict_.at("wants_grad").toListRef()) {
      if (wanted.toStringRef() != name) continue;
      entry->second.requires_grad_();
      leaves_[name] = entry->second;
    }
    return entry->second;
  }

  const std::map<std::string, at::Tensor>& leaves() const { return leaves_; }

 private:
  c10::Dict<c10::IValue, c10::IValue> dict_;
  std::map<at::TensorImpl*, at::Tensor> tensors_;
  std::map<std::string, at::Tensor> leaves_;
};

ae::Window window(const c10::IValue& value) {
  const auto side = [&](size_t k) -> std::optional<int64_t> {
    const c10::IValue& x =
        value.isTuple() ? value.toTupleRef().elements()[k] : value.toListRef()[k];
    return x.isNone() ? std::nullopt : std::optional(x.toInt());
  };
  return {side(0), side(1)};
}

ae::AttentionFuncOptions function_options(Case& c) {
  ae::AttentionFuncOptions o;
  o.attn_mask(c.tensor("attn_mask")).attn_bias(c.tensor("attn_bias"));
  o.key_mask(c.tensor("key_mask")).query_offsets(c.tensor("query_offsets"));
  o.sinks(c.tensor("sinks")).alibi_slopes(c.tensor("alibi_slopes"));
  o.rng_state(c.tensor("rng_state")).is_causal(c.flag("is_causal"));
  if (c.has("window")) o.window(window(c.at("window")));
  if (c.has("query_offset")) o.query_offset(c.at("query_offset").toInt());
  if (c.has("softcap")) o.softcap(c.at("softcap").toDouble());
  if (c.has("scale")) o.scale(c.at("scale").toDouble());
  if (c.has("dropout_p")) o.dropout_p(c.at("dropout_p").toDouble());
  return o;
}

// The sum of every output times its "grad_" input sends the gradients.
void backward(Case& c, Result& result) {
  at::Tensor loss;
  for (const auto& entry : result) {
    if (!c.has("grad_" + entry.key())) continue;
    const at::Tensor part = (entry.value() * c.at("grad_" + entry.key()).toTensor()).sum();
    loss = loss.defined() ? loss + part : part;
  }
  if (loss.defined()) loss.backward();
}

void run_function(Case& c, Result& result) {
  const at::Tensor q = c.tensor("query"), k = c.tensor("key"), v = c.tensor("value");
  const auto options = function_options(c);
  if (c.has("cu_seqlens_q")) {
    const auto [output, logsumexp] = ae::varlen_attention_with_logsumexp(
        q, k, v, c.tensor("cu_seqlens_q"), c.tensor("cu_seqlens_k"), options);
    result.insert("output", output);
    result.insert("logsumexp", logsumexp);
  } else if (c.has("average_heads")) {
    const auto [output, logsumexp, weights] =
        ae::attention_with_weights(q, k, v, options, c.flag("average_heads"));
    result.insert("output", output);
    result.insert("logsumexp", logsumexp);
    result.insert("weights", weights);
  } else {
    result.insert("output", ae::attention(q, k, v, options));
  }
  backward(c, result);
}

ae::nn::MultiheadAttentionOptions module_options(const Case& c) {
  ae::nn::MultiheadAttentionOptions o(c.at("embed_dim").toInt(), c.at("num_heads").toInt());
  if (c.has("dropout")) o.dropout(c.at("dropout").toDouble());
  if (c.has("bias")) o.bias(c.flag("bias"));
  o.add_bias_kv(c.flag("add_bias_kv")).add_zero_attn(c.flag("add_zero_attn"));
  if (c.has("kdim")) o.kdim(c.at("kdim").toInt());
  if (c.has("vdim")) o.vdim(c.at("vdim").toInt());
  if (c.has("num_kv_heads")) o.num_kv_heads(c.at("num_kv_heads").toInt());
  if (c.has("window")) o.window(window(c.at("window")));
  if (c.has("softcap")) o.softcap(c.at("softcap").toDouble());
  return o.batch_first(c.flag("batch_first")).sinks(c.flag("sinks")).alibi(c.flag("alibi"));
}

void run_module(Case& c, Result& result) {
  if (c.has("seed")) torch::manual_seed(c.at("seed").toInt());
  ae::nn::MultiheadAttention module(module_options(Case(c.at("options"))));
  if (c.has("dtype_of")) module->to(c.at("dtype_of").toTensor().scalar_type());
  if (c.has("weights_file")) ae::nn::load_state_dict(*module, c.at("weights_file").toStringRef());
  if (c.flag("clone")) {
    module = ae::nn::MultiheadAttention(
        std::dynamic_pointer_cast<ae::nn::MultiheadAttentionImpl>(module->clone()));
  }
  for (const auto& entry : module->named_parameters()) {
    result.insert("parameter." + entry.key(), entry.value());
  }
  if (!c.has("query")) return;
  module->train(c.flag("training"));
  if (c.has("call_seed")) torch::manual_seed(c.at("call_seed").toInt());
  const bool need_weights = c.flag("need_weights");
  const at::Tensor q = c.tensor("query"), k = c.tensor("key"), v = c.tensor("value");
  const auto [output, weights] =
      module->forward(q, k, v, c.tensor("key_padding_mask"), need_weights, c.tensor("attn_mask"),
                      c.flag("average_attn_weights"), c.flag("is_causal"));
  TORCH_CHECK(weights.defined() == need_weights, "weights were made without being asked for");
  result.insert("output", output);
  if (need_weights) result.insert("weights", weights);
  backward(c, result);
  for (const auto& entry : module->named_parameters()) {
    if (entry.value().grad().defined()) result.insert("grad." + entry.key(), entry.value().grad());
  }
}

// The default arguments of forward, for containers that hold modules of any kind.
void run_in_container(Case& c, Result& result) {
  torch::nn::AnyModule module(ae::nn::MultiheadAttention(module_options(Case(c.at("options")))));
  const auto outputs = module.forward<std::tuple<at::Tensor, at::Tensor>>(
      c.tensor("query"), c.tensor("key"), c.tensor("value"));
  result.insert("weights", std::get<1>(outputs));
}

c10::IValue run(const c10::IValue& value) {
  Case c(value);
  Result result;
  try {
    const std::string kind = c.at("kind").toStringRef();
    if (kind == "function") run_function(c, result);
    if (kind == "module") run_module(c, result);
    if (kind == "container") run_in_container(c, result);
  } catch (const c10::ValueError& error) {
    return std::string("ValueError: ") + error.what_without_backtrace();
  } catch (const c10::Error& error) {
    return std::string("Error: ") + error.what_without_backtrace();
  }
  for (const auto& [name, leaf] : c.leaves()) {
    if (leaf.grad().defined()) result.insert("grad." + name, leaf.grad());
  }
  Result plain;
  for (const auto& entry : result) plain.insert(entry.key(), entry.value().detach().clone());
  return plain;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const c10::IValue cases = load_pickle(arguments[1]);
  std::vector<c10::IValue> results;
  for (const c10::IValue& value : cases.toListRef()) results.push_back(run(value));
  save_pickle(c10::ivalue::Tuple::create(std::move(results)), arguments[2]);
  std::printf("%zu cases\n", cases.toListRef().size());
  return 0;
}
