// The passes of launch.h for callers without C++: a call is filled field by field, by name, then
// run. Used through ctypes by tests/cuda/emulation.py, and by replay.cpp.
#include "call.h"

#include <cstring>
#include <map>
#include <string>

#include "kernels/cuda/launch.h"

using namespace attention_ext::kernels;

struct Call {
  BackwardParams p;
  View weights;
  bool average = false;
  cuda::DeviceLimits device;
  std::string error;

  View* view(const std::string& name) {
    const std::map<std::string, View*> views = {
        {"query", &p.query},
        {"key", &p.key},
        {"value", &p.value},
        {"attn_mask", &p.attn_mask},
        {"attn_bias", &p.attn_bias},
        {"key_mask", &p.key_mask},
        {"output", &p.output},
        {"output_residual", &p.output_residual},
        {"logsumexp", &p.logsumexp},
        {"residual", &p.residual},
        {"grad_output", &p.grad_output},
        {"grad_logsumexp", &p.grad_logsumexp},
        {"grad_weights", &p.grad_weights},
        {"delta", &p.delta},
        {"grad_query", &p.grad_query},
        {"grad_key", &p.grad_key},
        {"grad_value", &p.grad_value},
        {"grad_bias", &p.grad_bias},
        {"weights", &weights},
    };
    const auto found = views.find(name);
    return found == views.end() ? nullptr : found->second;
  }
  int64_t* integer(const std::string& name) {
    const std::map<std::string, int64_t*> integers = {
        {"problems", &p.problems},
        {"heads", &p.heads},
        {"kv_heads", &p.kv_heads},
        {"q_length", &p.q_length},
        {"k_length", &p.k_length},
        {"qk_size", &p.qk_size},
        {"v_size", &p.v_size},
        {"query_offset", &p.query_offset},
        {"window_left", &p.window_left},
        {"window_right", &p.window_right},
        {"alibi_stride_0", &p.alibi_stride[0]},
        {"alibi_stride_1", &p.alibi_stride[1]},
        {"bias_size_0", &p.bias_size[0]},
        {"bias_size_1", &p.bias_size[1]},
        {"bias_size_2", &p.bias_size[2]},
        {"bias_size_3", &p.bias_size[3]},
        {"grid_blocks", &device.grid_blocks},
        {"shared_memory", &device.shared_memory},
    };
    const auto found = integers.find(name);
    return found == integers.end() ? nullptr : found->second;
  }
};

Call* ae_call_new() {
  Call* const call = new Call;
  call->device.shared_memory = 227 * 1024;
  return call;
}
void ae_call_delete(Call* call) { delete call; }

int ae_call_view(Call* call, const char* name, void* data, const int64_t* strides,
                 const int64_t* batch_offsets, int type) {
  View* const view = call->view(name);
  if (view == nullptr) return 1;
  view->data = static_cast<char*>(data);
  std::memcpy(view->stride, strides, sizeof view->stride);
  view->batch_offsets = batch_offsets;
  view->type = static_cast<ScalarType>(type);
  return 0;
}

int ae_call_integer(Call* call, const char* name, int64_t value) {
  const std::string n = name;
  if (n == "type") {
    call->p.type = static_cast<ScalarType>(value);
  } else if (n == "key_mask_is_bool") {
    call->p.key_mask_is_bool = value != 0;
  } else if (n == "major") {
    call->device.major = static_cast<int>(value);
  } else if (n == "average") {
    call->average = value != 0;
  } else if (n == "major") {
    call->device.major = static_cast<int>(value);
  } else if (n == "dropout_threshold") {
    call->p.dropout.threshold = static_cast<uint32_t>(value);
  } else if (int64_t* const to = call->integer(n)) {
    *to = value;
  } else {
    return 1;
  }
  return 0;
}

int ae_call_real(Call* call, const char* name, double value) {
  const std::map<std::string, double*> reals = {
      {"scale", &call->p.scale},
      {"softcap", &call->p.softcap},
      {"dropout_rescale", &call->p.dropout.rescale},
      {"grad_weights_scale", &call->p.grad_weights_scale},
  };
  const auto found = reals.find(name);
  if (found == reals.end()) return 1;
  *found->second = value;
  return 0;
}

int ae_call_pointer(Call* call, const char* name, void* data) {
  const std::string n = name;
  BackwardParams& p = call->p;
  if (n == "sinks") {
    p.sinks = data;
  } else if (n == "alibi_slopes") {
    p.alibi_slopes = data;
  } else if (n == "grad_sinks") {
    p.grad_sinks = data;
  } else if (n == "query_offsets") {
    p.query_offsets = static_cast<const int64_t*>(data);
  } else if (n == "cu_seqlens_q") {
    p.cu_seqlens_q = static_cast<const int64_t*>(data);
  } else if (n == "cu_seqlens_k") {
    p.cu_seqlens_k = static_cast<const int64_t*>(data);
  } else if (n == "rng_state") {
    p.dropout.state = static_cast<const int64_t*>(data);
  } else if (n == "visited") {
    p.visited = static_cast<std::atomic<int64_t>*>(data);
  } else {
    return 1;
  }
  return 0;
}

int64_t ae_call_workspace(const Call* call, const char* pass) {
  const std::string n = pass;
  if (n == "forward") return cuda::forward_workspace(call->p, call->device);
  if (n == "bias") return cuda::bias_gradient_workspace(call->p, call->device);
  return 0;
}

const char* ae_call_run(Call* call, const char* pass, void* workspace) {
  const std::string n = pass;
  const BackwardParams& p = call->p;
  if (n == "forward") return cuda::forward(p, workspace, call->device, nullptr);
  if (n == "delta") return cuda::backward_delta(p, call->device, nullptr);
  if (n == "keys") return cuda::backward_keys(p, call->device, nullptr);
  if (n == "queries") return cuda::backward_queries(p, call->device, nullptr);
  if (n == "bias") return cuda::bias_gradient(p, workspace, call->device, nullptr);
  if (n == "sinks") return cuda::sink_gradient(p, call->device, nullptr);
  if (n == "weights") {
    WeightsParams w;
    static_cast<AttentionParams&>(w) = p;
    w.weights = call->weights;
    w.average = call->average;
    return cuda::weights(w, call->device, nullptr);
  }
  return "no pass of this name";
}
