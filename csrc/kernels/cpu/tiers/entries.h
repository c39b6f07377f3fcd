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
}  // namespace attention_ext::kernels
