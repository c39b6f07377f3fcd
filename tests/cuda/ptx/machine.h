// A grid of blocks of PTX threads: each thread runs alone until it meets a collective, a barrier or
// its end; warps run one after the other, so that a warp may be a whole barrier ahead of another.
//
// What is checked, beside results: every access lies inside a registered range (shared: inside the
// block's allocation) and is aligned; lanes of a warp meet at the same collective, threads of a
// block at the same barrier; no two warps touch the same shared bytes without a barrier between
// unless both read; nobody reads or writes bytes of an asynchronous copy before its thread has
// waited for it; no two blocks write the same bytes.
#pragma once

#include <memory>

#include "program.h"

namespace ptx {

struct Range {
  uint64_t begin, end;
  bool writable;
};

struct Launch {
  uint32_t blocks, threads, shared_bytes;
  const uint8_t* params;
  uint64_t params_size;
  std::vector<Range> ranges;
  bool reverse;  // order of warps
};

// Filled by a launch; plain numbers for ctypes.
struct Report {
  uint64_t instructions = 0;
  uint64_t matrix_loads = 0;      // ldmatrix.x4
  uint64_t matrix_conflicts = 0;  // additional passes over the banks
  uint64_t copies = 0;            // cp.async of a warp
  uint64_t copy_conflicts = 0;
  uint64_t products = 0;  // mma of a warp
  uint64_t barriers = 0;
  uint64_t shared_accesses = 0;  // ld.shared and st.shared of a warp
  uint64_t shared_conflicts = 0;
};

void run(const Program& program, int entry, const Launch& launch, Report& report);

// Which warp last wrote and which read each byte of shared memory since when.
struct Shadow {
  uint32_t write_epoch = 0, read_epoch = 0;  // 0: never
  uint32_t readers = 0;                      // warps, of read_epoch
  uint16_t writer = 0;
  uint16_t pending = 0;  // asynchronous copies under way
};

struct Copy {
  uint32_t to;
  uint64_t from;
  uint32_t size;
};

struct Frame {
  const Function* function;
  int pc = 0;
  std::vector<uint64_t> registers;
  std::vector<uint8_t> params, outgoing;
  std::vector<uint8_t> local;
};

struct Thread {
  std::vector<Frame> stack;
  bool done = false;
  const Instruction* waits = nullptr;  // at a collective or barrier
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<std::pair<const Instruction*, uint32_t>> shared_log;  // since the last collective
};

class Block {
 public:
  Block(const Program& program, int entry, const Launch& launch, uint32_t index, Report& report);
  void run();

 private:
  friend struct Lane;
  void run_lane(uint32_t t);
  bool run_warp(uint32_t w);
  void collective(uint32_t w, const Instruction& i);
  void shuffle(Thread* lanes, const Instruction& i);
  void vote(Thread* lanes, const Instruction& i);
  void load_matrices(uint32_t w, Thread* lanes, const Instruction& i);
  void multiply(Thread* lanes, const Instruction& i);
  void barrier();
  void count_conflicts(Thread* lanes);
  uint8_t* shared(uint32_t warp, uint64_t address, uint32_t size, bool writes,
                  const Instruction& i);
  void mark_pending(uint64_t address, uint32_t size, int change);
  uint8_t* global(uint64_t address, uint32_t size, bool writes, const Instruction& i);
  uint8_t* memory(uint32_t t, Space space, uint64_t address, uint32_t size, bool writes,
                  const Instruction& i);
  void finish_group(uint32_t t, const std::vector<Copy>& group, const Instruction& i);
  [[noreturn]] void fail(const Instruction& i, const std::string& what) const;

  const Program& program_;
  const Launch& launch_;
  Report& report_;
  uint32_t index_, epoch_ = 1;
  std::vector<uint8_t> shared_;
  std::vector<Shadow> shadow_;
  std::vector<Thread> threads_;
};

// Blocks that wrote each byte pair of the writable ranges, for one launch.
struct Writers {
  std::vector<std::vector<uint32_t>> of_range;
};
extern thread_local Writers* writers;

// One scalar instruction's value; registers hold raw bits.
uint64_t evaluate(const Instruction& i, const uint64_t* x, int count);
float round_half(float x, Type type, uint16_t& bits);
float widen(uint16_t bits, Type type);

}  // namespace ptx
