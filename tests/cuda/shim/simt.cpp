// The scheduler behind simt.h: fibers, barriers, warp collectives, and what sanitizers must be told
// about them. Compiled without -fsanitize=thread; with the address sanitizer it may be
// instrumented.
#include "simt.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "pages.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(AE_SHIM_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(AE_SHIM_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

const Thread* thread = nullptr;

namespace {

#if defined(AE_SHIM_ADDRESS_SANITIZER)
constexpr std::size_t kStack = 256 * 1024;  // its frames are large
#else
constexpr std::size_t kStack = 64 * 1024;
#endif
constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtCollective, kDone };

struct Fiber {
  Thread sees;
  State state;
  int index;
  char* stack;
  std::size_t stack_size = kStack;
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  const char* what;  // the collective it waits at
  void* brought;
#if defined(AE_SHIM_ADDRESS_SANITIZER)
  void* fake_stack;
#endif
#if defined(AE_SHIM_THREAD_SANITIZER)
  void* sanitizer_fiber;
#endif
};

struct Meeting {  // a barrier of the block, or the collectives of one warp
  int arrived = 0;
  unsigned generation = 0;
  // For the sanitizer, taken in turn: who is late must not see what comes next.
  char* tags = nullptr;
};

struct Block {
  std::vector<Fiber> fibers;
  Fiber main;
  Fiber* running;
  int alive;
  Meeting barrier;
  const char* file;
  int line;
  bool any[2];  // the result of a barrier, by the parity of its generation
  std::vector<Meeting> warps;
  const std::function<void()>* kernel;
  char end_tag;
  // The tags of all blocks so far: an address used twice would order one block behind another.
  std::deque<std::vector<char>> tags;
  std::vector<void*> retired;  // the sanitizer's fibers of the block before
};
Block* block = nullptr;
uint32_t random_state = 0;  // 0: threads run in order

// ---- Sanitizers ----------------------------------------------------------------------------

void release(char* tag) {
#if defined(AE_SHIM_THREAD_SANITIZER)
  __tsan_release(tag);
#endif
  (void)tag;
}
void acquire(char* tag) {
#if defined(AE_SHIM_THREAD_SANITIZER)
  __tsan_acquire(tag);
#endif
  (void)tag;
}

// ---- Switching -----------------------------------------------------------------------------

