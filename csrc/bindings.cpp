// Where Python meets C++: what was built, and the schemas of the operators. It binds, and nothing else.
#include <Python.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <string>

#include "api/cpu/direct.h"
#include "cpu/attention.h"

namespace py = pybind11;

// The MHA_EXT_* strings come from setup.py.
PYBIND11_MODULE(_C, m) {
  m.doc() = "What mha_ext._C was built with; importing it registers the operators torch.ops.mha_ext.*";
  m.def("build_info", [] {
    py::dict info;
    info["torch"] = MHA_EXT_TORCH_VERSION;
    info["python"] = PY_VERSION;
    info["compiler"] = MHA_EXT_COMPILER;
    info["cuda"] = MHA_EXT_CUDA_VERSION;  // empty: no CUDA kernels
    info["architectures"] = MHA_EXT_ARCHITECTURES;
    return info;
  });
  m.def("cpu_targets", &mha_ext::cpu::targets, "Instruction sets whose kernels this CPU runs, fastest first");
  m.def("cpu_target", [] { return mha_ext::cpu::kernels().target; }, "The one in force");
  m.def("use_cpu_target", &mha_ext::cpu::use_target, "Compute by the named one from now on; empty: by the default");
  mha_ext::bind_attention_direct(m.ptr());
}

// What follows the names of the operators of fused attention. Positions may be symbols of a graph that is compiled for
// every length: `Lk - Lq` is one.
const char* const kAttentionForward =
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, Tensor? q_offsets,"
    " Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " SymInt q_offset, SymInt window_left, SymInt window_right, float softcap, float dropout_p, float scale,"
    " bool allow_tf32, bool for_backward, bool return_stats)"
    " -> (Tensor output, Tensor lse, Tensor row_stats, Tensor max_score, Tensor entropy)";
const char* const kAttentionBackward =
    "(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,"
    " Tensor row_stats, Tensor? attn_mask, Tensor? key_lengths, Tensor? q_offsets, Tensor? alibi_slopes, Tensor? sinks,"
    " Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " SymInt q_offset, SymInt window_left, SymInt window_right, float softcap, float dropout_p, float scale,"
    " bool allow_tf32, bool packed, bool mask_grad, bool slopes_grad, bool sinks_grad)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_slopes,"
    " Tensor grad_sinks)";

TORCH_LIBRARY(mha_ext, m) {
  m.def(
      "qkv_split(Tensor packed, Tensor? bias, int num_heads, int num_kv_heads)"
      " -> (Tensor query, Tensor key, Tensor value)");
  m.def(
      "qkv_merge(Tensor grad_query, Tensor grad_key, Tensor grad_value, bool bias_grad)"
      " -> (Tensor grad_packed, Tensor grad_bias)");
  m.def(
      "matmul(Tensor a, Tensor b, bool transpose_a, bool transpose_b, float alpha, int num_heads_out,"
      " ScalarType out_dtype, bool allow_tf32, Tensor? k_lengths) -> Tensor");
  m.def(
      "masked_softmax(Tensor scores, Tensor? attn_mask, Tensor? key_lengths, Tensor? q_offsets,"
      " Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state, SymInt q_offset, SymInt window_left,"
      " SymInt window_right, float softcap, float dropout_p, ScalarType out_dtype, bool return_stats)"
      " -> (Tensor weights, Tensor dropped, Tensor lse, Tensor max_score, Tensor entropy)");
  m.def(
      "masked_softmax_backward(Tensor? grad_weights, Tensor? grad_dropped, Tensor? grad_lse,"
      " Tensor weights, Tensor? scores, Tensor lse, Tensor? q_offsets, Tensor? sinks, Tensor? rng_state,"
      " SymInt q_offset, float softcap, float dropout_p, ScalarType grad_dtype, bool bias_grad,"
      " bool sink_grad, bool slope_grad)"
      " -> (Tensor grad_scores, Tensor grad_bias, Tensor grad_sink_rows, Tensor grad_slope_rows)");
  // Of tensors that a CUDA kernel reads, and of those in the CPU's memory.
  for (const std::string& suffix : {"", "_cpu"}) {
    m.def(("attention_forward" + suffix + kAttentionForward).c_str());
    m.def(("attention_backward" + suffix + kAttentionBackward).c_str());
  }
}
