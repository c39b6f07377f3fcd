// Puts the CUDA glue in the place of the CPU's functions: in a process that loads this library
// after attention_ext, every call on CPU tensors takes csrc/cuda, which runs the emulated kernels.
#include "cuda/attention.h"
#include "ops/checked.h"

namespace attention_ext {

TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  Checked<cuda::attention, cuda::attention_backward, cuda::attention_weights,
          cuda::attention_weights_backward>::register_in(m);
}

}  // namespace attention_ext
