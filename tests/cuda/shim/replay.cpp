// Runs calls that were written to a file (tests/cuda/emulation.py), where Python itself cannot be
// loaded: under a sanitizer. Every buffer is a piece of memory of its own, so that an access
// outside it is seen. Writes the buffers back, in order.
//   replay CALLS RESULTS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "call.h"

namespace {

[[noreturn]] void give_up(const std::string& text) {
  std::fprintf(stderr, "replay: %s\n", text.c_str());
  std::exit(2);
}

struct Buffer {
  std::unique_ptr<char[]> data;
  std::size_t size;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) give_up("replay CALLS RESULTS");
  std::ifstream in(argv[1], std::ios::binary);
  if (!in) give_up("the file of calls cannot be read");
  std::vector<Buffer> buffers;
  auto place = [&](int64_t id, int64_t offset) -> char* {
    return id < 0 ? nullptr : buffers.at(static_cast<std::size_t>(id)).data.get() + offset;
  };
  Call* call = nullptr;
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string verb, name;
    words >> verb;
    int bad = 0;
    if (verb == "buffer") {
      std::size_t size;
      words >> size;
      buffers.push_back({std::make_unique<char[]>(size), size});
      in.read(buffers.back().data.get(), static_cast<std::streamsize>(size));
      in.get();
    } else if (verb == "new") {
      if (call != nullptr) ae_call_delete(call);
      call = ae_call_new();
    } else if (verb == "view") {
      int64_t id, offset, strides[4], table;
      int type;
      words >> name >> id >> offset >> strides[0] >> strides[1] >> strides[2] >> strides[3] >>
          table >> type;
      bad = ae_call_view(call, name.c_str(), place(id, offset), strides,
                         reinterpret_cast<const int64_t*>(place(table, 0)), type);
    } else if (verb == "integer") {
      int64_t value;
      words >> name >> value;
      bad = ae_call_integer(call, name.c_str(), value);
    } else if (verb == "real") {
      std::string value;
      words >> name >> value;
      bad = ae_call_real(call, name.c_str(), std::strtod(value.c_str(), nullptr));
    } else if (verb == "pointer") {
      int64_t id, offset;
      words >> name >> id >> offset;
      bad = ae_call_pointer(call, name.c_str(), place(id, offset));
    } else if (verb == "run") {
      words >> name;
      const auto size = static_cast<std::size_t>(ae_call_workspace(call, name.c_str()));
      const auto workspace = std::make_unique<char[]>(size);
      std::memset(workspace.get(), 0xff, size);
      const char* const error = ae_call_run(call, name.c_str(), workspace.get());
      if (error != nullptr) give_up(error);
    } else {
      bad = 1;
    }
    if (bad != 0 || words.fail()) give_up("not understood: " + line);
  }
  if (call != nullptr) ae_call_delete(call);
  std::ofstream out(argv[2], std::ios::binary);
  for (const Buffer& buffer : buffers) {
    out.write(buffer.data.get(), static_cast<std::streamsize>(buffer.size));
  }
  return out.good() ? 0 : 2;
}
