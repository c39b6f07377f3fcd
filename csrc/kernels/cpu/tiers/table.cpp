// This tier's table of kernels. Compiled once per tier.
#include "kernels/cpu/tiers/entries.h"

#define AE_STRINGIFY(x) #x
#define AE_NAME(x) AE_STRINGIFY(x)

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

extern const CpuKernels kKernels;
const CpuKernels kKernels = {
    AE_NAME(ATTENTION_EXT_TIER),
    forward_items,
    forward_scratch,
    forward,
    forward_join,
    backward_items,
    backward_scratch,
    backward,
    bias_gradient_items,
    bias_gradient_scratch,
    bias_gradient,
    sink_gradient,
    weights_items,
    weights_scratch,
    weights,
    fma_loop,
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
