// From Python to the kernels of the CPU without an operator between them.
#pragma once

#include <Python.h>

namespace mha_ext {

// Adds attention_direct to the module.
void bind_attention_direct(PyObject* module);

}  // namespace mha_ext
