"""What this installation consists of."""

from __future__ import annotations

import platform

import torch

from mha_ext._extension import build_info, extension, why_missing


def config_lines() -> list[str]:
    """The lines that `show_config` prints."""
    from mha_ext import __version__, backends

    if build_info is None or extension is None:
        built = f"none: {why_missing}"
    elif build_info["kind"] == "cuda":
        built = "with CUDA kernels"
    else:
        built = f"without CUDA kernels: {build_info['reason']}"
    facts, available = build_info or {}, backends.available()
    rows = {
        "mha_ext": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "extension": built,
        "compiler": facts.get("compiler") or "none",
        "CUDA": facts.get("cuda") or "none",
        "architectures": ", ".join(facts.get("architectures", [])) or "none",
        "CPU target": backends.cpu_target() if available["cpu"] is None else "none",
    }
    lines = [f"{name:<14} {value}" for name, value in rows.items()]
    lines.append("backends")
    for name, why_not in available.items():
        lines.append(f"  {name:<12} {'available' if why_not is None else f'not available: {why_not}'}")
    return lines


def show_config() -> None:
    """Print the versions, what the extension was built with, and each backend: available, or why not."""
    print("\n".join(config_lines()))
