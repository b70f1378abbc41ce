// From Python to the kernels of the CPU without an operator between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include "params.h"

namespace mha_ext {

// Adds attention_direct to the module.
void bind_attention_direct(PyObject* module);

// Whether calls of operators on this thread go to kernels and nowhere else: nobody watches, traces, transforms or
// casts.
bool nobody_listens();

// Whether this is an ordinary tensor in the CPU's memory.
bool is_plain(const at::Tensor& tensor);

// A call that was found to be one for the kernels.
struct DirectCall {
  const at::Tensor &query, &key, &value;
  const at::Tensor *attn_mask = nullptr, *key_lengths = nullptr;  // null: none
  ScoreRuleParams rule = {};                                      // of these two as well
  double scale = 1;
};

AttentionParams direct_params(const DirectCall& call, const at::Tensor& output);

// compute_attention, in which other Python threads may run where that pays. Holds the GIL before and after.
void compute_from_python(const AttentionParams& params);

// The output, to which a backward is attached.
at::Tensor attention_with_gradient(const DirectCall& call);

}  // namespace mha_ext
