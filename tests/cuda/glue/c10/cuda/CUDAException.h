// Stands in for torch's header of this name.
#pragma once

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == 0, "the CUDA stand-in said no")
