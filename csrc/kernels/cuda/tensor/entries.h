// The tensor-core kernels of one 16-bit type, as launch.cpp calls them: each function plans its
// grid and enqueues it. One file of instances/ per pass and type defines them.
#pragma once

#include "kernels/cuda/launch.h"

namespace attention_ext::kernels::cuda::tensor {

template <ScalarType kType>
struct TensorCore {
  static const char* forward(const AttentionParams&, const DeviceLimits&, void* stream);
  // The keys shared out among blocks (plan.h's SplitPlan), with the workspace it names.
  static const char* split_forward(const AttentionParams&, void* workspace, const DeviceLimits&,
                                   void* stream);
  static const char* keys(const BackwardParams&, const DeviceLimits&, void* stream);
  static const char* queries(const BackwardParams&, const DeviceLimits&, void* stream);
};

}  // namespace attention_ext::kernels::cuda::tensor
