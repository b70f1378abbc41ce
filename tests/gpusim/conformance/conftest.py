"""The machine that the forms run on: a GPU if there is one, else the simulator."""

from __future__ import annotations

import pytest

from tests.gpusim.conformance.gpu import assemble_all, find_gpu
from tests.gpusim.conformance.machine import Machine, SimulatedGpu


@pytest.fixture(scope="session")
def machine() -> Machine:
    found = find_gpu() or SimulatedGpu()
    assemble_all(found)
    return found
