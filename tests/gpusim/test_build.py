"""How the simulator is built: compilers, and what stays in the cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.gpusim import build

pytestmark = pytest.mark.sim


def touch(path: Path, days_ago: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    then = time.time() - days_ago * 86400
    os.utime(path, (then, then))


def test_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest libraries of each kind stay, and objects that were asked for lately."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = build.cache_dir()
    for i in range(build.KEPT_LIBRARIES + 3):
        touch(cache / f"package-{i}.so", i)
        touch(cache / f"simulator-{i}.so", i)
    for folder, ending in (("objects", "o"), ("ptx", "ptx")):
        touch(cache / folder / f"new.{ending}", build.KEPT_DAYS - 1)
        touch(cache / folder / f"old.{ending}", build.KEPT_DAYS + 1)
    build.prune("package")
    assert {path.name for path in cache.glob("package-*")} == {f"package-{i}.so" for i in range(build.KEPT_LIBRARIES)}
    assert len(list(cache.glob("simulator-*"))) == build.KEPT_LIBRARIES + 3
    assert sorted(path.name for path in cache.glob("*/*")) == ["new.o", "new.ptx"]


@pytest.mark.parametrize(
    ("says", "release", "flags", "refused"),
    [
        ("g++ (Debian 12.2.0) 12.2.0", 12, ["-fno-gnu-unique"], False),
        ("g++ (Debian 11.4.0) 11.4.0", 11, ["-fno-gnu-unique"], True),
        ("Debian clang version 14.0.6", 4, [], False),
    ],
)
def test_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, release: int, flags: list[str], refused: bool
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nif [ $1 = --version ]; then echo '{says}'; else echo {release}; fi\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.no_gnu_unique() == flags
    if refused:
        with pytest.raises(build.MissingError, match=r"is g\+\+ 11: install g\+\+ 12"):
            build.check_cxx()
    else:
        build.check_cxx()
