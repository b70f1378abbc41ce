"""A simulated GPU: runs the PTX of the package's kernels on CPU tensors. See README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpusim.simulator import Simulator


def load() -> Simulator:
    """Build what is not built, and load it: from then on torch.ops.mha_ext.* run on CPU tensors, simulated."""
    from tests.gpusim.build import load_package

    return load_package()
