// Declares the entry points of the tier being compiled; tiers/table.cpp puts them into its
// CpuKernels.
#pragma once

#include "kernels/cpu/kernels.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

int64_t forward_items(const AttentionParams&);
int64_t forward_scratch(const AttentionParams&);
void forward(const AttentionParams&, void* partials, WorkQueue&, void* scratch);
void forward_join(const AttentionParams&, void* partials, WorkQueue&, void* scratch);

int64_t backward_items(const BackwardParams&);
int64_t backward_scratch(const BackwardParams&);
void backward(const BackwardParams&, BackwardState&, WorkQueue&, void* scratch);
int64_t bias_gradient_items(const BackwardParams&);
int64_t bias_gradient_scratch(const BackwardParams&);
void bias_gradient(const BackwardParams&, WorkQueue&, void* scratch);
void sink_gradient(const BackwardParams&, WorkQueue&);

int64_t weights_items(const WeightsParams&);
int64_t weights_scratch(const WeightsParams&);
void weights(const WeightsParams&, WorkQueue&, void* scratch);

double fma_loop(bool double_precision, int64_t repeats);

}  // namespace ATTENTION_EXT_TIER

#if defined(__AVX512BF16__)
// This tier has kernels of its own for bfloat16 and more rows than decoding has. For all else it
// calls avx512's, which are not compiled again.
namespace avx512 {
extern const CpuKernels kKernels;
}
namespace ATTENTION_EXT_TIER {
AE_INLINE bool has_kernels_for(const AttentionParams& p) {
  return p.type == ScalarType::kBFloat16 && !decoding(p);
}
double pair_loop(int64_t repeats);  // as fma_loop, of products of pairs
}  // namespace ATTENTION_EXT_TIER
#endif

}  // namespace attention_ext::kernels
