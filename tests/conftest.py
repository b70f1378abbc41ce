"""Where the kernels run: on a real GPU if there is one, else on the simulated GPU, on CPU tensors."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BackendUnderTest, Count
from hypothesis import HealthCheck, settings

import mha_ext
from mha_ext._extension import extension

CPU_TARGETS: list[str] = extension.cpu_targets() if extension else []

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests.gpusim and benchmarks; mha_ext is the installed one

settings.register_profile(
    "mha_ext", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("mha_ext")

torch.set_num_threads(1)  # waking threads for tensors this small takes longer than the work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        fixtures = set(getattr(item, "fixturenames", ()))
        backends = {value for name, value in parameters.items() if name.endswith("backend")}
        if fixtures & {"kernels", "fused"} or backends & {"fused", "unfused"}:
            item.add_marker(pytest.mark.sim)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _kernel_device() -> str:
    if mha_ext.backends.available()["unfused"] is None:
        return "cuda"
    if os.environ.get("MHA_EXT_TEST_GPU"):
        pytest.fail(f"a GPU was asked for: {mha_ext.backends.available()['unfused']}")
    from tests.gpusim.build import MissingError, load_package

    try:
        load_package()
    except MissingError as error:
        pytest.skip(f"no GPU, and no simulated one: {error}")
    return "cpu"


@pytest.fixture
def kernels(_kernel_device: str) -> Iterator[str]:
    """The device type whose tensors torch.ops.mha_ext takes, with the backend set to those kernels."""
    with mha_ext.backends.use_backend("unfused"):
        yield _kernel_device


@pytest.fixture
def fused(_kernel_device: str) -> Iterator[str]:
    """The same with the fused kernels in force, which take neither fp64 nor calls that return weights."""
    with mha_ext.backends.use_backend("fused"):
        yield _kernel_device


@pytest.fixture(params=CPU_TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU's kernels in force, for each instruction set that this machine runs."""
    with _on_cpu(request.param):
        yield request.param


@contextmanager
def _on_cpu(target: str) -> Iterator[None]:
    assert extension is not None
    extension.use_cpu_target(target)
    with mha_ext.backends.use_backend("cpu"):
        yield
    extension.use_cpu_target("")


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.sim), *CPU_TARGETS[:1]])
def fused_anywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `fused`, and then the same of the CPU's kernels, of the fastest instruction set that this machine runs."""
    if request.param == "gpu":
        yield request.getfixturevalue("fused")
        return
    with _on_cpu(request.param):
        yield "cpu"


@pytest.fixture
def simulator(_kernel_device: str) -> Any:
    """The simulated GPU where the kernels run on it, None on a real one."""
    if _kernel_device != "cpu":
        return None
    from tests.gpusim import load

    return load()


@pytest.fixture
def count(simulator: Any) -> Count:
    """Runs a call and returns what each of its kernels did, in order."""
    if simulator is None:
        pytest.skip("the simulated GPU counts, a real one does not")

    def run(call: Callable[[], Any]) -> list[Any]:
        simulator.take_records()
        call()
        return list(simulator.take_records())

    return run


def _in_force(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    name = request.param
    if name == "cpu" and extension is None:
        pytest.skip("no extension, and so no kernels for the CPU")
    if name in ("cpu", "reference"):
        with mha_ext.backends.use_backend(name):
            yield BackendUnderTest(name, "cpu")
    else:
        yield BackendUnderTest(name, request.getfixturevalue("kernels" if name == "unfused" else name))


@pytest.fixture(params=["reference", "unfused"])
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Every test that takes it runs once on the reference and once on the kernels: the backend in force.

    Of the kernels those that take every call: fp64 and returned weights as well.
    """
    yield from _in_force(request)


@pytest.fixture(params=["reference", "cpu", "unfused", "fused"])
def any_backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Every backend, for calls that each of them takes."""
    yield from _in_force(request)


@pytest.fixture(params=["reference", "cpu", "fused"])
def packing_backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Every backend that takes packed sequences."""
    yield from _in_force(request)


@pytest.fixture
def device(backend: BackendUnderTest) -> str:
    """Where the tensors of the backend in force live."""
    return backend.device


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
