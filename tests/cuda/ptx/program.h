// PTX text as a program: functions of decoded instructions. Parsed by parse.cpp, run by
// machine.cpp. What is not known raises an error that names it; nothing is skipped.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Op : uint8_t {
  kMov,
  kAdd,
  kSub,
  kMul,
  kMulWide,
  kMulHigh,
  kMad,
  kMadWide,
  kFma,
  kDiv,
  kRem,
  kMin,
  kMax,
  kAbs,
  kNeg,
  kNot,
  kAnd,
  kOr,
  kXor,
  kShl,
  kShr,
  kSetp,
  kSelp,
  kCvt,
  kCvta,
  kLoad,
  kStore,
  kBra,
  kRet,
  kCall,
  kTrap,
  kEx2,
  kLg2,
  kRcp,
  kSqrt,
  kRsqrt,
  kTanh,
  kSin,
  kCos,
  kCopysign,
  kBfi,
  kBfe,
  kPopc,
  kClz,
  kBrev,
  kPrmt,
  kLop3,
  kShf,
  kAtom,
  kPack,
  kUnpack,
  kCvtPair,
  kTestp,
  // Collectives and what waits.
  kBarrier,
  kBarrierRed,
  kShuffle,
  kVote,
  kMma,
  kLdmatrix,
  kCopy,
  kCommit,
  kWait,
  kSyncWarp,
  kFence,
};

enum class Type : uint8_t {
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBF16,
  kB32,
  kU32,
  kS32,
  kF32,
  kB64,
  kU64,
  kS64,
  kF64,
};
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };
enum class Compare : uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNan,
  kNum
};
enum class Round : uint8_t { kNearest, kZero, kDown, kUp, kNearestInt, kZeroInt, kDownInt, kUpInt };

struct Operand {
  int32_t reg = -1;  // -1: the immediate alone
  uint64_t immediate = 0;
};

struct Instruction {
  Op op;
  Type type = Type::kB32, from = Type::kB32;  // `from`: source type of conversions
  Space space = Space::kGeneric;
  Compare compare = Compare::kEq;
  Round round = Round::kNearest;
  bool flush = false, saturate = false, approximate = false, wide_shift = false, transposed = false;
  uint8_t vector = 1;  // registers of a vector load, store or matrix load
  uint8_t mode = 0;    // of shuffle, vote, shf
  int32_t predicate = -1;
  bool negated = false;
  int32_t target = -1;     // branch target, or called function
  std::vector<Operand> a;  // destinations first, vectors flattened
  int line = 0;
  std::string text;  // opcode with its modifiers
};

struct Function {
  std::string name;
  bool is_entry = false;
  std::vector<Instruction> code;
  std::map<std::string, int> registers;
  struct Param {
    std::string name;
    int offset, size;
  };
  std::vector<Param> params;            // incoming
  std::map<std::string, int> outgoing;  // offsets of parameters of calls
  int params_size = 0, outgoing_size = 0, local_size = 0, block_threads = 0;
  // Special registers: register number and which one.
  std::vector<std::pair<int, std::string>> special;
};

struct Program {
  std::vector<Function> functions;
  std::map<std::string, int> shared;  // static shared variables: offsets; dynamic ones lie behind
  int static_shared = 0;
};

Program parse(const std::string& text);

int bytes_of(Type type);

// Generic addresses of the windows that are not global memory, above all real addresses.
constexpr uint64_t kSharedWindow = 0xA000000000000000ull;
constexpr uint64_t kLocalWindow = 0xB000000000000000ull;
constexpr uint64_t kParamWindow = 0xC000000000000000ull;
constexpr uint64_t kOutgoingWindow = 0xD000000000000000ull;
constexpr uint64_t kSharedBase = 0x400;  // shared address 0 is nobody's
constexpr uint64_t kWindowMask = 0xF000000000000000ull;

}  // namespace ptx
