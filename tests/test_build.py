"""The build: what it decides on which machine, what it leaves behind, and what is refused at import."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mha_ext
from mha_ext import _extension, config

ROOT = Path(__file__).resolve().parent.parent


def load_file(path: Path) -> ModuleType:
    """A module by its file: the root is not put on sys.path, lest its mha_ext hide the installed one."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # setup.py and dataclasses look it up here
    spec.loader.exec_module(module)
    return module


backend = load_file(ROOT / "build_backend.py")
gate = load_file(ROOT / ".ci" / "ptxas_gate.py")


@pytest.fixture(scope="module")
def setup_script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield load_file(ROOT / "setup.py")


# --- a machine made of files ------------------------------------------------------------------------------------------


class Machine:
    """Folders that stand for a machine: programs on PATH, a site-packages folder, toolkits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.site = root / "site-packages"
        self.env = {"PATH": str(self.bin)}
        self.bin.mkdir(parents=True)
        self.site.mkdir()

    def program(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def torch(self, version: str, cuda: str | None = None, hip: str | None = None) -> None:
        package = self.site / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('the decision must not import torch')\n")
        (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n")

    def toolkit(self, home: Path, version: str = "13.0") -> Path:
        self.program(home / "bin" / "nvcc")
        include = home / "include"
        include.mkdir()
        (include / "cuda_runtime.h").touch()
        major, minor = version.split(".")
        (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n")
        return home

    def plan(self, **env: str) -> tuple[Any, list[str]]:
        refused: list[str] = []
        return backend.make_plan(self.env | env, [str(self.site)], refused), refused

    def requirements(self, **env: str) -> list[str]:
        return backend.requirements(self.env | env, [str(self.site)])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(backend, "USUAL_HOMES", (str(tmp_path / "usual-{cuda}"),))
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    machine = Machine(tmp_path / "machine")
    machine.program(machine.bin / "c++")
    return machine


# --- which torch ------------------------------------------------------------------------------------------------------


def test_torch_is_read_and_not_imported(machine: Machine) -> None:
    machine.torch("2.14.1+cu130", cuda="13.0")
    found = backend.find_torch(["/nowhere", str(machine.site)])
    assert (found.version, found.cuda, found.site_dir) == ("2.14.1+cu130", "13.0", machine.site)


def test_the_torch_of_this_environment_is_found_even_when_isolation_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if not hidden & {str(Path(torch.__file__).parent.parent)}:
        pytest.skip("this torch is not where the interpreter installs packages")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in hidden])
    assert backend.find_torch(backend.site_dirs()).version == torch.__version__


# --- which toolkit ----------------------------------------------------------------------------------------------------


def test_a_wrapper_named_nvcc_is_no_toolkit(machine: Machine, tmp_path: Path) -> None:
    machine.torch("2.14.1+cu130", cuda="13.0")
    machine.program(machine.bin / "nvcc")
    usual = machine.toolkit(tmp_path / "usual-13.0")
    plan, refused = machine.plan()
    assert (plan.kind, plan.toolkit.home, plan.toolkit.origin) == ("cuda", usual, "usual place")
    assert refused == [f"{machine.root} (nvcc on PATH): no bin/nvcc with include/cuda_runtime.h"]


def test_a_link_named_nvcc_leads_to_its_toolkit(machine: Machine, tmp_path: Path) -> None:
    machine.torch("2.14.1+cu130", cuda="13.0")
    home = machine.toolkit(tmp_path / "opt" / "cuda")
    (machine.bin / "nvcc").symlink_to(home / "bin" / "nvcc")
    plan, _ = machine.plan()
    assert (plan.toolkit.home, plan.toolkit.version, plan.toolkit.origin) == (home, "13.0", "nvcc on PATH")


def test_toolkits_are_tried_in_order(machine: Machine, tmp_path: Path) -> None:
    machine.torch("2.14.1+cu130", cuda="13.0")
    wheels = machine.toolkit(machine.site / "nvidia" / "cu13")
    assert machine.plan()[0].toolkit == backend.Toolkit(wheels, "13.0", "PyPI wheels")
    usual = machine.toolkit(tmp_path / "usual-13.0")
    assert machine.plan()[0].toolkit.home == usual
    asked = machine.toolkit(tmp_path / "mine", version="13.2")
    assert machine.plan(CUDA_HOME=str(asked))[0].toolkit == backend.Toolkit(asked, "13.2", "CUDA_HOME")


def test_a_toolkit_of_another_major_version_is_passed_over(machine: Machine, tmp_path: Path) -> None:
    machine.torch("2.14.1+cu130", cuda="13.0")
    old = machine.toolkit(tmp_path / "old", version="12.8")
    plan, refused = machine.plan(CUDA_HOME=str(old))
    assert plan.kind == "cpu"
    assert refused == [f"{old} (CUDA_HOME): CUDA 12.8, and torch has CUDA 13.0"]
    assert refused[0] in plan.reason


# --- what is built, and what pip is asked for -------------------------------------------------------------------------

CPU, CU13, CU12, ROCM = (
    {"version": "2.13.0+cpu"},
    {"version": "2.14.1+cu130", "cuda": "13.0"},
    {"version": "2.9.1+cu128", "cuda": "12.8"},
    {"version": "2.12.0+rocm7", "hip": "7.0"},
)
BROUGHT = ["ninja", "torch>=2.9", "cuda-toolkit[nvcc,cudart,cccl]"]
COMPILER = ["ninja", "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]


@pytest.mark.parametrize(
    ("torch_build", "has_nvcc", "wanted", "kind", "asked"),
    [
        (CPU, False, "", "cpu", ["ninja"]),
        (CPU, True, "", "cpu", ["ninja"]),
        (CPU, False, "cpu", "cpu", ["ninja"]),
        (CPU, False, "python", "python", []),
        (CPU, True, "cuda", "CPU build", ["ninja"]),
        (CU13, True, "", "cuda", ["ninja"]),
        (CU13, True, "cuda", "cuda", ["ninja"]),
        (CU13, True, "cpu", "cpu", ["ninja"]),
        (CU13, False, "", "cpu", COMPILER),  # "cpu" only where pip could not bring the compiler
        (CU13, False, "cuda", "no CUDA 13 toolkit", COMPILER),
        (CU12, False, "", "cpu", ["ninja"]),
        (CU12, False, "cuda", "no CUDA 12 toolkit", ["ninja"]),
        (ROCM, True, "", "cpu", ["ninja"]),
        (ROCM, True, "cuda", "ROCm build", ["ninja"]),
        (None, False, "", "python", BROUGHT),  # "python" only where pip could not bring torch
        (None, True, "", "python", BROUGHT),
        (None, False, "cpu", "torch is not installed", BROUGHT[:2]),
        (None, False, "cuda", "torch is not installed", BROUGHT),
        (None, False, "python", "python", []),
    ],
)  # fmt: skip
def test_plan_and_requirements(
    machine: Machine, tmp_path: Path, torch_build: Any, has_nvcc: bool, wanted: str, kind: str, asked: list[str]
) -> None:
    if torch_build:
        machine.torch(**torch_build)
    if has_nvcc:
        machine.toolkit(tmp_path / "usual-13.0")
    env = {"MHA_EXT_BUILD": wanted} if wanted else {}
    assert machine.requirements(**env) == asked
    if kind in ("cuda", "cpu", "python"):
        assert machine.plan(**env)[0].kind == kind
    else:  # what was forced cannot be had
        with pytest.raises(backend.BuildError, match=f"MHA_EXT_BUILD={wanted}, but .*{kind}"):
            machine.plan(**env)


def test_an_unknown_kind_is_refused(machine: Machine) -> None:
    with pytest.raises(backend.BuildError, match="must be cuda, cpu or python, not 'gpu'"):
        machine.plan(MHA_EXT_BUILD="gpu")


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_without_compiler_or_headers_it_is_pure_python(machine: Machine, tmp_path: Path, lacking: str) -> None:
    machine.torch("2.13.0+cpu")
    (machine.bin / "c++" if lacking == "compiler" else tmp_path / "include" / "Python.h").unlink()
    plan, _ = machine.plan()
    assert plan.kind == "python"
    assert ("no C++ compiler" if lacking == "compiler" else "no Python.h") in plan.reason
    assert machine.requirements() == []
    with pytest.raises(backend.BuildError, match="MHA_EXT_BUILD=cpu, but"):
        machine.plan(MHA_EXT_BUILD="cpu")


def test_cxx_names_the_compiler(machine: Machine) -> None:
    machine.torch("2.13.0+cpu")
    assert machine.plan(CXX="clang++ -stdlib=libc++")[0].kind == "python"
    machine.program(machine.bin / "clang++")
    assert machine.plan(CXX="clang++ -stdlib=libc++")[0].kind == "cpu"


def test_a_source_distribution_needs_nothing() -> None:
    assert backend.get_requires_for_build_sdist() == []


# --- what is compiled -------------------------------------------------------------------------------------------------


def test_architecture_names(setup_script: Any) -> None:
    assert setup_script.architecture_names(setup_script.DEFAULT_ARCHITECTURES) == ["sm_80", "compute_80", "sm_90a"]
    assert setup_script.architecture_names("9.0a") == ["sm_90a"]
    assert setup_script.architecture_names("8.6 12.0+PTX") == ["sm_86", "sm_120", "compute_120"]


class FakeGpus:
    """`torch` on a machine with these GPUs."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self.cuda = self
        self.is_available = lambda: bool(capabilities)
        self.device_count = lambda: len(capabilities)
        self.get_device_capability = lambda index: capabilities[index]