#if defined(__x86_64__)
// swapcontext costs a system call, thirty times this.
extern "C" void ae_shim_switch(void** save, void* to);
asm(R"(
.text
.globl ae_shim_switch
ae_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

void switch_to(Fiber& to) {
  Fiber& from = *block->running;
  if (&from == &to) return;
  block->running = &to;
  thread = &to.sees;
#if defined(AE_SHIM_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(from.state == State::kDone ? nullptr : &from.fake_stack, to.stack,
                                 to.stack_size);
#endif
#if defined(AE_SHIM_THREAD_SANITIZER)
  __tsan_switch_to_fiber(to.sanitizer_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  ae_shim_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(AE_SHIM_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

uint32_t next_random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

// Somebody who can go on, the next in turn or a random one.
Fiber& next_ready() {
  const int count = static_cast<int>(block->fibers.size());
  const int start =
      random_state != 0 ? static_cast<int>(next_random() % count) : block->running->index + 1;
  for (int k = 0; k < count; ++k) {
    Fiber& candidate = block->fibers[(start + k) % count];
    if (candidate.state == State::kReady) return candidate;
  }
  for (const Fiber& f : block->fibers) {
    if (f.state == State::kAtCollective) fail("deadlock: a lane waits at a warp collective");
  }
  fail("deadlock: threads wait at a barrier that others have returned without reaching");
}

// Until somebody makes us ready again.
void wait(State state) {
  block->running->state = state;
  Fiber& next = next_ready();
  switch_to(next);
}

void fiber_main() {
#if defined(AE_SHIM_ADDRESS_SANITIZER)
  const void* bottom;
  std::size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (block->main.stack == nullptr) {  // the first fiber comes from the main stack
    block->main.stack = static_cast<char*>(const_cast<void*>(bottom));
    block->main.stack_size = size;
  }
#endif
  (*block->kernel)();
  release(&block->end_tag);
  Fiber& self = *block->running;
  self.state = State::kDone;
  if (--block->alive > 0 && block->barrier.arrived > 0) {
    fail("a thread returned while others wait at a barrier");
  }
  switch_to(block->alive > 0 ? next_ready() : block->main);
  std::abort();
}

void prepare(Fiber& fiber) {
#if defined(AE_SHIM_ADDRESS_SANITIZER)
  // fiber_main never returns, so what it left behind on this stack is still marked.
  constexpr std::size_t kEntry = 8192;
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack + kStack - kEntry, kEntry);
#endif
#if defined(__x86_64__)
  // Six registers, the entry, and a return address that is never used: the stack is aligned as at a
  // function's start.
  void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fiber_main);
  fiber.stack_pointer = top - 6;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
#endif
#if defined(AE_SHIM_THREAD_SANITIZER)
  fiber.sanitizer_fiber = __tsan_create_fiber(0);
#endif
}

void run_block(unsigned index, unsigned grid, int threads, std::size_t shared_bytes,
               const Pages& stacks) {
  const SharedMemory shared(shared_bytes);
  block->alive = threads;
  const auto warps = static_cast<std::size_t>((threads + kWarp - 1) / kWarp);
  char* const tags = block->tags.emplace_back(2 * (warps + 1)).data();
  block->barrier = Meeting{0, 0, tags};
  block->warps.clear();
  for (std::size_t w = 1; w <= warps; ++w) block->warps.push_back(Meeting{0, 0, tags + 2 * w});
  for (int k = 0; k < threads; ++k) {
    Fiber& fiber = block->fibers[static_cast<std::size_t>(k)];
    fiber.sees = {{static_cast<unsigned>(k), 0, 0},
                  {index, 0, 0},
                  {static_cast<unsigned>(threads), 1, 1},
                  {grid, 1, 1},
                  shared.get()};
    fiber.state = State::kReady;
    fiber.index = k;
    fiber.stack = stacks.get() + kStack * static_cast<std::size_t>(k);
    prepare(fiber);
  }
  block->running = &block->main;
  switch_to(block->fibers[0]);
  thread = nullptr;
#if defined(AE_SHIM_THREAD_SANITIZER)
  // The next block gets new fibers first: the sanitizer takes a fiber in a destroyed one's place
  // for the same, so that threads of equal index in two blocks would seem to be one thread.
  for (void* fiber : block->retired) __tsan_destroy_fiber(fiber);
  block->retired.clear();
  for (const Fiber& fiber : block->fibers) block->retired.push_back(fiber.sanitizer_fiber);
#endif
}

}  // namespace

[[noreturn]] void fail(const char* message) {
  if (block != nullptr && block->running != nullptr && block->running != &block->main) {
    std::fprintf(stderr, "simt: %s (block %u, thread %u)\n", message, block->running->sees.block.x,
                 block->running->sees.thread.x);
  } else {
    std::fprintf(stderr, "simt: %s\n", message);
  }
  std::abort();
}

bool barrier(const char* file, int line, bool value) {
  Block& b = *block;
  Meeting& meeting = b.barrier;
  const unsigned turn = meeting.generation & 1;
  if (meeting.arrived == 0) {
    b.file = file;
    b.line = line;
    b.any[turn] = false;
  } else if (line != b.line || std::strcmp(file, b.file) != 0) {
    char text[300];
    std::snprintf(text, sizeof text, "threads of a block at different barriers: %s:%d and %s:%d",
                  b.file, b.line, file, line);
    fail(text);
  }
  if (b.alive < static_cast<int>(b.fibers.size())) {
    fail("a barrier after some threads of the block have returned");
  }
  b.any[turn] = b.any[turn] || value;
  release(&meeting.tags[turn]);
  if (++meeting.arrived == static_cast<int>(b.fibers.size())) {
    meeting.arrived = 0;
    ++meeting.generation;
    for (Fiber& fiber : b.fibers) fiber.state = State::kReady;
    if (random_state != 0) switch_to(next_ready());
  } else {
    wait(State::kAtBarrier);
  }
  acquire(&meeting.tags[turn]);
  return b.any[turn];
}

