// From an instruction's opcode and modifiers, "ld.global.v2.u32", to its decoded form.
#include "decode.h"

#include <algorithm>
#include <map>

namespace ptx {
namespace {

const std::map<std::string, Type> kTypes = {
    {"pred", Type::kPred}, {"b8", Type::kB8},   {"u8", Type::kU8},   {"s8", Type::kS8},
    {"b16", Type::kB16},   {"u16", Type::kU16}, {"s16", Type::kS16}, {"f16", Type::kF16},
    {"bf16", Type::kBF16}, {"b32", Type::kB32}, {"u32", Type::kU32}, {"s32", Type::kS32},
    {"f32", Type::kF32},   {"b64", Type::kB64}, {"u64", Type::kU64}, {"s64", Type::kS64},
    {"f64", Type::kF64}};
const std::map<std::string, Compare> kCompares = {
    {"eq", Compare::kEq},   {"ne", Compare::kNe},   {"lt", Compare::kLt},   {"lo", Compare::kLt},
    {"le", Compare::kLe},   {"ls", Compare::kLe},   {"gt", Compare::kGt},   {"hi", Compare::kGt},
    {"ge", Compare::kGe},   {"hs", Compare::kGe},   {"equ", Compare::kEqu}, {"neu", Compare::kNeu},
    {"ltu", Compare::kLtu}, {"leu", Compare::kLeu}, {"gtu", Compare::kGtu}, {"geu", Compare::kGeu},
    {"nan", Compare::kNan}, {"num", Compare::kNum}};
const std::map<std::string, Round> kRounds = {{"rn", Round::kNearest},     {"rz", Round::kZero},
                                              {"rm", Round::kDown},        {"rp", Round::kUp},
                                              {"rni", Round::kNearestInt}, {"rzi", Round::kZeroInt},
                                              {"rmi", Round::kDownInt},    {"rpi", Round::kUpInt}};
const std::map<std::string, Op> kPlain = {{"mov", Op::kMov},
                                          {"add", Op::kAdd},
                                          {"sub", Op::kSub},
                                          {"fma", Op::kFma},
                                          {"div", Op::kDiv},
                                          {"rem", Op::kRem},
                                          {"min", Op::kMin},
                                          {"max", Op::kMax},
                                          {"abs", Op::kAbs},
                                          {"neg", Op::kNeg},
                                          {"not", Op::kNot},
                                          {"and", Op::kAnd},
                                          {"or", Op::kOr},
                                          {"xor", Op::kXor},
                                          {"shl", Op::kShl},
                                          {"shr", Op::kShr},
                                          {"selp", Op::kSelp},
                                          {"ex2", Op::kEx2},
                                          {"lg2", Op::kLg2},
                                          {"rcp", Op::kRcp},
                                          {"sqrt", Op::kSqrt},
                                          {"rsqrt", Op::kRsqrt},
                                          {"copysign", Op::kCopysign},
                                          {"bfi", Op::kBfi},
                                          {"bfe", Op::kBfe},
                                          {"popc", Op::kPopc},
                                          {"clz", Op::kClz},
                                          {"brev", Op::kBrev},
                                          {"prmt", Op::kPrmt},
                                          {"lop3", Op::kLop3},
                                          {"trap", Op::kTrap},
                                          {"ret", Op::kRet},
                                          {"exit", Op::kRet},
                                          {"tanh", Op::kTanh},
                                          {"bra", Op::kBra}};

// One instruction being decoded. The functions return whether the opcode is theirs.
struct Decoder {
  Instruction& i;
  std::vector<std::string>& parts;  // texts of the operands
  std::vector<std::string> words;   // opcode and modifiers
  std::string name;                 // the opcode
  std::vector<Type> types;
  std::vector<std::string> other;  // modifiers that are neither types nor roundings
  bool low = false, high = false, wide = false;

  [[noreturn]] void unknown() const { throw Error("unknown instruction " + i.text); }
  void only(std::initializer_list<const char*> allowed) const {
    for (const auto& word : other) {
      if (std::find(allowed.begin(), allowed.end(), word) == allowed.end()) unknown();
    }
  }
  void take_space(const std::string& word) {
    if (word == "global") {
      i.space = Space::kGlobal;
    } else if (word == "shared") {
      i.space = Space::kShared;
    } else if (word == "local") {
      i.space = Space::kLocal;
    } else if (word == "param") {
      i.space = Space::kParam;
    } else {
      unknown();
    }
  }

  void modifiers() {
    for (size_t w = 1; w < words.size(); ++w) {
      const std::string& word = words[w];
      if (const auto type = kTypes.find(word); type != kTypes.end()) {
        types.push_back(type->second);
      } else if (const auto round = kRounds.find(word); round != kRounds.end()) {
        i.round = round->second;
      } else if (word == "ftz") {
        i.flush = true;
      } else if (word == "sat") {
        i.saturate = true;
      } else if (word == "approx" || word == "full") {
        i.approximate = true;
      } else if (word == "lo" && name != "setp") {
        low = true;
      } else if (word == "hi" && name != "setp") {
        high = true;
      } else if (word == "wide") {
        wide = true;
      } else {
        other.push_back(word);
      }
    }
    if (!types.empty()) {
      i.type = types[0];
      i.from = types.back();
    }
  }

