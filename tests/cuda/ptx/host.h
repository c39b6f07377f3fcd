// How launches reach the interpreter: kernels/cuda/device.cuh calls this where the launching code
// is compiled with AE_CUDA_PTX. The kernel's own host function serves as its name only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptx_host {

// Runs the entry whose mangled name is that of `kernel`. Returns nullptr or what went wrong.
const char* launch(const void* kernel, unsigned blocks, int threads, int64_t shared_bytes,
                   const void* params, std::size_t params_size, int64_t first_block);

}  // namespace ptx_host
