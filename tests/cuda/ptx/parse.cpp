// From PTX text to functions of instructions; opcodes are decode.cpp's.
#include <algorithm>
#include <cctype>
#include <cstring>

#include "decode.h"

namespace ptx {
namespace {

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
    decode_statement(i, rest);
  }

  void decode_statement(Instruction& i, const std::string& rest) {
    const std::string name = i.text.substr(0, i.text.find('.'));
    if (name == "call") {
      call(i, rest);
      return;
    }
    if (name == "bra") {
      i.op = Op::kBra;
      branches.emplace_back(f->code.size(), trimmed(rest));
    } else {
      auto parts = operands(rest);
      try {
        decode(i, parts);
      } catch (const Error& error) {
        fail(error.what());
      }
      add_operands(i, parts);
    }
    f->code.push_back(std::move(i));
  }

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
    const int unit = bytes_of(type_named(type));
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
