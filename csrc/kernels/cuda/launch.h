// The seam between the CUDA kernels and whoever has tensors: one function per pass, which takes the
// params struct with device pointers inside, enqueues kernels on a stream and returns at once. It
// includes nothing of CUDA, so that glue and host tests compile with any compiler.
//
// Every function returns nullptr, or a sentence that says what went wrong (string literals and the
// CUDA runtime's own texts: never to be freed). Nothing here allocates, synchronises or reads
// device memory, so that calls can be captured in a CUDA graph. The caller has set the device.
//
// What differs from the CPU's use of params.h:
//   - packed sequences: q_length and k_length are the totals (the longest sequence is not known on
//     the host), and q_block_starts is unused. cu_seqlens that fall, or do not end at the totals,
//     are noticed on the device: every result of the call is then NaN, and no access is out of
//     bounds;
//   - dropout.state points at the six words of rng_state on the device, which the kernels read;
//   - visited, if given, is a counter in device memory (or mapped memory), added to with one
//     integer atomic a block;
//   - batch_offsets, cu_seqlens, query_offsets, sinks and slopes are device pointers like the rest.
#pragma once

#include "kernels/params.h"

namespace attention_ext::kernels::cuda {

// What the kernels must know of a device. Filled from cudaDeviceGetAttribute by the glue, by hand
// in tests.
struct DeviceLimits {
  int major = 8, minor = 0;               // compute capability
  int64_t shared_memory = 99 * 1024;      // cudaDevAttrMaxSharedMemoryPerBlockOptin, bytes
  int64_t multiprocessors = 1;            // cudaDevAttrMultiProcessorCount
  int64_t grid_blocks = (1ll << 31) - 1;  // cudaDevAttrMaxGridDimX; larger grids run in pieces
};

// Which kernels take a call: SIMT ones take every call, tensor-core ones those that choose.h names.
enum class Path : int32_t { kSimt, kTensorCore };

// ---- Attention -----------------------------------------------------------------------------

// Bytes of workspace for forward(), 0 if none is needed; partial results of split keys.
int64_t forward_workspace(const AttentionParams& p, const DeviceLimits& device);
// Writes output, logsumexp, residual and, where given, output_residual.
const char* forward(const AttentionParams& p, void* workspace, const DeviceLimits& device,
                    void* stream);

// ---- Gradients: the passes run in this order on one stream -------------------------------------
// Those of weights are the same, with grad_weights in place of grad_output and value.

// delta = rowsum(grad_output * (output + output_residual)) - grad_logsumexp, or
// rowsum(grad_weights * weights).
const char* backward_delta(const BackwardParams& p, const DeviceLimits& device, void* stream);
// grad_key, grad_value: those that are given. Deterministic, like all of them.
const char* backward_keys(const BackwardParams& p, const DeviceLimits& device, void* stream);
// grad_query, and grad_bias if bias_with_queries(): those that are given.
const char* backward_queries(const BackwardParams& p, const DeviceLimits& device, void* stream);
// True if every element of the bias belongs to one (batch, head, row, key), so that
// backward_queries() writes its gradient on the way and bias_gradient() has nothing to do.
bool bias_with_queries(const BackwardParams& p);
// Bytes of workspace for bias_gradient().
int64_t bias_gradient_workspace(const BackwardParams& p, const DeviceLimits& device);
// grad_bias, summed over the dimensions that the bias broadcasts over, in a fixed order.
const char* bias_gradient(const BackwardParams& p, void* workspace, const DeviceLimits& device,
                          void* stream);
// grad_sinks.
const char* sink_gradient(const BackwardParams& p, const DeviceLimits& device, void* stream);

// ---- Weights -------------------------------------------------------------------------------

const char* weights(const WeightsParams& p, const DeviceLimits& device, void* stream);

// ---- For tests and for `python -m attention_ext` ------------------------------------------------

// Dynamic shared memory, in bytes, that one block of the SIMT kernels asks for.
int64_t simt_shared_memory(ScalarType type);
Path forward_path(const AttentionParams& p, const DeviceLimits& device);
Path backward_path(const BackwardParams& p, const DeviceLimits& device);

}  // namespace attention_ext::kernels::cuda
