// Chooses the kernels of a call by its type. No CUDA here: the files in */instances launch.
#include "kernels/cuda/launch.h"

#include "kernels/cuda/choose.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/simt/entries.h"
#include "kernels/cuda/tensor/entries.h"

namespace attention_ext::kernels::cuda {

namespace {

using simt_kernels::BFloat16;
using simt_kernels::Float16;
using simt_kernels::Simt;
using tensor::TensorCore;

// f<T>() for the element type of a call.
template <class F>
const char* for_type(ScalarType type, F&& f) {
  switch (type) {
    case ScalarType::kFloat64:
      return f.template operator()<double>();
    case ScalarType::kFloat32:
      return f.template operator()<float>();
    case ScalarType::kBFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::kFloat16:
      return f.template operator()<Float16>();
    default:
      return "attention has no kernels for this element type";
  }
}

// f<type>() for the types that tensor cores take.
template <class F>
const char* for_half(ScalarType type, F&& f) {
  return type == ScalarType::kFloat16 ? f.template operator()<ScalarType::kFloat16>()
                                      : f.template operator()<ScalarType::kBFloat16>();
}

int64_t accumulation_bytes(ScalarType type) { return type == ScalarType::kFloat64 ? 8 : 4; }

}  // namespace

int64_t simt_shared_memory(ScalarType type) {
  return simt_kernels::shared_bytes(accumulation_bytes(type));
}

Path forward_path(const AttentionParams& p, const DeviceLimits& device) {
  return tensor_cores_take(p, device) ? Path::kTensorCore : Path::kSimt;
}
Path backward_path(const BackwardParams& p, const DeviceLimits& device) {
  return tensor_cores_take(p, device) ? Path::kTensorCore : Path::kSimt;
}

int64_t forward_workspace(const AttentionParams& p, const DeviceLimits& device) {
  return forward_path(p, device) == Path::kTensorCore ? SplitPlan(p).workspace(p) : 0;
}

const char* forward(const AttentionParams& p, void* workspace, const DeviceLimits& device,
                    void* stream) {
  if (forward_path(p, device) == Path::kTensorCore) {
    const bool splits = SplitPlan(p).splits > 1;
    return for_half(p.type, [&]<ScalarType kType>() {
      return splits ? TensorCore<kType>::split_forward(p, workspace, device, stream)
                    : TensorCore<kType>::forward(p, device, stream);
    });
  }
  return for_type(p.type, [&]<class T>() { return Simt<T>::forward(p, device, stream); });
}

const char* backward_delta(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  if (p.grad_weights.defined()) {
    BackwardParams pass = p;
    pass.new_delta = p.delta;
    pass.delta = pass.grad_query = pass.grad_bias = View{};
    return backward_queries(pass, device, stream);
  }
  return for_type(p.type, [&]<class T>() { return Simt<T>::delta(p, device, stream); });
}

const char* backward_keys(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  if (!p.grad_key.defined() && !p.grad_value.defined()) return nullptr;
  if (backward_path(p, device) == Path::kTensorCore) {
    return for_half(p.type,
                    [&]<ScalarType kType>() { return TensorCore<kType>::keys(p, device, stream); });
  }
  return for_type(p.type, [&]<class T>() { return Simt<T>::keys(p, device, stream); });
}

const char* backward_queries(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  if (!p.grad_query.defined() && !p.new_delta.defined() && !bias_with_queries(p)) {
    return nullptr;
  }
  if (backward_path(p, device) == Path::kTensorCore) {
    return for_half(
        p.type, [&]<ScalarType kType>() { return TensorCore<kType>::queries(p, device, stream); });
  }
  return for_type(p.type, [&]<class T>() { return Simt<T>::queries(p, device, stream); });
}

bool bias_with_queries(const BackwardParams& p) { return p.grad_bias.defined() && bias_is_full(p); }

int64_t bias_gradient_workspace(const BackwardParams& p, const DeviceLimits&) {
  if (!p.grad_bias.defined() || bias_with_queries(p)) return 0;
  const BiasPlan plan(p, kSimtTile);
  return plan.splits == 1
             ? 0
             : plan.splits * plan.owned * kSimtTile * kSimtTile * accumulation_bytes(p.type);
}

const char* bias_gradient(const BackwardParams& p, void* workspace, const DeviceLimits& device,
                          void* stream) {
  if (!p.grad_bias.defined() || bias_with_queries(p)) return nullptr;
  return for_type(p.type, [&]<class T>() { return Simt<T>::bias(p, workspace, device, stream); });
}

const char* sink_gradient(const BackwardParams& p, const DeviceLimits& device, void* stream) {
  if (p.grad_sinks == nullptr) return nullptr;
  return for_type(p.type, [&]<class T>() { return Simt<T>::sinks(p, device, stream); });
}

const char* weights(const WeightsParams& p, const DeviceLimits& device, void* stream) {
  return for_type(p.type, [&]<class T>() { return Simt<T>::weights(p, device, stream); });
}

}  // namespace attention_ext::kernels::cuda
