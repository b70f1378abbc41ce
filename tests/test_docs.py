"""What the README and the pages of docs/ show runs as it is pasted, and points at what is there."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_python_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)
    assert isinstance(names["out"], torch.Tensor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        assert not path or (page.parent / path).exists(), target
        assert not heading or heading in headings, target