def test_architectures_are_those_of_the_visible_gpus(setup_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert setup_script.choose_architectures(FakeGpus()) == "8.0+PTX;9.0a"
    assert setup_script.choose_architectures(FakeGpus((9, 0), (8, 6), (9, 0))) == "8.6;9.0a"
    assert setup_script.choose_architectures(FakeGpus((7, 5), (8, 6))) == "8.6"  # older than any kernel
    assert setup_script.choose_architectures(FakeGpus((7, 5))) == "8.0+PTX;9.0a"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9")
    assert setup_script.choose_architectures(FakeGpus((9, 0))) == "8.9"


def test_every_source_is_compiled(setup_script: Any) -> None:
    sources = setup_script.sources("cuda")
    tree = {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*") if path.suffix in (".cpp", ".cu")}
    assert set(sources) == tree
    cpu = [source for source in setup_script.sources("cpu") if source != "csrc/bindings.cpp"]
    assert cpu
    assert all(source.startswith(("csrc/cpu/", "csrc/api/cpu/")) for source in cpu)


def test_the_runtime_library_of_the_wheels_is_named_by_its_file(setup_script: Any, tmp_path: Path) -> None:
    class Extension:
        def __init__(self) -> None:
            self.libraries, self.extra_link_args = ["c10", "cudart"], []

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart.so.13").touch()
    toolkit, extension = backend.Toolkit(tmp_path, "13.0", "PyPI wheels"), Extension()
    setup_script.link_runtime_by_file(extension, toolkit)
    assert (extension.libraries, extension.extra_link_args) == (["c10"], [str(tmp_path / "lib" / "libcudart.so.13")])
    (tmp_path / "lib" / "libcudart.so").touch()
    extension = Extension()
    setup_script.link_runtime_by_file(extension, toolkit)
    assert (extension.libraries, extension.extra_link_args) == (["c10", "cudart"], [])


# --- what is installed ------------------------------------------------------------------------------------------------

FACTS = {"kind": "cpu", "torch": "2.13.0+cpu", "python": "3.11.7", "reason": "torch 2.13.0+cpu is a CPU build"}


@pytest.mark.parametrize(
    ("facts", "torch_version", "python_version", "sentence"),
    [
        (FACTS, "2.13.0+cpu", "3.11.9", None),
        (FACTS, "2.13.0+cu130", "3.11.7", "was built for torch 2.13.0+cpu, but this is torch 2.13.0+cu130"),
        (FACTS, "2.14.1+cpu", "3.11.7", "was built for torch 2.13.0+cpu, but this is torch 2.14.1+cpu"),
        (FACTS, "2.13.0+cpu", "3.12.7", "was built for Python 3.11.7, but this is Python 3.12.7"),
    ],
)
def test_a_foreign_build_is_refused(facts: Any, torch_version: str, python_version: str, sentence: str | None) -> None:
    if sentence is None:
        _extension.check_build(facts, torch_version, python_version, "pip install -e .")
        return
    with pytest.raises(ImportError) as error:
        _extension.check_build(facts, torch_version, python_version, "pip install -e .")
    assert str(error.value) == f"mha_ext {sentence}. Build it again: pip install -e ."


def test_a_foreign_build_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    package = tmp_path / "mha_ext"
    shutil.copytree(_extension.PACKAGE_DIR, package, ignore=shutil.ignore_patterns("__pycache__", "_C*"))
    (package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"would not load")
    (package / "_build_info.json").write_text(json.dumps(FACTS | {"torch": "2.0.0"}))
    done = subprocess.run(
        [sys.executable, "-c", "import mha_ext"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ImportError: mha_ext was built for torch 2.0.0, but this is torch" in done.stderr
    assert "--force-reinstall --no-deps --no-cache-dir" in done.stderr


def test_the_command_that_builds_again(tmp_path: Path) -> None:
    assert _extension.rebuild_command(ROOT / "mha_ext") == f"pip install -e {ROOT}"
    assert _extension.rebuild_command(tmp_path / "mha_ext").startswith("pip install --force-reinstall")


def test_no_extension_has_a_reason() -> None:
    missing, why = _extension.load(None, "pip install -e .")
    assert missing is None
    assert why == "mha_ext is imported from a source tree in which nothing was built (pip install -e .)"
    assert _extension.load({"kind": "python", "reason": "there is no C++ compiler"}, "") == (
        None,
        "there is no C++ compiler",
    )


@pytest.mark.skipif(_extension.extension is None, reason=f"no extension: {_extension.why_missing}")
def test_the_extension_was_built_from_what_lies_beside_it() -> None:
    inside, beside = _extension.extension.build_info(), _extension.build_info
    assert inside["torch"] == beside["torch"] == torch.__version__
    assert inside["python"] == beside["python"]
    assert inside["compiler"] == beside["compiler"]
    assert inside["cuda"] == beside["cuda"]
    assert inside["architectures"].split() == beside["architectures"]


def test_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    mha_ext.show_config()
    printed = capsys.readouterr().out
    for name, value in {
        "mha_ext": mha_ext.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }.items():
        assert f"{name:<14} {value}\n" in printed
    for name, why_not in mha_ext.backends.available().items():
        assert f"  {name:<12} {'available' if why_not is None else f'not available: {why_not}'}\n" in printed


@pytest.mark.parametrize(
    ("facts", "loaded", "line"),
    [
        (None, False, "none: no reason known"),
        ({"kind": "python", "reason": "x"}, False, "none: no reason known"),
        (FACTS, True, "without CUDA kernels: torch 2.13.0+cpu is a CPU build"),
        ({"kind": "cuda", "reason": "", "architectures": ["sm_80", "sm_90a"]}, True, "with CUDA kernels"),
    ],
)
def test_show_config_says_what_was_built(monkeypatch: pytest.MonkeyPatch, facts: Any, loaded: bool, line: str) -> None:
    monkeypatch.setattr(config, "build_info", facts)
    monkeypatch.setattr(config, "extension", config if loaded else None)
    monkeypatch.setattr(config, "why_missing", "no reason known")
    lines = config.config_lines()
    assert f"extension      {line}" in lines
    assert f"architectures  {'sm_80, sm_90a' if line == 'with CUDA kernels' else 'none'}" in lines


# --- what is shipped --------------------------------------------------------------------------------------------------


def copy_sources(target: Path) -> Path:
    """The source tree without what builds and tests leave in it."""
    leftovers = shutil.ignore_patterns(
        ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".venv", "*.so"
    )
    shutil.copytree(ROOT, target, ignore=leftovers)
    (target / "mha_ext" / "_build_info.json").write_text("{}")  # a leftover that must not be shipped
    return target


def run_hook(tree: Path, hook: str, target: Path, **env: str) -> Path:
    """Call a hook of the backend as pip does, in this environment; the file it made."""
    code = f"import build_backend; print(build_backend.{hook}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("sdist")
    # MHA_EXT_BUILD=cuda must not matter: a source distribution compiles nothing
    return run_hook(copy_sources(tmp_path / "tree"), "build_sdist", tmp_path, MHA_EXT_BUILD="cuda")


def test_the_sdist_holds_every_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "tests", "benchmarks", "examples", "mha_ext"):
        tree = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        expected = {
            str(path.relative_to(ROOT))
            for path in tree
            if "__pycache__" not in path.parts and path.suffix != ".so" and path.name != "_build_info.json"
        }
        ignored = {name for name in expected if folder == "benchmarks" and name.startswith("benchmarks/results")}
        assert expected - ignored <= names
    assert {"setup.py", "build_backend.py", "pyproject.toml", "LICENSE", "csrc/.clang-format"} <= names
    assert "mha_ext/_build_info.json" not in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def unpack_sdist(sdist: Path, target: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return target / sdist.name.removesuffix(".tar.gz")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python", "cpu"])
def test_a_wheel_from_the_sdist_works(sdist: Path, tmp_path: Path, kind: str) -> None:
    if kind == "cpu" and (why_not := backend.missing_for_cxx(os.environ)):
        pytest.skip(why_not)
    tree = unpack_sdist(sdist, tmp_path)
    wheel = run_hook(tree, "build_wheel", tmp_path, MHA_EXT_BUILD=kind)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names} == {"mha_ext", f"mha_ext-{mha_ext.__version__}.dist-info"}
    assert {"mha_ext/_build_info.json", "mha_ext/py.typed"} <= set(names)
    assert any(name.startswith("mha_ext/_C") for name in names) == (kind == "cpu")
    done = subprocess.run(
        [sys.executable, "-c", "import mha_ext; mha_ext.show_config()"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = "without CUDA kernels: MHA_EXT_BUILD=cpu" if kind == "cpu" else "none: MHA_EXT_BUILD=python"
    assert expected in done.stdout


# --- the gate of CI ---------------------------------------------------------------------------------------------------

PTXAS_LOG = """
ptxas info    : Compiling entry function '_ZN7mha_ext13matmul_kernelI6__halfLi128EEEvNS_12MatmulParamsE' for 'sm_80'
ptxas info    : Function properties for _ZN7mha_ext13matmul_kernelI6__halfLi128EEEvNS_12MatmulParamsE
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 49152 bytes smem, 400 bytes cmem[0]
"""


def test_the_gate_reads_ptxas() -> None:
    kernels, warnings = gate.parse(PTXAS_LOG.format(stores=8, loads=12))
    assert [vars(kernel) for kernel in kernels] == [
        {"name": kernels[0].name, "arch": "sm_80", "registers": 128, "stack": 16, "spills": 20, "shared": 49152}
    ]
    assert warnings == []
    assert len(gate.parse("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async ...")[1]) == 1


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
@pytest.mark.parametrize(("stores", "status"), [(0, 0), (4, 1)])
def test_the_gate_shuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stores: int, status: int
) -> None:
    log = tmp_path / "build.log"
    files = "".join(f"nvcc {file.name}\n" for file in ROOT.glob("csrc/kernels/instances/*.cu"))
    log.write_text(files + PTXAS_LOG.format(stores=stores, loads=0))
    monkeypatch.setattr(sys, "argv", ["ptxas_gate.py", "--log", str(log), "--arch", "sm_80"])
    assert gate.main() == status
    printed = capsys.readouterr().out
    assert "matmul_kernel<__half, 128>\n" in printed
    assert ("spills 4 bytes on sm_80" in printed) == bool(stores)
