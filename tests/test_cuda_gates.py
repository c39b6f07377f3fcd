"""What ptxas makes of the tensor-core kernels (registers, spills, opcodes), and choose.h's rule.

Shared memory is gated where it is defined (fits_budget in csrc/kernels/cuda/tensor/walk.cuh, by
static_assert). No disassembler is needed: the low twelve bits of every 16-byte instruction of a
cubin are its opcode.
"""

from __future__ import annotations

import collections
import ctypes
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cuda_emulation import CSRC, CXX, SHIM, can_compile
from cuda_ptx import CUDA, assemble, compile_ptx, needs_nvcc

needs_compiler = pytest.mark.skipif(not can_compile(), reason="no C++ compiler")

HMMA, LDSM, LDGSTS, LOCAL_LOAD, LOCAL_STORE = 0x23C, 0x83B, 0xFAE, 0x983, 0x387
TUNED = (64, 128)  # head sizes whose kernels must not spill
# The types differ in few instructions: both for one architecture, one for the other.
TYPES = {"80": ("float16", "bfloat16"), "90": ("bfloat16",)}
KINDS = ("forward", "split", "keys", "queries")
# Kernels of a file: three sizes, plain and general; of split keys the general ones, and their end.
COUNTS = {"forward": 6, "split": 4, "keys": 6, "queries": 6}


@dataclass(frozen=True)
class Kernel:
    """One instance: its template arguments, what ptxas said of it, and its opcodes."""

    name: str
    kind: str
    size: int
    general: bool
    registers: int
    stack: int
    spills: int
    opcodes: collections.Counter[int]


