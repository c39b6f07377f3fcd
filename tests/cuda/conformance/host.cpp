// The conformance kernels through the SIMT shim, and the table for Python (tests/test_cuda_ptx.py).
#include "inputs.h"

extern "C" {

int conformance_count() { return conformance::kEntryCount; }
const char* conformance_name(int n) { return conformance::kEntries[n].name; }
// in_bytes, out_bytes, shared_bytes
void conformance_sizes(int n, int* sizes) {
  const conformance::Entry& e = conformance::kEntries[n];
  sizes[0] = e.in_bytes;
  sizes[1] = e.out_bytes;
  sizes[2] = e.shared_bytes;
}
void conformance_input(int n, uint8_t* to) {
  const auto bytes = conformance::input_of(conformance::kEntries[n]);
  std::memcpy(to, bytes.data(), bytes.size());
}
void conformance_run(int n, const uint8_t* in, uint8_t* out) {
  const conformance::Entry& e = conformance::kEntries[n];
  simt::launch(1, conformance::kLanes, static_cast<size_t>(e.shared_bytes),
               [&] { e.kernel(in, out); });
}
}
