// Runs a model that torch.export and AOTInductor compiled into a package, without Python:
//     run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt
// INPUTS.pt is a list of tensors that Python saved. The program names nothing of attention_ext:
// linking its library is what registers the operators that the package calls.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "count_calls.h"
#include "pickle_file.h"

namespace {

void run(const char* package, const char* inputs_file, const char* outputs_file) {
  const c10::IValue saved = load_pickle(inputs_file);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& input : saved.toListRef()) inputs.push_back(input.toTensor());
  torch::inductor::AOTIModelPackageLoader model(package);
  const CountCalls calls;
  const at::NoGradGuard no_grad;
  save_pickle(model.run(inputs), outputs_file);
  std::printf("attention ran %d times\n", calls["attention_ext::attention"]);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt\n");
    return 2;
  }
  try {
    run(arguments[1], arguments[2], arguments[3]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
