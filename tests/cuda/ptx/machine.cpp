// Threads, warps and blocks: see machine.h.
#include "machine.h"

#include <algorithm>
#include <cstring>

namespace ptx {

Block::Block(const Program& program, int entry, const Launch& launch, uint32_t index,
             Report& report)
    : program_(program), launch_(launch), report_(report), index_(index) {
  const Function& f = program.functions[entry];
  const size_t bytes = static_cast<size_t>(program.static_shared) + launch.shared_bytes;
  shared_.assign(bytes, 0xff);  // NaN in every type
  shadow_.resize(bytes);
  threads_.resize(launch.threads);
  for (uint32_t t = 0; t < launch.threads; ++t) {
    Frame frame;
    frame.function = &f;
    frame.registers.assign(f.registers.size(), 0xdeadbeefdeadbeefull);
    frame.params.assign(launch.params, launch.params + launch.params_size);
    frame.outgoing.assign(static_cast<size_t>(f.outgoing_size), 0xff);
    frame.local.assign(static_cast<size_t>(f.local_size), 0xff);
    threads_[t].stack.push_back(std::move(frame));
  }
}

void Block::fail(const Instruction& i, const std::string& what) const {
  throw Error(what + " (PTX line " + std::to_string(i.line) + ": " + i.text + ", block " +
              std::to_string(index_) + ")");
}

// Runs one thread until it waits for others or ends.
void Block::run_lane(uint32_t t) {
  Thread& thread = threads_[t];
  uint64_t x[8];
  while (true) {
    Frame& frame = thread.stack.back();
    uint64_t* const r = frame.registers.data();
    const Instruction& i = frame.function->code[static_cast<size_t>(frame.pc)];
    ++report_.instructions;
    if (i.predicate >= 0 && ((r[i.predicate] & 1) != 0) == i.negated) {
      ++frame.pc;
      continue;
    }
    auto value = [&](size_t n) {
      const Operand& o = i.a[n];
      return o.reg >= 0 ? r[o.reg] + o.immediate : o.immediate;
    };
    switch (i.op) {
      case Op::kBra:
        frame.pc = i.target;
        continue;
      case Op::kRet:
        thread.stack.pop_back();
        if (thread.stack.empty()) {
          thread.done = true;
          return;
        }
        continue;
      case Op::kTrap:
        fail(i, "trap");
      case Op::kCall: {
        const Function& f = program_.functions[static_cast<size_t>(i.target)];
        if (f.code.empty()) fail(i, "call of a function without a body");
        Frame inner;
        inner.function = &f;
        inner.registers.assign(f.registers.size(), 0xdeadbeefdeadbeefull);
        inner.params.assign(static_cast<size_t>(f.params_size), 0xff);
        inner.outgoing.assign(static_cast<size_t>(f.outgoing_size), 0xff);
        inner.local.assign(static_cast<size_t>(f.local_size), 0xff);
        for (size_t n = 0; n < i.a.size(); ++n) {
          std::memcpy(inner.params.data() + f.params[n].offset,
                      frame.outgoing.data() + i.a[n].immediate,
                      static_cast<size_t>(f.params[n].size));
        }
        for (const auto& [reg, name] : f.special) {
          inner.registers[static_cast<size_t>(reg)] = name == "%tid.x"      ? t
                                                      : name == "%ctaid.x"  ? index_
                                                      : name == "%ntid.x"   ? launch_.threads
                                                      : name == "%nctaid.x" ? launch_.blocks
                                                      : name == "%laneid"   ? t % 32
                                                                            : 0;
        }
        ++frame.pc;
        thread.stack.push_back(std::move(inner));
        continue;
      }
      case Op::kLoad: {
        const uint32_t size = static_cast<uint32_t>(bytes_of(i.type));
        const uint8_t* const from = memory(t, i.space, value(i.vector), size * i.vector, false, i);
        if (i.space == Space::kShared)
          thread.shared_log.emplace_back(&i, static_cast<uint32_t>(value(i.vector)));
        for (uint32_t v = 0; v < i.vector; ++v) {
          uint64_t bits = 0;
          std::memcpy(&bits, from + v * size, size);
          if (i.type == Type::kS8) bits = static_cast<uint64_t>(static_cast<int8_t>(bits));
          if (i.type == Type::kS16) bits = static_cast<uint64_t>(static_cast<int16_t>(bits));
          if (i.type == Type::kS32) bits = static_cast<uint64_t>(static_cast<int32_t>(bits));
          r[i.a[v].reg] = bits;
        }
        break;
      }
      case Op::kStore: {
        const uint32_t size = static_cast<uint32_t>(bytes_of(i.type));
        uint8_t* const to = memory(t, i.space, value(0), size * i.vector, true, i);
        if (i.space == Space::kShared)
          thread.shared_log.emplace_back(&i, static_cast<uint32_t>(value(0)));
        for (uint32_t v = 0; v < i.vector; ++v) {
          const uint64_t bits = value(1 + v);
          std::memcpy(to + v * size, &bits, size);
        }
        break;
      }
      case Op::kAtom: {  // u64 add
        uint8_t* const at = reinterpret_cast<uint8_t*>(value(1));
        bool known = false;
        for (const Range& range : launch_.ranges) {
          known |= value(1) >= range.begin && value(1) + 8 <= range.end && range.writable;
        }
        if (!known) fail(i, "atomic out of bounds");
        uint64_t old;
        std::memcpy(&old, at, 8);
        const uint64_t sum = old + value(2);
        std::memcpy(at, &sum, 8);
        r[i.a[0].reg] = old;
        break;
      }
      case Op::kCvta: {
        const uint64_t window = i.space == Space::kShared  ? kSharedWindow
                                : i.space == Space::kLocal ? kLocalWindow
                                : i.space == Space::kParam ? kParamWindow
                                                           : 0;
        r[i.a[0].reg] = i.mode == 0 ? value(1) | window : value(1) & ~window;
        break;
      }
      case Op::kPack: {
        uint64_t bits = 0;
        const int width = bytes_of(i.type) * 8 / i.vector;
        for (int v = 0; v < i.vector; ++v) {
          bits |= (value(1 + v) & (~uint64_t{0} >> (64 - width))) << (v * width);
        }
        r[i.a[0].reg] = bits;
        break;
      }
      case Op::kUnpack: {
        const int width = bytes_of(i.type) * 8 / i.vector;
        const uint64_t bits = value(i.vector);
        for (int v = 0; v < i.vector; ++v) {
          r[i.a[v].reg] = bits >> (v * width) & (~uint64_t{0} >> (64 - width));
        }
        break;
      }
      case Op::kCopy: {
        const uint32_t to = static_cast<uint32_t>(value(0));
        const uint32_t size = static_cast<uint32_t>(value(3));
        if (size != 0 && size != 16) fail(i, "a source size that is not emulated");
        // The write may happen from now on; so may the read.
        shared(t / 32, to, 16, /*writes=*/true, i);
        if (size != 0) global(value(1), 16, /*writes=*/false, i);
        mark_pending(to, 16, 1);
        thread.open.push_back({to, value(1), size});
        thread.shared_log.emplace_back(&i, to);
        break;
      }
      case Op::kCommit:
        thread.groups.push_back(std::move(thread.open));
        thread.open.clear();
        break;
      case Op::kWait:
        while (thread.groups.size() > value(0)) {
          finish_group(t, thread.groups.front(), i);
          thread.groups.erase(thread.groups.begin());
        }
        break;
      case Op::kFence:
        break;
      case Op::kBarrier:
      case Op::kBarrierRed:
      case Op::kShuffle:
      case Op::kVote:
      case Op::kMma:
      case Op::kLdmatrix:
      case Op::kSyncWarp:
        thread.waits = &i;
        return;
      default: {
        const size_t count = i.a.size() - 1;
        for (size_t n = 0; n < count; ++n) x[n] = value(n + 1);
        r[i.a[0].reg] = evaluate(i, x, static_cast<int>(count));
      }
    }
    ++frame.pc;
  }
}

// Additional passes over the 32 banks for accesses that the lanes of a warp make together.
void Block::count_conflicts(Thread* lanes) {
  const size_t n = lanes[0].shared_log.size();
  bool alike = true;
  for (int l = 1; l < 32; ++l) alike = alike && lanes[l].shared_log.size() == n;
  for (size_t k = 0; alike && k < n; ++k) {
    const Instruction& i = *lanes[0].shared_log[k].first;
    const bool copy = i.op == Op::kCopy;
    const int size = copy ? 16 : bytes_of(i.type) * i.vector;
    const int phase = std::min(32, 128 / std::max(size, 4));  // lanes that share one pass
    (copy ? report_.copies : report_.shared_accesses) += 1;
    for (int first = 0; first < 32; first += phase) {
      std::vector<uint32_t> words;
      for (int l = first; l < first + phase; ++l) {
        for (int w = 0; w < std::max(size / 4, 1); ++w) {
          words.push_back(lanes[l].shared_log[k].second / 4 + static_cast<uint32_t>(w));
        }
      }
      std::sort(words.begin(), words.end());
      words.erase(std::unique(words.begin(), words.end()), words.end());
      int used[32] = {};
      for (uint32_t word : words) ++used[word % 32];
      const int most = *std::max_element(used, used + 32);
      (copy ? report_.copy_conflicts : report_.shared_conflicts) += static_cast<uint64_t>(most - 1);
    }
  }
  for (int l = 0; l < 32; ++l) lanes[l].shared_log.clear();
}

// Runs a warp up to a barrier or its end. Returns whether it moved.
bool Block::run_warp(uint32_t w) {
  Thread* const lanes = &threads_[w * 32];
  bool moved = false;
  while (true) {
    int done = 0, at_barrier = 0;
    for (uint32_t l = 0; l < 32; ++l) {
      if (!lanes[l].done && lanes[l].waits == nullptr) {
        run_lane(w * 32 + l);
        moved = true;
      }
      done += lanes[l].done;
    }
    count_conflicts(lanes);
    if (done == 32) return moved;
    const Instruction* meet = nullptr;
    for (uint32_t l = 0; l < 32; ++l) {
      if (!lanes[l].done) meet = lanes[l].waits;
    }
    if (done > 0) fail(*meet, "a thread ended while its warp waits for it");
    for (uint32_t l = 0; l < 32; ++l) {
      if (lanes[l].waits != meet) {
        fail(*lanes[l].waits,
             "the lanes of a warp wait at different instructions (the other: line " +
                 std::to_string(meet->line) + " " + meet->text + ")");
      }
      at_barrier += meet->op == Op::kBarrier || meet->op == Op::kBarrierRed;
    }
    if (at_barrier == 32) return moved;
    collective(w, *meet);
    for (uint32_t l = 0; l < 32; ++l) {
      lanes[l].waits = nullptr;
      ++lanes[l].stack.back().pc;
    }
    moved = true;
  }
}

void Block::barrier() {
  const Instruction& i = *threads_[0].waits;
  bool any = false;
  for (Thread& t : threads_) {
    if (t.done) fail(i, "a thread ended while its block waits at a barrier");
    if (t.waits != &i) {
      fail(*t.waits, "the threads of a block wait at different barriers (the other: line " +
                         std::to_string(i.line) + ")");
    }
    if (i.op == Op::kBarrierRed) {
      const Operand& o = i.a.back();
      any |= (o.reg >= 0 ? t.stack.back().registers[static_cast<size_t>(o.reg)] & 1
                         : o.immediate) != 0;
    }
  }
  for (Thread& t : threads_) {
    if (i.op == Op::kBarrierRed) t.stack.back().registers[static_cast<size_t>(i.a[0].reg)] = any;
    t.waits = nullptr;
    ++t.stack.back().pc;
  }
  ++epoch_;
  ++report_.barriers;
}

void Block::run() {
  for (uint32_t t = 0; t < launch_.threads; ++t) {
    for (const auto& [reg, name] : threads_[t].stack.back().function->special) {
      threads_[t].stack.back().registers[static_cast<size_t>(reg)] =
          name == "%tid.x"      ? t
          : name == "%ctaid.x"  ? index_
          : name == "%ntid.x"   ? launch_.threads
          : name == "%nctaid.x" ? launch_.blocks
          : name == "%laneid"   ? t % 32
                                : 0;
    }
  }
  const uint32_t warps = launch_.threads / 32;
  while (true) {
    for (uint32_t n = 0; n < warps; ++n) run_warp(launch_.reverse ? warps - 1 - n : n);
    size_t done = 0;
    for (const Thread& t : threads_) done += t.done;
    if (done == threads_.size()) break;
    for (const Thread& t : threads_) {
      if (t.done) barrier();  // fails: the others wait
    }
    barrier();
  }
}

void run(const Program& program, int entry, const Launch& launch, Report& report) {
  Writers table;
  for (const Range& range : launch.ranges) {
    table.of_range.emplace_back(range.writable ? (range.end - range.begin + 1) / 2 : 0, 0u);
  }
  writers = &table;
  if (launch.threads % 32 != 0) throw Error("a block of incomplete warps");
  for (uint32_t b = 0; b < launch.blocks; ++b) {
    Block(program, entry, launch, b, report).run();
  }
  writers = nullptr;
}

}  // namespace ptx
