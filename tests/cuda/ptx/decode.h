// Opcodes and modifiers of PTX instructions: decode.cpp, for parse.cpp.
#pragma once

#include "program.h"

namespace ptx {

// Fills in what the text of an instruction's opcode says (`i.text`). `parts` are its operands'
// texts, of which what is not looked at is cut off. Raises an error if anything is unknown.
void decode(Instruction& i, std::vector<std::string>& parts);

// "f32" as a type.
Type type_named(const std::string& name);

std::vector<std::string> split(const std::string& text, char by);

}  // namespace ptx