def sections(cubin: bytes) -> dict[str, bytes]:
    """Code sections of a 64-bit ELF file, by the name of their entry."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(count)]
    names_at = headers[names_index][4]
    found = {}
    for name_offset, _, _, _, offset, length in headers:
        end = cubin.index(b"\0", names_at + name_offset)
        name = cubin[names_at + name_offset : end].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[offset : offset + length]
    return found


def opcodes(code: bytes) -> collections.Counter[int]:
    words = (struct.unpack_from("<H", code, at)[0] for at in range(0, len(code), 16))
    return collections.Counter(word & 0xFFF for word in words)


def read_kernels(cubin: Path, said: str) -> list[Kernel]:
    code = sections(cubin.read_bytes())
    kernels = []
    for part in re.split(r"Compiling entry function ", said)[1:]:
        name = part.split("'")[1]
        found = re.search(
            r"(forward|split|join|keys|queries)_kernelI\w+?E\dE(?:Li(\d+)E)?(?:Lb([01])E)?E", name
        )
        assert found is not None, name
        # The first lines behind an entry are its own; noinline functions of it follow.
        stack, stores, loads = (
            int(n)
            for n in re.findall(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
            )[0]
        )
        registers = re.search(r"Used (\d+) registers", part)
        assert registers is not None
        kernels.append(
            Kernel(
                name,
                found[1],
                int(found[2] or 0),
                found[1] == "split" or found[3] == "1",
                int(registers[1]),
                stack,
                stores + loads,
                opcodes(code[name]),
            )
        )
    return kernels


@pytest.fixture(scope="module", params=TYPES)
def kernels(request: pytest.FixtureRequest) -> list[Kernel]:
    arch: str = request.param
    instances = CUDA / "tensor" / "instances"
    files = [instances / f"{kind}_{name}.cu" for kind in KINDS for name in TYPES[arch]]
    built = assemble(compile_ptx(files, arch), arch)
    found = [kernel for cubin, said in built for kernel in read_kernels(cubin, said)]
    assert len(found) == len(TYPES[arch]) * sum(COUNTS.values())
    return found


@needs_nvcc
def test_tuned_kernels_use_no_local_memory(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        if kernel.size in TUNED or kernel.kind == "join":
            assert kernel.spills == 0, kernel.name
            assert kernel.stack == 0, kernel.name
            assert kernel.opcodes[LOCAL_LOAD] + kernel.opcodes[LOCAL_STORE] == 0, kernel.name


@needs_nvcc
def test_spills_of_the_widest_kernels_stay_small(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.stack <= 128, kernel.name
        if not kernel.general:
            assert kernel.spills == 0, kernel.name


@needs_nvcc
def test_registers_allow_two_blocks_on_a_multiprocessor(kernels: list[Kernel]) -> None:
    threads, register_file, step = 128, 65536, 8
    for kernel in kernels:
        allocated = -(-kernel.registers // step) * step * threads
        assert 2 * allocated <= register_file, kernel.name


def tile_instructions(kernel: Kernel) -> tuple[int, int]:
    """(HMMA, LDSM) of one tile by the shapes in the headers: the whole of a kernel's products."""
    size = kernel.size
    if kernel.kind == "join":
        return 0, 0
    if kernel.kind in ("forward", "split"):
        slices = 2 if size <= 128 and not kernel.general else 1
        inner = 32 if size == 128 and not kernel.general else 64
        resident = size <= 128 and slices == 1
        products = [(size, inner, 0 if resident else slices), (inner, size, 0)]
        once = size // 16 * slices if resident else 0  # the query operand, loaded once
    else:
        slices, inner, once = 1, (64 if size == 64 else 32), 0
        columns = min(size, 128) if kernel.kind == "keys" else size
        products = [(size, inner, 1), (size, inner, 1), (inner, columns, 0)]
        if kernel.kind == "keys":
            products.append((inner, columns, 0))
        if kernel.general:  # scores again for softcap's slope
            products.append((size, inner, 1))
    hmma = sum(depth // 16 * width // 8 * slices for depth, width, _ in products)
    ldsm = once + sum(depth // 16 * (width // 16 + left) for depth, width, left in products)
    return hmma, ldsm


@needs_nvcc
def test_products_are_in_the_code_once(kernels: list[Kernel]) -> None:
    """Every product of a tile is there, unrolled, and the loop over tiles is not duplicated."""
    for kernel in kernels:
        hmma, ldsm = tile_instructions(kernel)
        assert kernel.opcodes[HMMA] == hmma, kernel.name
        assert kernel.opcodes[LDSM] == ldsm, kernel.name


@needs_nvcc
def test_tiles_arrive_by_asynchronous_copies(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        if kernel.kind != "join":
            assert kernel.opcodes[LDGSTS] >= 3, kernel.name  # Q, K and V, unrolled by up to four


@needs_nvcc
def test_joining_parts_is_light(kernels: list[Kernel]) -> None:
    """64 registers leave room for eight blocks, so that many rows' parts are read at a time."""
    joins = [kernel for kernel in kernels if kernel.kind == "join"]
    assert len(joins) in (1, 2)
    assert all(kernel.registers <= 64 for kernel in joins)


# ---- choose.h --------------------------------------------------------------------------------

CHOOSE = """
#include "kernels/cuda/choose.h"
using namespace attention_ext::kernels;
extern "C" {
// fields: type, E, Ev, major, column stride, row stride, address, packed, batch table
int forward(const int64_t* f) {
  static int64_t table[2] = {0, 1};
  AttentionParams p;
  p.type = static_cast<ScalarType>(f[0]);
  p.qk_size = f[1];
  p.v_size = f[2];
  p.scale = 1;
  cuda::DeviceLimits device;
  device.major = static_cast<int>(f[3]);
  p.query.data = p.key.data = p.value.data = reinterpret_cast<char*>(64);
  for (View* view : {&p.query, &p.key, &p.value}) {
    view->stride[0] = view->stride[1] = 4096;
    view->stride[2] = 256;
    view->stride[3] = 1;
  }
  p.key.stride[3] = f[4];
  p.key.stride[2] = f[5];
  p.value.data = reinterpret_cast<char*>(f[6]);
  if (f[7] != 0) p.cu_seqlens_q = table;
  if (f[8] != 0) p.query.batch_offsets = table;
  return cuda::tensor_cores_take(p, device);
}
int64_t padded(int64_t size, int64_t value_size) {
  AttentionParams p;
  p.qk_size = size;
  p.v_size = value_size;
  return cuda::padded_size(p);
}
// 0: a plain call; others have one option.
int general(int option) {
  AttentionParams p;
  char some = 0;
  if (option == 1) p.attn_bias.data = &some;
  if (option == 2) p.softcap = 1;
  if (option == 3) p.alibi_slopes = &some;
  if (option == 4) p.scale = -1;
  if (option == 5) p.dropout.threshold = 1;
  if (option == 6) p.key_mask.data = &some;
  if (option == 7) {
    p.key_mask.data = &some;
    p.key_mask_is_bool = true;
  }
  if (option == 8) p.attn_mask.data = &some;
  if (option == 9) p.sinks = &some;
  return cuda::needs_general(p);
}
}
"""


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("choose")
    source, so = folder / "choose.cpp", folder / "choose.so"
    source.write_text(CHOOSE)
    command = [CXX, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{CSRC}", f"-I{SHIM}"]
    subprocess.run([*command, str(source), "-o", str(so)], check=True)
    library = ctypes.CDLL(str(so))
    library.padded.restype = ctypes.c_int64
    library.padded.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return library


@needs_compiler
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"type": 3}, True),
        ({"type": 0}, False),
        ({"type": 1}, False),
        ({"E": 256}, True),
        ({"E": 264}, False),
        ({"E": 33}, False),
        ({"E": 0}, False),
        ({"Ev": 8}, True),
        ({"Ev": 12}, False),
        ({"Ev": 512}, False),
        ({"major": 7}, False),
        ({"major": 12}, True),
        ({"column": 2}, False),
        ({"row": 0}, True),
        ({"row": 100}, False),
        ({"row": 2**33}, True),
        ({"address": 72}, False),
        ({"packed": 1}, False),
        ({"table": 1}, False),
    ],
    ids=str,
)
def test_tensor_cores_take_what_the_rule_says(
    change: dict[str, int], taken: bool, choose: Any
) -> None:
    fields = {"type": 2, "E": 64, "Ev": 64, "major": 8, "column": 1, "row": 64}
    fields |= {"address": 128, "packed": 0, "table": 0} | change
    assert choose.forward((ctypes.c_int64 * 9)(*fields.values())) == taken


@needs_compiler
def test_head_sizes_are_padded_to_the_next_instance(choose: Any) -> None:
    sizes = {(8, 8): 64, (64, 8): 64, (8, 72): 128, (128, 64): 128, (136, 8): 256, (256, 256): 256}
    for (size, value_size), padded in sizes.items():
        assert choose.padded(size, value_size) == padded


@needs_compiler
def test_options_choose_the_general_instance(choose: Any) -> None:
    assert [choose.general(n) for n in range(10)] == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
