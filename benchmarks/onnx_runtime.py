"""ONNX Runtime's attention operators as contenders: models of one node, in fp32, forward, on the CPU.

Its tensors have the heads inside, (B, L, H D). They are laid out, and bound to the node's inputs and outputs, before
anything is timed.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.judgement import Masking

__all__ = ["OnnxAttention", "refusal"]

OPSET = 17
IR_VERSION = 8


def refusal(case: Case, device: torch.device) -> str | None:
    """Why a case cannot be given to ONNX Runtime here; None if it can."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as problem:
        return f"{problem.name} is not installed (pip install onnx onnxruntime)"
    if device.type != "cpu" or case.dtype != torch.float32 or case.training:
        return "measured on CPU tensors in float32, forward"
    if case.preset.num_heads != case.preset.num_kv_heads and case.mask != "causal" and case.kind != "decode":
        return "its operator with grouped heads is always causal"
    return None


class OnnxAttention:
    """The node that means the same as a case: MultiHeadAttention, or GroupQueryAttention with a cache or a window.

    Called with query (B, H, Lq, D), key and value (B, Hkv, Lk, D), which must keep their values: they are copied once.
    """

    def __init__(self, masking: Masking) -> None:
        self.masking = masking
        self.bound: tuple[int, ...] = ()  # where the tensors lie whose copies are bound
        self.kept: dict[str, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, H, Lq, D), in the same memory at every call."""
        where = (query.data_ptr(), key.data_ptr(), value.data_ptr())
        if where != self.bound:
            self.bind(query, key, value)
            self.bound = where
        self.session.run_with_iobinding(self.binding)
        return self.output

    def bind(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Builds the model and binds copies of these tensors to it."""
        case = self.masking.case
        grouped = case.preset.num_heads != case.preset.num_kv_heads
        if case.kind == "decode" or grouped or case.mask == "window":
            name, inputs, more, options = self.with_cache(query, key, value)
        else:
            name, inputs, more, options = "MultiHeadAttention", self.plain(query, key, value), {}, {}
            options = {"unidirectional": int(case.is_causal)}
        options["num_heads"] = case.preset.num_heads
        output = torch.empty_like(heads_inside(query))
        outputs = {"output": output} | more
        self.kept = {name: tensor for name, tensor in inputs.items() if tensor is not None} | outputs
        self.session = session_of(name, inputs, outputs, options)
        self.binding = self.session.io_binding()
        for name, tensor in self.kept.items():
            bind = self.binding.bind_output if name in outputs else self.binding.bind_input
            bind(name, "cpu", 0, element_of(tensor)[1], list(tensor.shape), tensor.data_ptr())
        self.output = output.unflatten(2, (case.preset.num_heads, -1)).transpose(1, 2)

    def plain(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor | None]:
        """The inputs of MultiHeadAttention in their order, None where one is left out."""
        case = self.masking.case
        inputs: dict[str, Tensor | None] = {name: heads_inside(tensor) for name, tensor in zip(
            ("query", "key", "value"), (query, key, value), strict=True
        )}  # fmt: skip
        inputs["bias"] = inputs["key_padding_mask"] = inputs["attention_bias"] = None
        if case.mask in ("padding", "lengths"):
            seen = torch.arange(case.length) < case.edge
            inputs["key_padding_mask"] = seen.int().expand(case.batch, -1).contiguous()
        elif self.masking.bias is not None:
            inputs["attention_bias"] = self.masking.bias
        elif self.masking.keep is not None:
            zeros = torch.zeros(1, 1, case.length, case.length)
            inputs["attention_bias"] = zeros.masked_fill(~self.masking.keep, -torch.inf)
        return inputs

    def with_cache(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[str, dict[str, Tensor | None], dict[str, Tensor], dict[str, int]]:
        """Name, inputs, further outputs and options of GroupQueryAttention.

        A decoding step adds its key to a cache that is read and written in place.
        """
        case = self.masking.case
        past = case.length - case.queries
        keys, values = key.clone(), value.clone()
        nothing = key.new_empty(*key.shape[:2], 0, key.shape[3])
        inputs: dict[str, Tensor | None] = {
            "query": heads_inside(query),
            "key": heads_inside(key[:, :, past:]),
            "value": heads_inside(value[:, :, past:]),
            "past_key": keys if past else nothing,
            "past_value": values if past else nothing,
            "seqlens_k": torch.full((case.batch,), case.length - 1, dtype=torch.int32),
            "total_sequence_length": torch.tensor(case.length, dtype=torch.int32),
        }
        window = {"local_window_size": case.edge} if case.mask == "window" else {}
        options = {"kv_num_heads": case.preset.num_kv_heads} | window
        return "GroupQueryAttention", inputs, {"present_key": keys, "present_value": values}, options


def heads_inside(tensor: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H D), a copy."""
    return tensor.transpose(1, 2).flatten(2).contiguous()


def element_of(tensor: Tensor) -> tuple[int, Any]:
    """The element type by its number in ONNX and as numpy's."""
    import numpy as np
    import onnx

    return {
        torch.float32: (onnx.TensorProto.FLOAT, np.float32),
        torch.int32: (onnx.TensorProto.INT32, np.int32),
    }[tensor.dtype]


def session_of(name: str, inputs: dict[str, Tensor | None], outputs: dict[str, Tensor], options: dict[str, int]) -> Any:
    """A session for one node of this name, on as many threads as torch's, which go to sleep when there is no work."""
    import onnxruntime
    from onnx import helper

    def described(tensors: dict[str, Tensor | None] | dict[str, Tensor]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, element_of(tensor)[0], tensor.shape)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    names = [name if tensor is not None else "" for name, tensor in inputs.items()]
    node = helper.make_node(name, names, list(outputs), domain="com.microsoft", **options)  # type: ignore[arg-type]
    graph = helper.make_graph([node], name, described(inputs), described(outputs))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
