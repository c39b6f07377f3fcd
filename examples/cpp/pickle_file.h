// Files of tensors that go both ways between torch.save / torch.load and C++.
#pragma once

#include <torch/serialize.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

inline c10::IValue load_pickle(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "cannot open ", path);
  return torch::pickle_load(std::vector<char>((std::istreambuf_iterator<char>(file)), {}));
}

inline void save_pickle(const c10::IValue& value, const std::string& path) {
  const std::vector<char> bytes = torch::pickle_save(value);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.good(), "cannot write ", path);
}
