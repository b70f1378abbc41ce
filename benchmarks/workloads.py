"""What a case computes: attention under a mask, one step of decoding, a whole module, a call as short as it can be."""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext
from benchmarks import onnx_runtime
from benchmarks.cases import Case
from benchmarks.contenders import (
    Contender,
    Inputs,
    Outputs,
    Workload,
    ours_per_backend,
    reference_beside_kernels,
    sdpa_per_backend,
)
from benchmarks.judgement import Masking, all_finite, attention_error, relative_error
from benchmarks.parts import PARTS
from benchmarks.peak import load_loops

__all__ = ["workload_of"]


class Attention(Workload):
    """softmax(q k^T / sqrt(D)) v under the case's mask."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        super().__init__(case, device, seed)
        bias = keep = None
        if case.mask == "bias":
            bias = self.draw(1, case.preset.num_heads, case.length, case.length)
        elif case.mask == "bool":
            keep = torch.rand((case.length, case.length), generator=self.generator, device=device) < 0.9
            keep[:, 0] = True  # so that every query sees something
        self.masking = Masking(case, bias, keep)

    def inputs(self) -> Inputs:
        case, preset = self.case, self.case.preset
        query = (case.batch, preset.num_heads, case.queries, preset.head_dim)
        key = (case.batch, preset.num_kv_heads, case.length, preset.head_dim)
        return self.with_grads((self.draw(*query), self.draw(*key), self.draw(*key)), query)

    def attn_mask(self) -> Tensor | None:
        """What `scaled_dot_product_attention` takes for the mask; None where it has an argument, or there is none."""
        if self.case.mask in ("full", "causal"):
            return None
        if self.masking.bias is not None:
            return self.masking.bias
        hidden = self.masking.hidden(torch.arange(self.case.queries, device=self.device))
        assert hidden is not None
        return ~hidden if hidden.ndim == 2 else (~hidden).expand(self.case.batch, 1, 1, -1)

    def options(self) -> dict[str, Any]:
        """What both calls are given beside query, key and value, as far as there is something to give."""
        preset = self.case.preset
        given = {
            "is_causal": self.case.is_causal,
            "enable_gqa": preset.num_heads != preset.num_kv_heads,
            "attn_mask": self.attn_mask(),
        }
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def our_options(self) -> dict[str, Any]:
        """The same for ours, which needs no matrix for a window or for lengths."""
        options = self.options()
        if self.case.mask == "window":
            options["attn_mask"], options["window"] = None, (self.case.edge - 1, 0)
        elif self.case.mask == "lengths":
            lengths = torch.full((self.case.batch,), self.case.edge, dtype=torch.int32, device=self.device)
            options["attn_mask"], options["key_lengths"] = None, lengths
        return options

    def contenders(self) -> list[Contender]:
        sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
        ours = partial(mha_ext.attention, **self.our_options())
        made = ours_per_backend(self.device, ours)
        made += sdpa_per_backend(self.case, self.device, partial(sdpa, **self.options()))
        if self.device.type == "cpu":
            refusal = onnx_runtime.refusal(self.case, self.device)
            call = onnx_runtime.OnnxAttention(self.masking)
            made.append(Contender("onnxruntime", False, call, unavailable=refusal, own_threads=True))
        return made + reference_beside_kernels(self.case, self.device, ours)

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        return attention_error(self.masking, inputs.tensors, inputs.grads, outputs)


class Masked(Attention):
    """Attention under a mask, beside the same call without one: how much a mask costs."""

    def contenders(self) -> list[Contender]:
        plain = Attention(dataclasses.replace(self.case, mask="full"), self.device)
        ours = [contender for contender in plain.contenders() if contender.ours and not contender.unavailable]
        compared = [
            dataclasses.replace(contender, name=f"no mask, {contender.name}", ours=False, judge=plain.error)
            for contender in ours
        ]
        return [*super().contenders(), *compared]


class Decode(Attention):
    """One query per head against all keys, beside a loop that does nothing but read the same keys and values."""

    def contenders(self) -> list[Contender]:
        made = super().contenders()
        if self.device.type == "cpu":
            loops, why_not = load_loops()

            def read(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
                assert loops is not None
                return torch.tensor(loops.read(key)), torch.tensor(loops.read(value))

            made.append(Contender("read loop", False, read, unavailable=why_not or None, judge=self.read_error))
        return made

    @staticmethod
    def read_error(inputs: Inputs, outputs: Outputs) -> float:
        """0 where the sums of all words are right."""
        sums = [tensor.view(torch.int64).sum() for tensor in inputs.tensors[1:]]
        return 0.0 if torch.equal(torch.stack(outputs), torch.stack(sums)) else math.inf


class ShortCall(Attention):
    """A call with hardly anything to compute, as it is written in a program: no backend is asked for."""

    def contenders(self) -> list[Contender]:
        options = self.our_options()
        inputs = self.inputs()
        chosen = mha_ext.backends.explain(*inputs.tensors, **options).backend
        sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
        return [
            Contender(f"ours-{chosen}", True, partial(mha_ext.attention, **options) if options else mha_ext.attention),
            Contender("sdpa", False, partial(sdpa, **options) if options else sdpa),
        ]


class Module(Workload):
    """Self-attention with its four projections, without dropout: output and gradient of the input are judged."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        super().__init__(case, device, seed)
        preset = case.preset
        self.torch_module = nn.MultiheadAttention(
            preset.embed_dim, preset.num_heads, batch_first=True, device=device, dtype=case.dtype
        )
        self.our_module = mha_ext.MultiHeadAttention.from_torch(self.torch_module)
        for module in (self.torch_module, self.our_module):
            module.train(case.training)
        self.mask = None
        if case.is_causal:
            self.mask = nn.Transformer.generate_square_subsequent_mask(case.length, device, case.dtype)

    def inputs(self) -> Inputs:
        shape = (self.case.batch, self.case.length, self.case.preset.embed_dim)
        return self.with_grads((self.draw(*shape),), shape)

    def run(self, contender: Contender, inputs: Inputs) -> Outputs:
        """The output, then (training) the gradients of the input and of every parameter."""
        output = contender.forward(*inputs.tensors)
        assert isinstance(output, Tensor)
        if not self.case.training:
            return (output,)
        module = self.our_module if contender.ours or contender.name == "reference" else self.torch_module
        return (output, *torch.autograd.grad(output, (*inputs.tensors, *module.parameters()), inputs.grads))

    def contenders(self) -> list[Contender]:
        def ours(x: Tensor) -> Any:
            return self.our_module(x, is_causal=self.case.is_causal)

        def torch_forward(x: Tensor) -> Tensor:
            options = {"need_weights": False, "attn_mask": self.mask, "is_causal": self.case.is_causal}
            return self.torch_module(x, x, x, **options)[0]

        return [
            *ours_per_backend(self.device, ours),
            Contender("nn.MultiheadAttention", False, torch_forward),
            *reference_beside_kernels(self.case, self.device, ours),
        ]

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        exact = copy.deepcopy(self.torch_module).double()
        mask = None if self.mask is None else self.mask.double()
        errors = [0.0 if all_finite(outputs) else math.inf]
        for index in {0, self.case.batch - 1}:
            x = inputs.tensors[0][index : index + 1].detach().double().requires_grad_()
            with torch.enable_grad():
                expected = exact(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.case.is_causal)[0]
            errors.append(relative_error(outputs[0][index : index + 1], expected))
            if self.case.training:
                grad = inputs.grads[0][index : index + 1].double()
                (expected,) = torch.autograd.grad(expected, x, grad)
                errors.append(relative_error(outputs[1][index : index + 1], expected))
        return max(errors)


WORKLOADS: dict[str, type[Workload]] = {
    "attention": Attention,
    "mask": Masked,
    "decode": Decode,
    "call": ShortCall,
    "module": Module,
    **PARTS,
}


def workload_of(case: Case, device: torch.device, seed: int = 0) -> Workload:
    """The workload of a case's kind."""
    return WORKLOADS[case.kind](case, device, seed)
