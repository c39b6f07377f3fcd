// From PTX text to decoded instructions.
#include <algorithm>
#include <cctype>
#include <cstring>

#include "program.h"

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

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at; (at = text.find(by, begin)) != std::string::npos; begin = at + 1) {
    parts.push_back(text.substr(begin, at - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n"), end = text.find_last_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

struct Parser {
  Program program;
  Function* f = nullptr;
  std::map<std::string, int> labels, locals;
  std::vector<std::pair<size_t, std::string>> branches;
  std::map<std::string, int> function_index;
  int line = 0;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error("PTX line " + std::to_string(line) + ": " + what);
  }

  int reg(const std::string& name) {
    const auto [at, fresh] = f->registers.try_emplace(name, int(f->registers.size()));
    if (fresh &&
        (name.rfind("%tid", 0) == 0 || name.rfind("%ntid", 0) == 0 ||
         name.rfind("%ctaid", 0) == 0 || name.rfind("%nctaid", 0) == 0 || name == "%laneid")) {
      f->special.emplace_back(at->second, name);
    }
    return at->second;
  }

  uint64_t symbol(const std::string& name, bool& found) const {
    found = true;
    if (const auto at = program.shared.find(name); at != program.shared.end()) {
      return kSharedBase + at->second;
    }
    if (const auto at = locals.find(name); at != locals.end()) return at->second;
    for (const auto& param : f->params) {
      if (param.name == name) return param.offset;
    }
    found = false;
    return 0;
  }

  Operand operand(const std::string& raw) {
    const std::string text = trimmed(raw);
    if (text.empty()) fail("an empty operand");
    if (text[0] == '%') return {reg(text), 0};
    if (text.rfind("0f", 0) == 0 || text.rfind("0F", 0) == 0 || text.rfind("0d", 0) == 0 ||
        text.rfind("0D", 0) == 0) {
      return {-1, std::stoull(text.substr(2), nullptr, 16)};
    }
    if (std::isdigit(static_cast<unsigned char>(text[0]))) {
      return {-1, std::stoull(text, nullptr, 0)};
    }
    if (text[0] == '-') return {-1, static_cast<uint64_t>(std::stoll(text, nullptr, 0))};
    bool found;
    const uint64_t at = symbol(text, found);
    if (!found) fail("unknown symbol " + text);
    return {-1, at};
  }

  // [register + offset], [symbol + offset] or [number]
  Operand address(const std::string& raw, Instruction& i) {
    std::string text = trimmed(raw);
    text = trimmed(text.substr(1, text.size() - 2));
    const size_t plus = text.find('+');
    const std::string base = trimmed(text.substr(0, plus));
    const uint64_t offset =
        plus == std::string::npos ? 0 : static_cast<uint64_t>(std::stoll(text.substr(plus + 1)));
    if (base[0] == '%') return {reg(base), offset};
    if (i.space == Space::kParam) {
      if (const auto at = f->outgoing.find(base); at != f->outgoing.end()) {
        return {-1, kOutgoingWindow + at->second + offset};
      }
      for (const auto& param : f->params) {
        if (param.name == base) return {-1, kParamWindow + param.offset + offset};
      }
      fail("unknown parameter " + base);
    }
    return {-1, operand(base).immediate + offset};
  }

  std::vector<std::string> operands(const std::string& text) const {
    std::vector<std::string> parts;
    std::string current;
    int depth = 0;
    for (char c : text) {
      if (c == '{' || c == '[' || c == '(') ++depth;
      if (c == '}' || c == ']' || c == ')') --depth;
      if (c == ',' && depth == 0) {
        parts.push_back(current);
        current.clear();
      } else {
        current += c;
      }
    }
    if (!trimmed(current).empty()) parts.push_back(current);
    return parts;
  }

  void add_operands(Instruction& i, const std::vector<std::string>& parts) {
    for (const std::string& raw : parts) {
      const std::string text = trimmed(raw);
      if (text[0] == '{') {
        const auto names = split(text.substr(1, text.size() - 2), ',');
        if (names.size() > i.vector) i.vector = static_cast<uint8_t>(names.size());
        for (const auto& name : names) i.a.push_back(operand(name));
      } else if (text[0] == '[') {
        i.a.push_back(address(text, i));
      } else if (const size_t bar = text.find('|'); bar != std::string::npos) {
        fail("a second destination in " + i.text);
      } else if (text[0] == '!') {
        fail("a negated operand in " + i.text);
      } else {
        i.a.push_back(operand(text));
      }
    }
  }

  void statement(std::string text) {
    text = trimmed(text);
    if (text.empty()) return;
    Instruction i{};
    i.line = line;
    if (text[0] == '@') {
      const size_t space = text.find_first_of(" \t");
      std::string name = text.substr(1, space - 1);
      i.negated = name[0] == '!';
      i.predicate = reg(i.negated ? name.substr(1) : name);
      text = trimmed(text.substr(space));
    }
    const size_t space = text.find_first_of(" \t\n");
    i.text = text.substr(0, space);
    const std::string rest = space == std::string::npos ? "" : text.substr(space);
    decode(i, rest);
  }

  void decode(Instruction& i, const std::string& rest) {
    const auto words = split(i.text, '.');
    const std::string& name = words[0];
    std::vector<Type> types;
    std::vector<std::string> other;
    bool low = false, high = false, wide = false;
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
    auto only = [&](std::initializer_list<const char*> allowed) {
      for (const auto& word : other) {
        if (std::find(allowed.begin(), allowed.end(), word) == allowed.end()) unknown(i);
      }
    };
    auto parts = operands(rest);
    if (name == "mul") {
      only({});
      i.op = wide ? Op::kMulWide : high ? Op::kMulHigh : Op::kMul;
    } else if (name == "mad") {
      only({});
      if (high) unknown(i);
      i.op = wide ? Op::kMadWide : Op::kMad;
    } else if (name == "setp") {
      i.op = Op::kSetp;
      if (other.size() != 1 && !(low || high)) unknown(i);
      const auto compare = kCompares.find(other[0]);
      if (compare == kCompares.end() || parts.size() != 3) unknown(i);
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
      if (i.op == Op::kCvt && types.size() != 2) unknown(i);
    } else if (name == "cvta") {
      i.op = Op::kCvta;
      i.mode = 0;  // to generic
      for (const auto& word : other) {
        if (word == "to")
          i.mode = 1;
        else if (word == "global")
          i.space = Space::kGlobal;
        else if (word == "shared")
          i.space = Space::kShared;
        else if (word == "local")
          i.space = Space::kLocal;
        else if (word == "param")
          i.space = Space::kParam;
        else
          unknown(i);
      }
    } else if (name == "ld" || name == "st") {
      i.op = name == "ld" ? Op::kLoad : Op::kStore;
      for (const auto& word : other) {
        if (word == "global")
          i.space = Space::kGlobal;
        else if (word == "shared")
          i.space = Space::kShared;
        else if (word == "local")
          i.space = Space::kLocal;
        else if (word == "param")
          i.space = Space::kParam;
        else if (word == "v2" || word == "v4" || word == "nc")
          continue;
        else
          unknown(i);
      }
    } else if (name == "shf") {
      if (words[2] == "wrap" || words[2] == "clamp") {
        i.op = Op::kShf;
        i.mode = static_cast<uint8_t>((words[1] == "r" ? 1 : 0) + (words[2] == "clamp" ? 2 : 0));
      } else {
        unknown(i);
      }
    } else if (name == "atom" || name == "red") {
      if (name != "atom" || words[1] != "global" || words[2] != "add") unknown(i);
      if (i.type != Type::kU64) unknown(i);
      i.op = Op::kAtom;
    } else if (name == "bar" || name == "barrier") {
      if (i.text == "bar.sync" || i.text == "barrier.sync") {
        i.op = Op::kBarrier;
        if (parts.size() != 1) unknown(i);
      } else if (i.text == "bar.red.or.pred" || i.text == "barrier.red.or.pred") {
        i.op = Op::kBarrierRed;
      } else if (i.text == "bar.warp.sync") {
        i.op = Op::kSyncWarp;
      } else {
        unknown(i);
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
        unknown(i);
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
        unknown(i);
    } else if (name == "mma") {
      i.op = Op::kMma;
      if (i.text == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
        i.type = Type::kF16;
      else if (i.text == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
        i.type = Type::kBF16;
      else
        unknown(i);
    } else if (name == "ldmatrix") {
      i.op = Op::kLdmatrix;
      if (i.text == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
        i.transposed = true;
      else if (i.text != "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
        unknown(i);
    } else if (name == "cp") {
      if (i.text == "cp.async.cg.shared.global")
        i.op = Op::kCopy;
      else if (i.text == "cp.async.commit_group")
        i.op = Op::kCommit;
      else if (i.text == "cp.async.wait_group")
        i.op = Op::kWait;
      else
        unknown(i);
    } else if (name == "membar" || name == "fence") {
      i.op = Op::kFence;
    } else if (name == "call") {
      call(i, rest);
      return;
    } else if (name == "bra") {
      i.op = Op::kBra;
      branches.emplace_back(f->code.size(), trimmed(rest));
      f->code.push_back(std::move(i));
      return;
    } else if (const auto plain = kPlain.find(name); plain != kPlain.end()) {
      only({"b32"});
      i.op = plain->second;
    } else {
      unknown(i);
    }
    if (i.op == Op::kMov && parts.size() == 2 &&
        (parts[0].find('{') != std::string::npos || parts[1].find('{') != std::string::npos)) {
      i.op = parts[0].find('{') != std::string::npos ? Op::kUnpack : Op::kPack;
    }
    add_operands(i, parts);
    f->code.push_back(std::move(i));
  }

  [[noreturn]] void unknown(const Instruction& i) const { fail("unknown instruction " + i.text); }

  // call.uni (retval), name, (arguments);
  void call(Instruction& i, const std::string& rest) {
    i.op = Op::kCall;
    auto parts = operands(rest);
    if (parts.empty() || trimmed(parts[0])[0] == '(') fail("a call with a result");
    i.text = trimmed(parts[0]);  // the name, until resolve_calls()
    if (parts.size() > 1) {
      const std::string list = trimmed(parts[1]);
      for (const auto& argument : split(list.substr(1, list.size() - 2), ',')) {
        i.a.push_back({-1, static_cast<uint64_t>(f->outgoing.at(trimmed(argument)))});
      }
    }
    f->code.push_back(std::move(i));
  }

  static int after(const std::string& text, const std::string& key, int otherwise) {
    const size_t at = text.find(key);
    return at == std::string::npos ? otherwise : std::stoi(text.substr(at + key.size()));
  }

  // ".param .align 8 .b8 name[816]" or ".param .u64 name": name and size; returns the alignment.
  int variable(const std::string& text, std::string& name, int& size) const {
    const int align = after(text, ".align ", 0);
    const size_t bracket = text.find('[');
    const std::string head = trimmed(text.substr(0, bracket));
    const size_t last = head.find_last_of(" \t");
    name = head.substr(last + 1);
    const std::string before = trimmed(head.substr(0, last));
    const std::string type = before.substr(before.find_last_of('.') + 1);
    const int unit = bytes_of(kTypes.at(type));
    size = bracket == std::string::npos
               ? unit
               : unit * (text[bracket + 1] == ']' ? 0 : std::stoi(text.substr(bracket + 1)));
    return align != 0 ? align : unit;
  }

  static int place(int& total, int size, int align) {
    const int at = (total + align - 1) / align * align;
    total = at + size;
    return at;
  }

  void directive(const std::string& text) {
    if (text.rfind(".reg", 0) == 0 || text.rfind(".loc", 0) == 0 || text.rfind(".pragma", 0) == 0) {
      return;
    }
    std::string name;
    int size;
    if (text.rfind(".param", 0) == 0) {
      const int align = variable(text, name, size);
      if (f->outgoing.count(name) == 0) {
        f->outgoing[name] = place(f->outgoing_size, std::max(size, 8), std::max(align, 8));
      }
    } else if (text.rfind(".local", 0) == 0) {
      const int align = variable(text, name, size);
      locals[name] = place(f->local_size, size, align);
    } else if (text.find(".shared") != std::string::npos) {
      const int align = variable(text, name, size);
      program.shared[name] = place(program.static_shared, size, std::max(align, 16));
    } else {
      fail("unknown directive " + text);
    }
  }

  void begin_function(const std::string& header) {
    const bool entry = header.find(".entry") != std::string::npos;
    const size_t open = header.find('(');
    const std::string head = trimmed(header.substr(0, open));
    const std::string name = trimmed(head.substr(head.find_last_of(" \t") + 1));
    if (function_index.count(name) == 0) {
      function_index[name] = static_cast<int>(program.functions.size());
      program.functions.emplace_back();
    }
    f = &program.functions[function_index[name]];
    f->name = name;
    f->is_entry = entry;
    labels.clear();
    locals.clear();
    if (open == std::string::npos) return;
    const size_t close = header.find(')', open);
    f->params.clear();
    f->params_size = 0;
    for (const auto& text : split(header.substr(open + 1, close - open - 1), ',')) {
      if (trimmed(text).empty()) continue;
      std::string param;
      int size;
      const int align = variable(trimmed(text), param, size);
      f->params.push_back({param, place(f->params_size, size, align), size});
    }
    f->block_threads = after(header, ".maxntid ", 0);
  }

  void end_function() {
    for (const auto& [at, label] : branches) {
      const auto found = labels.find(label);
      if (found == labels.end()) fail("unknown label " + label);
      f->code[at].target = found->second;
    }
    branches.clear();
    f = nullptr;
  }

  void run(const std::string& text) {
    std::string current;
    int depth = 0;  // of braces; 1 inside a function
    bool comment = false;
    for (size_t at = 0; at < text.size(); ++at) {
      const char c = text[at];
      if (c == '\n') {
        ++line;
        comment = false;
        // Directives of a module end with their line.
        if (depth == 0 && (trimmed(current).rfind(".version", 0) == 0 ||
                           trimmed(current).rfind(".target", 0) == 0 ||
                           trimmed(current).rfind(".address_size", 0) == 0)) {
          current.clear();
        }
        current += ' ';
        continue;
      }
      if (comment) continue;
      if (c == '/' && at + 1 < text.size() && text[at + 1] == '/') {
        comment = true;
        continue;
      }
      if (std::strchr("{}:;", c) == nullptr) {
        current += c;
        continue;
      }
      const std::string so_far = trimmed(current);
      if (c == '{' && depth == 0) {
        begin_function(so_far);
        current.clear();
        depth = 1;
      } else if (c == '{' && so_far.empty()) {
        ++depth;
      } else if (c == '}' && so_far.empty()) {
        if (--depth == 0) end_function();
      } else if (c == ':' && depth > 0 && so_far.find(' ') == std::string::npos) {
        labels[so_far] = static_cast<int>(f->code.size());
        current.clear();
      } else if (c == ';') {
        if (depth == 0) {
          if (so_far.find(".func") == std::string::npos && !so_far.empty()) {
            if (so_far.find(".shared") == std::string::npos) fail("unknown directive " + so_far);
            directive(so_far);
          }
        } else if (!so_far.empty() && so_far[0] == '.') {
          directive(so_far);
        } else {
          statement(so_far);
        }
        current.clear();
      } else {
        current += c;
      }
    }
  }

  void resolve_calls() {
    for (Function& function : program.functions) {
      for (Instruction& i : function.code) {
        if (i.op != Op::kCall) continue;
        const auto found = function_index.find(i.text);
        if (found == function_index.end()) throw Error("call of an unknown function " + i.text);
        i.target = found->second;
      }
    }
  }
};

}  // namespace

int bytes_of(Type type) {
  switch (type) {
    case Type::kPred:
    case Type::kB8:
    case Type::kU8:
    case Type::kS8:
      return 1;
    case Type::kB16:
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kB32:
    case Type::kU32:
    case Type::kS32:
    case Type::kF32:
      return 4;
    default:
      return 8;
  }
}

Program parse(const std::string& text) {
  Parser parser;
  parser.line = 1;
  parser.run(text);
  parser.resolve_calls();
  return std::move(parser.program);
}

}  // namespace ptx
