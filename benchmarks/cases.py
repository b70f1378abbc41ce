"""What is measured: the layers of published models, the cases made from them, and how much of it one run does."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["GROUPS", "MASKS", "PLANS", "PRESETS", "Case", "Plan", "Preset", "Sweep", "cases_of", "sizes_of"]


@dataclass(frozen=True)
class Preset:
    """The attention layer of a published model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool

    @property
    def embed_dim(self) -> int:
        """Width of the model: all query heads side by side."""
        return self.num_heads * self.head_dim


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("bert-base", 12, 12, 64, is_causal=False),
        Preset("bert-large", 16, 16, 64, is_causal=False),
        Preset("gpt2", 12, 12, 64, is_causal=True),
        Preset("gpt2-medium", 16, 16, 64, is_causal=True),
        Preset("llama-7b", 32, 32, 128, is_causal=True),
        Preset("llama-7b-quarter", 8, 8, 128, is_causal=True),  # of its heads
        Preset("llama-3-8b", 32, 8, 128, is_causal=True),
        Preset("llama-2-70b", 64, 8, 128, is_causal=True),
        Preset("tiny", 1, 1, 8, is_causal=False),  # of no model: what a call costs
    )
}

# Group on the command line -> kinds of case. Each group has its own tables.
GROUPS = {
    "attention": ("attention",),
    "masks": ("mask",),
    "decode": ("decode",),
    "module": ("module",),
    "call": ("call",),
    "parts": ("qkv_split", "attention_scores", "masked_softmax", "attention_output"),
}
MASKS = {
    "full": "every query sees every key",
    "causal": "key j <= query i",
    "padding": "the last quarter of the keys is hidden, by a bool mask (B, 1, 1, L)",
    "lengths": "the last quarter of the keys is hidden, by key_lengths (B,)",
    "window": "as many keys as half the length, the last of them the query's own",
    "bias": "a number per head, query and key is added, (1, H, L, L)",
    "bool": "a tenth of all (query, key) is hidden at random, by a bool mask (L, L)",
}


