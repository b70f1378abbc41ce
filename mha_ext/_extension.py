"""Loads the compiled extension `mha_ext._C`, and refuses one that was built for another torch or Python.

A foreign extension may fail in ways that name nothing (an undefined symbol, a crash), so the facts that the
build wrote beside it are compared before it is loaded.
"""

from __future__ import annotations

import importlib
import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE_DIR = Path(__file__).resolve().parent


def read_build_info(package_dir: Path = PACKAGE_DIR) -> dict[str, Any] | None:
    """What the build wrote about itself, or None where nothing was built."""
    file = package_dir / "_build_info.json"
    return json.loads(file.read_text()) if file.is_file() else None


def rebuild_command(package_dir: Path = PACKAGE_DIR) -> str:
    """The command that builds the extension for the torch and Python at hand."""
    root = package_dir.parent
    if (root / "setup.py").is_file():
        return f"pip install -e {root}"
    return "pip install --force-reinstall --no-deps --no-cache-dir PATH_OR_URL_OF_MHA_EXT"


def check_build(info: dict[str, Any], torch_version: str, python_version: str, command: str) -> None:
    """Raise ImportError unless an extension with these facts belongs to this torch and this Python."""
    if info["torch"] != torch_version:
        built, found = f"torch {info['torch']}", f"torch {torch_version}"
    elif info["python"].split(".")[:2] != python_version.split(".")[:2]:
        built, found = f"Python {info['python']}", f"Python {python_version}"
    else:
        return
    raise ImportError(f"mha_ext was built for {built}, but this is {found}. Build it again: {command}")


def load(info: dict[str, Any] | None, command: str) -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason."""
    if info is None:
        return None, f"mha_ext is imported from a source tree in which nothing was built ({command})"
    if info["kind"] == "python":
        return None, info["reason"]
    check_build(info, torch.__version__, platform.python_version(), command)
    return importlib.import_module("mha_ext._C"), ""


build_info = read_build_info()
extension, why_missing = load(build_info, rebuild_command())
