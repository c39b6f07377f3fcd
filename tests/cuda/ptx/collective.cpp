// What the 32 lanes of a warp do together: shuffles, votes, ldmatrix, mma. Fragment layouts are
// those of the PTX manual (ISA 8.x, 9.7.14.5.8 for m16n8k16, 9.7.14.5.15 for ldmatrix).
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace ptx {
namespace {

uint64_t& reg(Thread& t, const Operand& o) {
  return t.stack.back().registers[static_cast<size_t>(o.reg)];
}
uint64_t value(Thread& t, const Operand& o) {
  return o.reg >= 0 ? reg(t, o) + o.immediate : o.immediate;
}
float to_float(uint64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits);
  float x;
  std::memcpy(&x, &low, 4);
  return x;
}

}  // namespace

void Block::collective(uint32_t w, const Instruction& i) {
  Thread* const lanes = &threads_[w * 32];
  switch (i.op) {
    case Op::kShuffle:
      return shuffle(lanes, i);
    case Op::kVote:
      return vote(lanes, i);
    case Op::kLdmatrix:
      return load_matrices(w, lanes, i);
    case Op::kMma:
      return multiply(lanes, i);
    case Op::kSyncWarp:
      return;
    default:
      fail(i, "not a collective");
  }
}

void Block::shuffle(Thread* lanes, const Instruction& i) {
  uint64_t result[32];
  for (uint32_t l = 0; l < 32; ++l) {
    if (value(lanes[l], i.a[4]) != 0xffffffffu &&
        static_cast<uint32_t>(value(lanes[l], i.a[4])) != 0xffffffffu) {
      fail(i, "a shuffle of a part of a warp");
    }
    const uint32_t by = static_cast<uint32_t>(value(lanes[l], i.a[2]));
    const uint32_t clamp = static_cast<uint32_t>(value(lanes[l], i.a[3]));
    if (clamp != 31 && !(i.mode == 2 && clamp == 0)) fail(i, "a shuffle in segments");
    uint32_t from = i.mode == 0 ? l ^ by : i.mode == 1 ? by & 31 : i.mode == 2 ? l - by : l + by;
    if (from > 31) from = l;
    result[l] = value(lanes[from], i.a[1]);
  }
  for (uint32_t l = 0; l < 32; ++l) reg(lanes[l], i.a[0]) = result[l] & 0xffffffffu;
}

void Block::vote(Thread* lanes, const Instruction& i) {
  uint32_t ballot = 0;
  for (uint32_t l = 0; l < 32; ++l) {
    if (static_cast<uint32_t>(value(lanes[l], i.a[2])) != 0xffffffffu)
      fail(i, "a vote of a part of a warp");
    ballot |= static_cast<uint32_t>(value(lanes[l], i.a[1]) & 1) << l;
  }
  for (uint32_t l = 0; l < 32; ++l) {
    reg(lanes[l], i.a[0]) = i.mode == 0   ? ballot != 0
                            : i.mode == 1 ? ballot == 0xffffffffu
                                          : ballot;
  }
}

void Block::load_matrices(uint32_t w, Thread* lanes, const Instruction& i) {
  uint16_t matrix[4][8][8];
  ++report_.matrix_loads;
  for (int q = 0; q < 4; ++q) {
    int used[8] = {};  // 16-byte columns of the 32 banks
    for (int r = 0; r < 8; ++r) {
      const uint64_t address = value(lanes[q * 8 + r], i.a[4]);
      std::memcpy(matrix[q][r], shared(w, address, 16, /*writes=*/false, i), 16);
      ++used[address / 16 % 8];
    }
    report_.matrix_conflicts += static_cast<uint64_t>(*std::max_element(used, used + 8) - 1);
  }
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, c = l % 4 * 2;
    for (int q = 0; q < 4; ++q) {
      const uint32_t low = i.transposed ? matrix[q][c][g] : matrix[q][g][c];
      const uint32_t high = i.transposed ? matrix[q][c + 1][g] : matrix[q][g][c + 1];
      reg(lanes[l], i.a[static_cast<size_t>(q)]) = low | high << 16;
    }
  }
}

// Operands: 4 destinations, 4 of A, 2 of B, 4 of C.
void Block::multiply(Thread* lanes, const Instruction& i) {
  ++report_.products;
  float a[16][16], b[16][8], c[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4 * 2;
    for (int q = 0; q < 4; ++q) {
      const uint64_t pair = value(lanes[l], i.a[4 + static_cast<size_t>(q)]);
      const int row = g + (q & 1) * 8, column = t + (q >> 1) * 8;
      a[row][column] = widen(static_cast<uint16_t>(pair), i.type);
      a[row][column + 1] = widen(static_cast<uint16_t>(pair >> 16), i.type);
      c[g + q / 2 * 8][t + q % 2] = to_float(value(lanes[l], i.a[10 + static_cast<size_t>(q)]));
    }
    for (int q = 0; q < 2; ++q) {
      const uint64_t pair = value(lanes[l], i.a[8 + static_cast<size_t>(q)]);
      b[t + q * 8][g] = widen(static_cast<uint16_t>(pair), i.type);
      b[t + q * 8 + 1][g] = widen(static_cast<uint16_t>(pair >> 16), i.type);
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      double sum = c[m][n];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[m][k]) * b[k][n];
      c[m][n] = static_cast<float>(sum);
    }
  }
  for (int l = 0; l < 32; ++l) {
    for (int q = 0; q < 4; ++q) {
      uint32_t bits;
      std::memcpy(&bits, &c[l / 4 + q / 2 * 8][l % 4 * 2 + q % 2], 4);
      reg(lanes[l], i.a[static_cast<size_t>(q)]) = bits;
    }
  }
}

}  // namespace ptx