@dataclass(frozen=True)
class Case:
    """One thing to time: self-attention of `batch` sequences of `length` tokens, a part of it, or one decoding step."""

    kind: str  # a value of GROUPS
    preset: Preset
    batch: int
    length: int  # tokens; of a decoding step: keys
    dtype: torch.dtype
    mask: str  # of MASKS
    training: bool  # forward and backward, not the forward alone

    @property
    def queries(self) -> int:
        """Per sequence and head."""
        return 1 if self.kind == "decode" else self.length

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the causal one and no other."""
        return self.mask == "causal"

    @property
    def edge(self) -> int:
        """How many keys `padding` and `lengths` keep; how many a query sees at most through `window`."""
        return max(1, self.length // 2 if self.mask == "window" else self.length - self.length // 4)

    @property
    def visible(self) -> float:
        """Pairs of a query and a key that it sees, of one head of one sequence; a random mask can save no work."""
        if self.mask == "causal":
            return self.queries * self.length / 2  # the usual convention
        if self.mask in ("padding", "lengths"):
            return self.queries * self.edge
        if self.mask == "window":
            return self.length * self.edge - self.edge * (self.edge - 1) / 2
        return self.queries * self.length

    @property
    def label(self) -> str:
        """Preset, batch and length, mask: `gpt2 2x512 causal`."""
        what = "decode" if self.kind == "decode" else self.mask
        return f"{self.preset.name} {self.batch}x{self.length} {what}"

    @property
    def pass_name(self) -> str:
        """`forward` or `forward+backward`."""
        return "forward+backward" if self.training else "forward"

    @property
    def dtype_name(self) -> str:
        """`bfloat16`, without the `torch.`"""
        return str(self.dtype).removeprefix("torch.")


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORWARD, TRAINING, BOTH = (False,), (True,), (False, True)


@dataclass(frozen=True)
class Sweep:
    """Cases of one group: every preset at every size, in every dtype, mask and pass."""

    group: str
    presets: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]  # (batch, length)
    dtypes: tuple[torch.dtype, ...]
    passes: tuple[bool, ...] = BOTH
    masks: tuple[str, ...] = ()  # none: causal where the preset's model is, else full

    def cases(self) -> list[Case]:
        """All of them, the dtypes outermost."""
        made = []
        for dtype, kind, training in itertools.product(self.dtypes, GROUPS[self.group], self.passes):
            for name, (batch, length) in itertools.product(self.presets, self.sizes):
                preset = PRESETS[name]
                if kind == "module" and preset.num_heads != preset.num_kv_heads:
                    continue  # nn.MultiheadAttention has no grouped heads: nothing to compare with
                for mask in self.masks or ("causal" if preset.is_causal else "full",):
                    made.append(Case(kind, preset, batch, length, dtype, mask, training))
        return made


@dataclass(frozen=True)
class Plan:
    """How much one run measures."""

    sweeps: tuple[Sweep, ...]
    tokens: int  # batch = tokens / length, at least 1, for lengths that the command line names
    repeats: int  # samples per contender
    case_seconds: float  # fewer samples (three at least) where a case would take longer
    budget: float | None = None  # seconds after which no further case is started


def sizes_of(tokens: int, *lengths: int) -> tuple[tuple[int, int], ...]:
    """(batch, length) with about the same number of tokens each."""
    return tuple((max(1, tokens // length), length) for length in lengths)


MODELS = ("bert-base", "bert-large", "gpt2", "gpt2-medium", "llama-7b", "llama-2-70b")
BASE = ("bert-base", "gpt2")  # the same heads, full and causal
COMPARED_MASKS = ("padding", "lengths", "window", "bias", "bool")
DECODE = Sweep("decode", ("llama-7b", "llama-3-8b"), ((1, 4096),), (FP32, BF16), FORWARD, ("full",))
CALL = Sweep("call", ("tiny",), ((1, 4),), (FP32,), FORWARD)
SHORT_MODULE = Sweep("module", ("tiny",), ((1, 4),), (FP32,))
PARTS = Sweep("parts", ("gpt2",), ((1, 512),), (FP32,))
CPU = Plan(
    (
        Sweep("attention", BASE, ((8, 16), (8, 64), (2, 128), (2, 512), (1, 2048)), (FP32, BF16), FORWARD),
        Sweep("attention", ("llama-7b", "llama-3-8b"), ((1, 128), (1, 512)), (FP32, BF16), FORWARD),
        Sweep("attention", ("llama-7b-quarter",), ((1, 4096),), (FP32, BF16), FORWARD, ("full", "causal")),
        Sweep("attention", BASE, ((2, 128), (2, 512)), (FP16,)),
        Sweep("attention", BASE, ((8, 16), (2, 128), (2, 512), (1, 2048)), (FP32,), TRAINING),
        Sweep("attention", ("llama-7b", "llama-3-8b"), ((1, 512),), (FP32, BF16), TRAINING),
        Sweep("attention", BASE, ((2, 128), (2, 512)), (BF16,), TRAINING),
        Sweep("masks", ("bert-base",), ((2, 512), (1, 2048)), (FP32, BF16), FORWARD, COMPARED_MASKS),
        DECODE,
        Sweep("module", BASE, ((2, 128), (2, 512)), (FP32,)),
        SHORT_MODULE,
        CALL,
        PARTS,
    ),
    tokens=1024, repeats=9, case_seconds=1.5,
)  # fmt: skip
GPU = Plan(
    (
        Sweep("attention", MODELS, sizes_of(16384, 512, 2048), (BF16,)),
        Sweep("module", ("gpt2", "llama-7b"), sizes_of(16384, 512, 2048), (BF16,)),
        Sweep("parts", ("gpt2", "llama-7b"), sizes_of(16384, 2048), (BF16,)),
    ),
    tokens=16384, repeats=11, case_seconds=2.0, budget=120.0,
)  # fmt: skip
PLANS = {
    ("cpu", "quick"): Plan(
        (
            Sweep("attention", BASE, ((2, 128), (2, 512)), (FP32, BF16)),
            Sweep("masks", ("bert-base",), ((2, 512),), (FP32,), FORWARD, COMPARED_MASKS),
            DECODE,
            Sweep("module", BASE, ((2, 128),), (FP32,)),
            SHORT_MODULE,
            CALL,
            PARTS,
        ),
        tokens=1024, repeats=7, case_seconds=1.0, budget=90.0,
    ),
    ("cpu", "default"): CPU,
    ("cpu", "full"): dataclasses.replace(
        CPU,
        sweeps=(*CPU.sweeps, Sweep("attention", MODELS, sizes_of(1024, 128, 512, 2048), (FP32, BF16, FP16))),
        repeats=15, case_seconds=6.0,
    ),
    ("cuda", "quick"): GPU,
    ("cuda", "default"): GPU,
    ("cuda", "full"): Plan(
        (
            Sweep("attention", MODELS, sizes_of(16384, 512, 2048, 8192, 16384), (BF16, FP16, FP32)),
            Sweep("module", ("bert-base", "gpt2", "llama-7b"), sizes_of(16384, 512, 2048), (BF16, FP16, FP32)),
            Sweep("parts", ("gpt2", "llama-7b"), sizes_of(16384, 512, 2048), (BF16, FP16, FP32)),
        ),
        tokens=16384, repeats=21, case_seconds=5.0,
    ),
}  # fmt: skip


def cases_of(plan: Plan, groups: Iterable[str] = tuple(GROUPS), passes: Sequence[bool] = BOTH) -> list[Case]:
    """All cases of a plan, each once, one dtype after the other.

    The kinds and passes take turns, so that a run that is cut short has some of everything.
    """
    wanted = set(groups)
    found = dict.fromkeys(case for sweep in plan.sweeps if sweep.group in wanted for case in sweep.cases())
    tables: dict[torch.dtype, dict[tuple[str, bool], list[Case]]] = {}
    for case in (case for case in found if case.training in passes):
        tables.setdefault(case.dtype, {}).setdefault((case.kind, case.training), []).append(case)
    turns = (turn for of_dtype in tables.values() for turn in itertools.zip_longest(*of_dtype.values()))
    return [case for turn in turns for case in turn if case is not None]
