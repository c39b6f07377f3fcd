// One step of training, without Python: loads the weights that train_step.py saved, runs forward,
// backward and SGD on a padded, causal batch, prints the loss and which operators ran, and saves
// every number for train_step.py to compare.
//     train_step FOLDER
#include <ATen/ATen.h>
#include <attention_ext/nn.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "count_calls.h"
#include "pickle_file.h"

namespace {

void train(const std::string& folder) {
  const CountCalls calls;
  using attention_ext::nn::MultiheadAttention;
  using attention_ext::nn::MultiheadAttentionOptions;
  MultiheadAttention attention(
      MultiheadAttentionOptions(32, 4).batch_first(true).num_kv_heads(2).sinks(true));
  attention_ext::nn::load_state_dict(*attention, folder + "/weights.pt");
  torch::optim::SGD optimizer(attention->parameters(), torch::optim::SGDOptions(0.1));

  const auto batch = load_pickle(folder + "/batch.pt").toGenericDict();
  const at::Tensor x = batch.at("x").toTensor();              // (N, L, 32)
  const at::Tensor target = batch.at("target").toTensor();    // (N, L, 32)
  const at::Tensor padding = batch.at("padding").toTensor();  // (N, L), true = hidden

  const auto [output, weights] =
      attention->forward(x, x, x, padding, /*need_weights=*/true, /*attn_mask=*/{},
                         /*average_attn_weights=*/true, /*is_causal=*/true);
  const at::Tensor loss = at::mse_loss(output, target);
  optimizer.zero_grad();
  loss.backward();

  c10::Dict<std::string, at::Tensor> numbers;
  numbers.insert("output", output.detach());
  numbers.insert("weights", weights.detach());
  numbers.insert("loss", loss.detach());
  for (const auto& entry : attention->named_parameters()) {
    numbers.insert("grad." + entry.key(), entry.value().grad());
  }
  optimizer.step();
  for (const auto& entry : attention->named_parameters()) {
    numbers.insert("after." + entry.key(), entry.value().detach());
  }
  save_pickle(numbers, folder + "/numbers.pt");

  std::printf("loss %.6f\n", loss.item<double>());
  for (const std::string name : {"attention", "attention_backward", "attention_weights"}) {
    std::printf("%s ran %d times\n", name.c_str(), calls["attention_ext::" + name]);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: train_step FOLDER (made by train_step.py prepare FOLDER)\n");
    return 2;
  }
  try {
    train(arguments[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
