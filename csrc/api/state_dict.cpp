// Reads a state_dict that Python saved, without Python.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "attention_ext/nn.h"

namespace attention_ext::nn {
namespace {

std::map<std::string, at::Tensor> read(const std::string& path) {
  constexpr const char* kAdvice = "; save it with torch.save(dict(module.state_dict()), path)";
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "load_state_dict: cannot open ", path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  c10::IValue content;
  try {
    content = torch::pickle_load(bytes);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "load_state_dict: ", path,
                " is not a file that C++ can read as a dict of tensors", kAdvice,
                " (the reader said: ", error.what_without_backtrace(), ")");
  }
  TORCH_CHECK(content.isGenericDict(), "load_state_dict: ", path,
              " must hold a dict of tensors, got ", content.tagKind(), kAdvice);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& entry : content.toGenericDict()) {
    TORCH_CHECK(entry.key().isString() && entry.value().isTensor(), "load_state_dict: ", path,
                " must hold a dict of tensors, got a ", entry.value().tagKind(), " under ",
                entry.key(), kAdvice);
    tensors.emplace(entry.key().toStringRef(), entry.value().toTensor());
  }
  return tensors;
}

}  // namespace

void load_state_dict(torch::nn::Module& module, const std::string& path) {
  const std::map<std::string, at::Tensor> saved = read(path);
  std::map<std::string, at::Tensor> own;
  for (const auto& entry : module.named_parameters()) own.emplace(entry.key(), entry.value());
  for (const auto& entry : module.named_buffers()) own.emplace(entry.key(), entry.value());

  std::ostringstream wrong;
  for (const auto& [name, tensor] : own) {
    const auto found = saved.find(name);
    if (found == saved.end()) {
      wrong << "\n  missing: " << name << " " << tensor.sizes();
    } else if (found->second.sizes() != tensor.sizes()) {
      wrong << "\n  another shape: " << name << ", expected " << tensor.sizes() << ", got "
            << found->second.sizes();
    } else if (!c10::canCast(found->second.scalar_type(), tensor.scalar_type())) {
      wrong << "\n  another kind of number: " << name << ", expected " << tensor.scalar_type()
            << ", got " << found->second.scalar_type();
    }
  }
  for (const auto& [name, tensor] : saved) {
    if (own.count(name) == 0) wrong << "\n  unexpected: " << name << " " << tensor.sizes();
  }
  TORCH_CHECK(wrong.str().empty(), "load_state_dict: ", path, " does not fit this ", module.name(),
              ":", wrong.str());

  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : own) tensor.copy_(saved.at(name));
}

}  // namespace attention_ext::nn
