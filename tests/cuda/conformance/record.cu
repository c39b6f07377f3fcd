// Runs the conformance kernels on a device and writes golden/NAME.bin, to be kept in the
// repository. From the repository's root:
//   nvcc -std=c++20 -arch=native -Icsrc -Itests/cuda/conformance tests/cuda/conformance/record.cu \
//     -o build/record && build/record tests/cuda/conformance/golden
#include <cstdio>
#include <string>

#include "inputs.h"

namespace {

bool check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  return error == cudaSuccess;
}

bool record(const conformance::Entry& entry, const std::string& folder) {
  const std::vector<uint8_t> input = conformance::input_of(entry);
  std::vector<uint8_t> output(static_cast<size_t>(entry.out_bytes));
  uint8_t *in = nullptr, *out = nullptr;
  bool good = check(cudaMalloc(&in, input.size()), entry.name) &&
              check(cudaMalloc(&out, output.size()), entry.name) &&
              check(cudaMemcpy(in, input.data(), input.size(), cudaMemcpyHostToDevice), entry.name);
  if (good) {
    entry.kernel<<<1, conformance::kLanes, static_cast<size_t>(entry.shared_bytes)>>>(in, out);
    good = check(cudaGetLastError(), entry.name) &&
           check(cudaMemcpy(output.data(), out, output.size(), cudaMemcpyDeviceToHost), entry.name);
  }
  cudaFree(in);
  cudaFree(out);
  if (!good) return false;
  const std::string path = folder + "/" + entry.name + ".bin";
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) {
    std::perror(path.c_str());
    return false;
  }
  good = std::fwrite(output.data(), 1, output.size(), file) == output.size();
  return std::fclose(file) == 0 && good;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: record FOLDER\n");
    return 2;
  }
  for (const conformance::Entry& entry : conformance::kEntries) {
    if (!record(entry, argv[1])) return 1;
    std::printf("%s\n", entry.name);
  }
  return 0;
}
