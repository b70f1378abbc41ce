"""The fixture `backend`: every test that takes it runs once on the reference and once on the kernels.

A test module asks for it with ``pytest_plugins = ["backends_under_test"]``.
"""

from collections.abc import Iterator

import pytest
import torch
from cases import BackendUnderTest

import mha_ext

torch.set_num_threads(1)  # waking threads for tensors this small takes longer than the work, most of all on a busy CPU


@pytest.fixture(params=["reference", pytest.param("unfused", marks=pytest.mark.sim)])
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """A backend in force, and the device of its tensors; skipped where nothing can run the kernels."""
    if request.param == "reference":
        with mha_ext.backends.use_backend("reference"):
            yield BackendUnderTest("reference", "cpu")
    else:
        yield BackendUnderTest("unfused", request.getfixturevalue("kernels"))
