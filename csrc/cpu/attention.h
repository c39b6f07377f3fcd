// The CPU's half of the op family: prepare the call (common/prepare.h), hand ranges of work to the
// kernels. The arguments have been checked and the options normalised (common/checks.h) before any
// of these is called.
#pragma once

#include "ops/signature.h"

namespace attention_ext::cpu {

// The ops' own functions (ops/attention.h), their arguments in the schema's order.
AttentionOp::Packed attention;
AttentionBackwardOp::Packed attention_backward;
AttentionWeightsOp::Packed attention_weights;
AttentionWeightsBackwardOp::Packed attention_weights_backward;

}  // namespace attention_ext::cpu
