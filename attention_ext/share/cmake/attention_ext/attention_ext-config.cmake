# find_package(attention_ext REQUIRED) gives the target attention_ext::attention_ext: the operators, the
# functions of <attention_ext/attention.h> and the module of <attention_ext/nn.h>, with Torch.
#
# The same file serves a folder that csrc/CMakeLists.txt installed (lib/libattention_ext.so) and an
# installed Python package (_C.abi3.so); both can be moved.

get_filename_component(_attention_ext_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(_attention_ext_problem "")
if(EXISTS "${_attention_ext_prefix}/lib/libattention_ext.so")
  set(_attention_ext_library "${_attention_ext_prefix}/lib/libattention_ext.so")
  set(_attention_ext_info "${CMAKE_CURRENT_LIST_DIR}/built_for.txt")
else()
  set(_attention_ext_library "${_attention_ext_prefix}/_C.abi3.so")
  set(_attention_ext_info "${_attention_ext_prefix}/_build_info.py")
endif()

include(CMakeFindDependencyMacro)
find_dependency(Torch)

# Torch's C++ ABI ends with its minor version.
if(NOT EXISTS "${_attention_ext_library}" OR NOT EXISTS "${_attention_ext_info}")
  set(_attention_ext_problem "its compiled library is missing: ${_attention_ext_library}")
else()
  file(STRINGS "${_attention_ext_info}" _attention_ext_line REGEX "TORCH_VERSION")
  string(REGEX MATCH "[0-9]+\\.[0-9]+" _attention_ext_torch "${_attention_ext_line}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _attention_ext_found "${Torch_VERSION}")
  if(NOT _attention_ext_torch STREQUAL _attention_ext_found)
    set(_attention_ext_problem
        "it was built for Torch ${_attention_ext_torch}, and this is Torch ${Torch_VERSION}")
  endif()
endif()
if(_attention_ext_problem)
  set(attention_ext_FOUND FALSE)
  set(attention_ext_NOT_FOUND_MESSAGE "attention_ext cannot be used: ${_attention_ext_problem}")
  return()
endif()

if(NOT TARGET attention_ext::attention_ext)
  add_library(attention_ext::attention_ext INTERFACE IMPORTED)
  set_target_properties(
    attention_ext::attention_ext
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_attention_ext_prefix}/include"
               INTERFACE_COMPILE_FEATURES cxx_std_20)
  # --no-as-needed: a program that only loads a model or looks operators up by name calls no function of
  # ours, and the linker would leave the library out, and with it the operators.
  target_link_libraries(
    attention_ext::attention_ext
    INTERFACE ${TORCH_LIBRARIES} "-Wl,--push-state,--no-as-needed" "${_attention_ext_library}"
              "-Wl,--pop-state")
endif()
set(attention_ext_FOUND TRUE)
