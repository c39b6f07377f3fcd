// See host.h; and what Python calls through ctypes (tests/cuda_ptx.py).
#include "host.h"

#include <dlfcn.h>

#include <cstring>
#include <list>

#include "machine.h"

namespace {

std::list<ptx::Program> programs;
std::vector<ptx::Range> ranges;
ptx::Report report;
std::string message;
std::string last_entry;
bool reverse_warps = false;

template <class F>
const char* guarded(F&& f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

void run_entry(const std::string& name, unsigned blocks, int threads, int64_t shared_bytes,
               const std::vector<uint8_t>& params) {
  last_entry = name;
  for (const ptx::Program& program : programs) {
    for (size_t n = 0; n < program.functions.size(); ++n) {
      const ptx::Function& f = program.functions[n];
      if (!f.is_entry || f.name != name) continue;
      if (static_cast<size_t>(f.params_size) != params.size()) {
        throw ptx::Error("the parameters of " + name + " have another size in its PTX");
      }
      if (f.block_threads != 0 && threads > f.block_threads) {
        throw ptx::Error("more threads than __launch_bounds__ allows");
      }
      const ptx::Launch launch{blocks,
                               static_cast<uint32_t>(threads),
                               static_cast<uint32_t>(shared_bytes),
                               params.data(),
                               params.size(),
                               ranges,
                               reverse_warps};
      ptx::run(program, static_cast<int>(n), launch, report);
      return;
    }
  }
  throw ptx::Error("no PTX for " + name);
}

}  // namespace

const char* ptx_host::launch(const void* kernel, unsigned blocks, int threads, int64_t shared_bytes,
                             const void* params, std::size_t params_size, int64_t first_block) {
  return guarded([&] {
    Dl_info info;
    if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) {
      throw ptx::Error("the kernel has no symbol");
    }
    std::vector<uint8_t> bytes((params_size + 7) / 8 * 8 + 8);
    std::memcpy(bytes.data(), params, params_size);
    std::memcpy(bytes.data() + bytes.size() - 8, &first_block, 8);
    run_entry(info.dli_sname, blocks, threads, shared_bytes, bytes);
  });
}

extern "C" {

// Parses a module and keeps it.
const char* ae_ptx_load(const char* text) {
  return guarded([&] { programs.push_back(ptx::parse(text)); });
}
// Starts anew: no memory is known, counters are zero. `reverse`: the last warp runs first.
void ae_ptx_reset(int reverse) {
  ranges.clear();
  report = {};
  reverse_warps = reverse != 0;
}
void ae_ptx_range(uint64_t begin, uint64_t end, int writable) {
  ranges.push_back({begin, end, writable != 0});
}
const uint64_t* ae_ptx_report() { return reinterpret_cast<const uint64_t*>(&report); }
const char* ae_ptx_last_entry() { return last_entry.c_str(); }

// An entry whose parameters are 64-bit words, by a part of its name: for tests of the interpreter.
const char* ae_ptx_run(const char* name, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                       const uint64_t* words, int count) {
  return guarded([&] {
    std::vector<uint8_t> params(static_cast<size_t>(count) * 8);
    std::memcpy(params.data(), words, params.size());
    for (const ptx::Program& program : programs) {
      for (const ptx::Function& f : program.functions) {
        if (f.is_entry && f.name.find(name) != std::string::npos) {
          run_entry(f.name, blocks, static_cast<int>(threads), shared_bytes, params);
          return;
        }
      }
    }
    throw ptx::Error(std::string("no entry like ") + name);
  });
}
}
