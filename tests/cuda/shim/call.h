// See call.cpp. Functions that fill return 0, or 1 for a name that does not exist.
#pragma once

#include <cstdint>

struct Call;

extern "C" {
Call* ae_call_new();
void ae_call_delete(Call*);
int ae_call_view(Call*, const char* name, void* data, const int64_t* strides,
                 const int64_t* batch_offsets, int type);
int ae_call_integer(Call*, const char* name, int64_t value);
int ae_call_real(Call*, const char* name, double value);
int ae_call_pointer(Call*, const char* name, void* data);
int64_t ae_call_workspace(const Call*, const char* pass);
const char* ae_call_run(Call*, const char* pass, void* workspace);
}