void collective(const char* what, void* mine, void (*run)(void** lanes, int count),
                bool orders_memory) {
  Fiber& self = *block->running;
  const int first = self.index / kWarp * kWarp;
  const int all = static_cast<int>(block->fibers.size());
  const int count = all - first < kWarp ? all - first : kWarp;
  Meeting& meeting = block->warps[static_cast<std::size_t>(self.index / kWarp)];
  char* const tag = &meeting.tags[meeting.generation & 1];
  self.what = what;
  self.brought = mine;
  if (orders_memory) release(tag);
  if (++meeting.arrived == count) {
    void* lanes[kWarp];
    for (int k = 0; k < count; ++k) {
      Fiber& lane = block->fibers[static_cast<std::size_t>(first + k)];
      if (lane.state == State::kDone) fail("a lane returned before a warp collective");
      if (std::strcmp(lane.what, what) != 0) fail("lanes of a warp at different collectives");
      lanes[k] = lane.brought;
      lane.state = State::kReady;
    }
    run(lanes, count);
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    wait(State::kAtCollective);
  }
  if (orders_memory) acquire(tag);
}

void shuffle_xor(void* value, std::size_t size, int mask) {
  struct Bring {
    void* value;
    std::size_t size;
    int mask;
  } mine{value, size, mask};
  if (size != 4 && size != 8) fail("a shuffle of neither 4 nor 8 bytes");
  // Word by word: memcpy would be seen by the thread sanitizer, as one lane touching another's.
  collective(
      "__shfl_xor_sync", &mine,
      [](void** lanes, int count) {
        uint32_t before[kWarp][2];
        auto lane = [&](int k) { return static_cast<const Bring*>(lanes[k]); };
        auto words = [&](int k) { return static_cast<volatile uint32_t*>(lane(k)->value); };
        for (int k = 0; k < count; ++k) {
          for (std::size_t w = 0; w < lane(k)->size / 4; ++w) before[k][w] = words(k)[w];
        }
        for (int k = 0; k < count; ++k) {
          const int from = k ^ lane(k)->mask;
          for (std::size_t w = 0; from < count && w < lane(k)->size / 4; ++w) {
            words(k)[w] = before[from][w];
          }
        }
      },
      /*orders_memory=*/false);
}

void launch(unsigned blocks, int threads, std::size_t shared_bytes,
            const std::function<void()>& kernel) {
  if (block != nullptr) fail("a launch inside a kernel");
  const char* const seed = std::getenv("AE_SHIM_SEED");
  random_state = seed != nullptr ? static_cast<uint32_t>(std::atoi(seed)) : 0;
  Block state{};
  state.fibers.resize(static_cast<std::size_t>(threads));
  state.kernel = &kernel;
  state.main.index = threads - 1;  // the first in turn is thread 0
  block = &state;
#if defined(AE_SHIM_THREAD_SANITIZER)
  state.main.sanitizer_fiber = __tsan_get_current_fiber();
#endif
  // Stacks are kept from block to block, but for the thread sanitizer, which would see one block's
  // variables in another's.
  const std::size_t stack_bytes = kStack * static_cast<std::size_t>(threads);
  std::optional<Pages> stacks;
  for (unsigned k = 0; k < blocks; ++k) {
#if defined(AE_SHIM_THREAD_SANITIZER)
    stacks.reset();
#endif
    if (!stacks) stacks.emplace(stack_bytes);
    run_block(k, blocks, threads, shared_bytes, *stacks);
  }
#if defined(AE_SHIM_THREAD_SANITIZER)
  for (void* fiber : state.retired) __tsan_destroy_fiber(fiber);
#endif
  acquire(&state.end_tag);
  block = nullptr;
}

}  // namespace simt
