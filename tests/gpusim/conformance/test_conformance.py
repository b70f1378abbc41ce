"""Every form of an instruction gives what the NumPy description says: on the simulator here, unchanged on a GPU."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.gpusim.conformance import families
from tests.gpusim.conformance.forms import FORMS
from tests.gpusim.conformance.gpu import assemble
from tests.gpusim.conformance.machine import Machine, kernel_files

for _module in pkgutil.iter_modules(families.__path__):
    importlib.import_module(f"{families.__name__}.{_module.name}")

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", FORMS)
def test_form(machine: Machine, name: str) -> None:
    form = FORMS[name]
    if machine.architecture(form.family) is None:
        pytest.skip(f"{form.family} does not run on this GPU")
    form.check(machine)


@pytest.mark.parametrize("family", kernel_files())
def test_assembled(machine: Machine, family: str) -> None:
    """The assembler of the toolkit, which knows every rule of PTX, takes it."""
    arch = machine.architecture(family)
    if arch is None:
        pytest.skip(f"{family} does not run on this GPU")
    assert assemble(family, arch)
