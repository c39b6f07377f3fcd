// Makes the op library importable as the Python module attention_ext._C, with nothing in it:
// loading the file is what registers the ops. Limited API, so one file serves every CPython
// >= 3.10. The one Python symbol is weak, so that a C++ program without Python can dlopen the same
// file.

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#pragma weak PyModule_Create2

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module_def = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module_def);
}
