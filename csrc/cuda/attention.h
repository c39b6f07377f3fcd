// CUDA's half of the op family: prepare the call (common/prepare.h), enqueue the kernels of
// kernels/cuda/launch.h on the current stream. The arguments have been checked and the options
// normalised (common/checks.h) before any of these is called, with no device needed for that.
//
// Nothing here waits for the device, reads its memory or copies to it from the host's; memory comes
// from torch's caching allocator. So every call can be captured in a CUDA graph, and returns before
// its work is done.
#pragma once

#include "ops/signature.h"

namespace attention_ext::cuda {

// The ops' own functions (ops/attention.h), their arguments in the schema's order.
AttentionOp::Packed attention;
AttentionBackwardOp::Packed attention_backward;
AttentionWeightsOp::Packed attention_weights;
AttentionWeightsBackwardOp::Packed attention_weights_backward;

}  // namespace attention_ext::cuda
