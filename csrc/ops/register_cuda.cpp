// The CUDA kernels as the dispatcher sees them: checks first, then csrc/cuda.
#include "cuda/attention.h"
#include "ops/checked.h"

namespace attention_ext {

TORCH_LIBRARY_IMPL(attention_ext, CUDA, m) {
  Checked<cuda::attention, cuda::attention_backward, cuda::attention_weights,
          cuda::attention_weights_backward>::register_in(m);
}

}  // namespace attention_ext