  bool arithmetic() {
    if (name == "mul") {
      only({});
      i.op = wide ? Op::kMulWide : high ? Op::kMulHigh : Op::kMul;
    } else if (name == "mad") {
      only({});
      if (high) unknown();
      i.op = wide ? Op::kMadWide : Op::kMad;
    } else if (name == "setp") {
      i.op = Op::kSetp;
      if (other.size() != 1 && !(low || high)) unknown();
      const auto compare = kCompares.find(other[0]);
      if (compare == kCompares.end() || parts.size() != 3) unknown();
      i.compare = compare->second;
    } else if (name == "cvt") {
      i.op = Op::kCvt;
      // cvt.rn.f16x2.f32: the type of the pair is no type of its own.
      for (const auto& word : words) {
        if (word == "f16x2" || word == "bf16x2") {
          i.op = Op::kCvtPair;
          i.type = word == "f16x2" ? Type::kF16 : Type::kBF16;
          other.clear();
        }
      }
      only({});
      if (i.op == Op::kCvt && types.size() != 2) unknown();
    } else if (name == "shf") {
      if (words[2] == "wrap" || words[2] == "clamp") {
        i.op = Op::kShf;
        i.mode = static_cast<uint8_t>((words[1] == "r" ? 1 : 0) + (words[2] == "clamp" ? 2 : 0));
      } else {
        unknown();
      }
    } else if (const auto plain = kPlain.find(name); plain != kPlain.end()) {
      only({"b32"});
      i.op = plain->second;
    } else {
      return false;
    }
    return true;
  }

  bool memory() {
    if (name == "cvta") {
      i.op = Op::kCvta;
      i.mode = 0;  // to generic
      for (const auto& word : other) {
        if (word == "to") {
          i.mode = 1;
        } else {
          take_space(word);
        }
      }
    } else if (name == "ld" || name == "st") {
      i.op = name == "ld" ? Op::kLoad : Op::kStore;
      for (const auto& word : other) {
        if (word != "v2" && word != "v4" && word != "nc") take_space(word);
      }
    } else if (name == "atom" || name == "red") {
      if (name != "atom" || words[1] != "global" || words[2] != "add") unknown();
      if (i.type != Type::kU64) unknown();
      i.op = Op::kAtom;
    } else if (name == "cp") {
      if (i.text == "cp.async.cg.shared.global")
        i.op = Op::kCopy;
      else if (i.text == "cp.async.commit_group")
        i.op = Op::kCommit;
      else if (i.text == "cp.async.wait_group")
        i.op = Op::kWait;
      else
        unknown();
    } else if (name == "membar" || name == "fence") {
      i.op = Op::kFence;
    } else {
      return false;
    }
    return true;
  }

  bool collective() {
    if (name == "bar" || name == "barrier") {
      if (i.text == "bar.sync" || i.text == "barrier.sync") {
        i.op = Op::kBarrier;
        if (parts.size() != 1) unknown();
      } else if (i.text == "bar.red.or.pred" || i.text == "barrier.red.or.pred") {
        i.op = Op::kBarrierRed;
      } else if (i.text == "bar.warp.sync") {
        i.op = Op::kSyncWarp;
      } else {
        unknown();
      }
    } else if (name == "shfl") {
      i.op = Op::kShuffle;
      if (words[2] == "bfly")
        i.mode = 0;
      else if (words[2] == "idx")
        i.mode = 1;
      else if (words[2] == "up")
        i.mode = 2;
      else if (words[2] == "down")
        i.mode = 3;
      else
        unknown();
      const size_t bar = parts[0].find('|');
      if (bar != std::string::npos) parts[0] = parts[0].substr(0, bar);  // the predicate: unused
    } else if (name == "vote") {
      i.op = Op::kVote;
      if (words[2] == "any")
        i.mode = 0;
      else if (words[2] == "all")
        i.mode = 1;
      else if (words[2] == "ballot")
        i.mode = 2;
      else
        unknown();
    } else if (name == "mma") {
      i.op = Op::kMma;
      if (i.text == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
        i.type = Type::kF16;
      else if (i.text == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
        i.type = Type::kBF16;
      else
        unknown();
    } else if (name == "ldmatrix") {
      i.op = Op::kLdmatrix;
      if (i.text == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
        i.transposed = true;
      else if (i.text != "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
        unknown();
    } else {
      return false;
    }
    return true;
  }
};

}  // namespace

Type type_named(const std::string& name) { return kTypes.at(name); }

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at; (at = text.find(by, begin)) != std::string::npos; begin = at + 1) {
    parts.push_back(text.substr(begin, at - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

void decode(Instruction& i, std::vector<std::string>& parts) {
  Decoder decoder{i, parts, split(i.text, '.'), {}, {}, {}};
  decoder.name = decoder.words[0];
  decoder.modifiers();
  if (!decoder.arithmetic() && !decoder.memory() && !decoder.collective()) decoder.unknown();
  if (i.op == Op::kMov && parts.size() == 2 &&
      (parts[0].find('{') != std::string::npos || parts[1].find('{') != std::string::npos)) {
    i.op = parts[0].find('{') != std::string::npos ? Op::kUnpack : Op::kPack;
  }
}

}  // namespace ptx
