// The arithmetic of launches, on the host: kernels are never run; a stand-in for the shim's
// launch() records what would be. Prints one line for each finding that is wrong, and how many
// there were.
#include "kernels/cuda/launch.h"

#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/plan.h"
#include "kernels/cuda/simt/backward.cuh"
#include "kernels/cuda/simt/bias_gradient.cuh"
#include "kernels/cuda/simt/forward.cuh"
#include "kernels/cuda/simt/rows.cuh"
#include "kernels/cuda/simt/weights.cuh"

struct Recorded {
  unsigned blocks;
  int threads;
  std::size_t shared;
};
std::vector<Recorded> recorded;

namespace simt {
const Thread* thread = nullptr;
void launch(unsigned blocks, int threads, std::size_t shared, const std::function<void()>&) {
  recorded.push_back({blocks, threads, shared});
}
bool barrier(const char*, int, bool) { return false; }
void shuffle_xor(void*, std::size_t, int) {}
void fail(const char* message) {
  std::printf("%s\n", message);
  std::abort();
}
}  // namespace simt

namespace {

using namespace attention_ext::kernels;
using namespace attention_ext::kernels::cuda;
using namespace attention_ext::kernels::cuda::simt_kernels;

int failures = 0;

void equal(const std::string& what, int64_t got, int64_t want) {
  if (got == want) return;
  std::printf("%s: %lld, not %lld\n", what.c_str(), static_cast<long long>(got),
              static_cast<long long>(want));
  ++failures;
}

alignas(16) char somewhere[16];
View some() {
  View v;
  v.data = somewhere;
  return v;
}

BackwardParams sizes(int64_t b, int64_t h, int64_t hkv, int64_t l, int64_t s, int64_t e,
                     int64_t ev) {
  BackwardParams p;
  p.problems = b;
  p.heads = h;
  p.kv_heads = hkv;
  p.q_length = l;
  p.k_length = s;
  p.qk_size = e;
  p.v_size = ev;
  return p;
}

void grids() {
  BackwardParams p = sizes(3, 8, 2, 130, 65, 64, 200);
  equal("forward: heads x batch x tiles x chunks of 128 columns", forward_blocks(p, 128),
        8 * 3 * 3 * 2);
  equal("rows", row_count(p), 3 * 8 * 130);
  p.grad_key = some();
  equal("keys alone: chunks of 64 columns of E", keys_blocks(p, 64), 2 * 3 * 2 * 1);
  p.grad_value = some();
  equal("keys and values: chunks of 64 columns of Ev", keys_blocks(p, 64), 2 * 3 * 2 * 4);
  equal("queries without dQ: one chunk", queries_blocks(p, 128), 8 * 3 * 3);
  p.grad_query = some();
  p.qk_size = 576;
  equal("queries", queries_blocks(p, 128), 8 * 3 * 3 * 5);
  WeightsParams w;
  static_cast<AttentionParams&>(w) = p;
  equal("weights", weights_blocks(w), 3 * 8 * 3 * 2);
  w.average = true;
  equal("averaged weights", weights_blocks(w), 3 * 3 * 2);
  equal("no rows", forward_blocks(sizes(3, 8, 2, 0, 65, 8, 8), 128), 0);
  equal("no columns, for the statistics' sake", forward_blocks(sizes(1, 1, 1, 1, 65, 8, 0), 128),
        1);
  equal("heads beyond a grid's y and z", forward_blocks(sizes(1000, 1000, 1000, 1, 1, 1, 1), 128),
        1000000);
  equal("more than 32 bits", forward_blocks(sizes(1 << 20, 1 << 14, 1, 64 * 100, 1, 1, 1), 128),
        int64_t{100} << 34);
}

// Every tile of every sequence has a slot of its own, found by bisection, for any lengths.
void slots() {
  const std::vector<std::vector<int64_t>> all = {
      {5}, {64}, {65, 0, 1, 63, 64, 128, 129}, {0, 0, 7}, {7, 0, 0}, {1, 1, 1, 1}, {200, 3}};
  for (const auto& lengths : all) {
    std::vector<int64_t> borders = {0};
    for (int64_t n : lengths) borders.push_back(borders.back() + n);
    const auto problems = static_cast<int64_t>(lengths.size());
    const int64_t slots = tile_slots(true, problems, borders.back(), 64);
    for (int64_t n = 0; n < problems; ++n) {
      const int64_t first = packed_slot(borders.data(), n, 64);
      const int64_t next = n + 1 < problems ? packed_slot(borders.data(), n + 1, 64) : slots;
      equal("room for the tiles of a sequence",
            next - first >= blocks_of(lengths[static_cast<size_t>(n)], 64), true);
    }
    equal("slots cover the rows of bad borders", slots >= blocks_of(borders.back(), 64), true);
  }
  equal("no sequences", tile_slots(true, 0, 0, 64), 1);
  equal("not packed", tile_slots(false, 5, 130, 64), 15);
}

void bias_plans() {
  BackwardParams p = sizes(4, 8, 8, 130, 200, 64, 64);
  p.grad_bias = some();
  auto plan = [&](int64_t b, int64_t h, int64_t l, int64_t s) {
    const int64_t size[4] = {b, h, l, s};
    for (int d = 0; d < 4; ++d) p.bias_size[d] = size[d];
    return BiasPlan(p, 64);
  };
  equal("full", bias_is_full((plan(4, 8, 130, 200), p)), true);
  equal("of heads", bias_is_full((plan(1, 8, 130, 200), p)), false);
  equal("of heads: tiles", plan(1, 8, 130, 200).owned, 8 * 3 * 4);
  equal("of heads: terms", plan(1, 8, 130, 200).terms, 4);
  equal("of heads: splits", plan(1, 8, 130, 200).splits, 3);
  equal("single: tiles", plan(1, 1, 1, 1).owned, 1);
  equal("single: terms", plan(1, 1, 1, 1).terms, 4 * 8 * 3 * 4);
  equal("single: splits", plan(1, 1, 1, 1).splits, 256);
  equal("of keys and batch: terms", plan(4, 1, 1, 200).terms, 8 * 3);
  const DeviceLimits device;
  equal("workspace: splits x tiles x 64 x 64 floats", bias_gradient_workspace(p, device),
        BiasPlan(p, 64).splits * BiasPlan(p, 64).owned * 64 * 64 * 4);
  plan(4, 8, 130, 200);
  equal("full: no workspace", bias_gradient_workspace(p, device), 0);
  // The workspace stays small however large the call: at most 512 tiles.
  p = sizes(64, 64, 64, 100000, 100000, 64, 64);
  p.grad_bias = some();
  for (int64_t l : {int64_t{1}, int64_t{100000}}) {
    const BiasPlan large = plan(1, 1, l, 1);
    equal("a bounded workspace", large.splits == 1 || large.splits * large.owned <= 512, true);
  }
}

// Parts of the keys of few queries: by L, S, the window and the group, never by batch or device.
void split_plans() {
  auto plan = [](int64_t b, int64_t h, int64_t hkv, int64_t l, int64_t s) {
    return SplitPlan(sizes(b, h, hkv, l, s, 128, 128));
  };
  equal("few keys are not split", plan(1, 8, 8, 1, 511).splits, 1);
  equal("256 keys for each 16 rows", plan(1, 8, 8, 1, 512).splits, 2);
  equal("whatever the batch", plan(1000, 8, 8, 1, 512).splits, 2);
  equal("whatever the heads", plan(1, 4096, 4096, 1, 512).splits, 2);
  equal("at most 256", plan(1, 8, 8, 1, 1 << 20).splits, 256);
  equal("rows of a group", plan(1, 32, 8, 16, 8192).rows, 64);
  equal("64 rows: 1024 keys", plan(1, 32, 8, 16, 8192).splits, 8);
  equal("17 rows: 512 keys", plan(1, 17, 1, 1, 8192).splits, 16);
  equal("two tiles", plan(1, 8, 8, 65, 8192).row_tiles, 2);
  equal("two tiles: at most 128", plan(1, 8, 8, 128, 1 << 20).splits, 128);
  equal("129 rows are many", plan(1, 8, 8, 129, 1 << 20).splits, 1);
  equal("129 rows of a group, too", plan(1, 129, 1, 1, 1 << 20).splits, 1);
  equal("no rows", plan(1, 8, 8, 0, 1 << 20).splits, 1);
  equal("no keys", plan(1, 8, 8, 1, 0).splits, 1);
  equal("no heads", plan(1, 0, 0, 1, 1 << 20).splits, 1);
  AttentionParams p = sizes(3, 32, 8, 2, 1 << 20, 128, 96);
  equal("blocks", SplitPlan(p).blocks(p), 3 * 8 * 256);
  DeviceLimits device;
  p.type = ScalarType::kFloat16;
  equal("SIMT kernels need no workspace", forward_workspace(p, device), 0);
  for (View* view : {&p.query, &p.key, &p.value}) {
    *view = some();
    view->stride[3] = 1;
  }
  equal("a part of a row: its sums and 16 bytes", forward_workspace(p, device),
        int64_t{256} * 3 * 32 * 2 * (96 * 4 + 16));
  device.multiprocessors = 1000;
  equal("whatever the device", forward_workspace(p, device),
        int64_t{256} * 3 * 32 * 2 * (96 * 4 + 16));
  p.window_left = 1000;
  equal("a window open on one side", SplitPlan(p).splits, 256);
  p.window_right = 22;
  equal("a window: what it may show", SplitPlan(p).splits, 1024 / 256);
  p.window_left = 0;
  p.window_right = 0;
  equal("a window of one key", SplitPlan(p).splits, 1);
  p.window_left = p.window_right = kUnbounded;
  const int64_t borders[2] = {0, 2};
  p.cu_seqlens_q = borders;
  equal("packed", SplitPlan(p).splits, 1);
  // Never more than an eighth of the keys' and values' own traffic, written and read.
  for (int64_t rows = 1; rows <= 128; ++rows) {
    for (int64_t s : {512, 1023, 4096, 100000, 1 << 22}) {
      const AttentionParams one = sizes(1, rows, 1, 1, s, 128, 128);
      const SplitPlan few(one);
      const int64_t tile_rows = rows < 64 ? rows : 64;
      equal("parts are light",
            few.splits == 1 || 2 * few.splits * tile_rows * 128 * 4 * 8 <= 2 * s * 128 * 2 * 8,
            true);
    }
  }
}

void pieces() {
  DeviceLimits device;
  device.grid_blocks = (int64_t{1} << 31) - 1;
  device.shared_memory = 227 * 1024;
  BackwardParams p = sizes(1 << 20, 5000, 5000, 1, 1, 1, 1);  // 5.2e9 blocks
  recorded.clear();
  equal("no error",
        launch(forward_kernel<float>, static_cast<AttentionParams>(p), forward_blocks(p, 128),
               kThreads, shared_bytes(4), device, nullptr) == nullptr,
        true);
  int64_t total = 0;
  for (const Recorded& r : recorded) {
    total += r.blocks;
    equal("threads", r.threads, 256);
    equal("shared memory", static_cast<int64_t>(r.shared), shared_bytes(4));
  }
  equal("pieces", static_cast<int64_t>(recorded.size()), 3);
  equal("all blocks", total, int64_t{5000} << 20);
  recorded.clear();
  equal("nothing to do, no launch",
        launch(forward_kernel<float>, static_cast<AttentionParams>(p), 0, kThreads, 0, device,
               nullptr) == nullptr,
        true);
  equal("no launch", static_cast<int64_t>(recorded.size()), 0);
}

// Devices by the shared memory that a block may ask for: 8.0, 8.6 and 12.0, 9.0 and 10.0.
void shared_memory() {
  for (int64_t kib : {163, 99, 227}) {
    equal("double fits", simt_shared_memory(ScalarType::kFloat64) <= kib * 1024, true);
    equal("float fits without asking",
          simt_shared_memory(ScalarType::kFloat32) <= kDefaultSharedMemory, true);
  }
  DeviceLimits small;
  small.shared_memory = 48 * 1024;
  recorded.clear();
  const char* const error = launch(forward_kernel<double>, AttentionParams{}, 1, kThreads,
                                   shared_bytes(8), small, nullptr);
  equal("too little is an error", error != nullptr && recorded.empty(), true);
}

// Offsets are 64-bit from the first product.
void offsets() {
  View v;
  v.stride[0] = 1 << 30;
  v.stride[1] = 3;
  v.stride[2] = (int64_t{1} << 31) + 1;
  v.stride[3] = 1 << 20;
  equal("offset", v.offset(7, 2, 5, 6000),
        7 * (int64_t{1} << 30) + 6 + 5 * ((int64_t{1} << 31) + 1) + 6000 * (int64_t{1} << 20));
}

}  // namespace

int main() {
  grids();
  slots();
  bias_plans();
  split_plans();
  pieces();
  shared_memory();
  offsets();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
