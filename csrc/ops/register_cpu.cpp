// The CPU kernels as the dispatcher sees them: checks first, then csrc/cpu.
#include "cpu/attention.h"
#include "ops/checked.h"

namespace attention_ext {

TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  Checked<cpu::attention, cpu::attention_backward, cpu::attention_weights,
          cpu::attention_weights_backward>::register_in(m);
}

}  // namespace attention_ext
