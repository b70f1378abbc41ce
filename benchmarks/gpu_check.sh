#!/usr/bin/env bash
# Builds, tests and measures mha_ext on the GPU of this machine, within ten minutes on 16 cores.
#
#   bash benchmarks/gpu_check.sh              results in ./gpu_check_out
#   OUT=DIR PYTHON=python3.12 TOTAL_SECONDS=900 bash benchmarks/gpu_check.sh
#
# Needs torch with CUDA, its nvcc, a C++ compiler and a GPU; no network. Every part has its own time limit, and a part
# that fails does not stop the next. In $OUT: summary.txt, build.log, tests.log, tests.xml, benchmark.log, results.json,
# report.md, attention.png. Exit code 0 when every part that ran passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

PYTHON=${PYTHON:-python3}
TOTAL_SECONDS=${TOTAL_SECONDS:-570}
BENCHMARK_SECONDS=150 # kept free for the benchmark while the tests run
if [[ -z ${OUT:-} ]]; then
  OUT=$PWD/gpu_check_out
  mkdir -p "$OUT"
  echo '*' >"$OUT/.gitignore"
fi
mkdir -p "$OUT"
SUMMARY=$OUT/summary.txt
: >"$SUMMARY"
failed=0

note() { echo "$*" | tee -a "$SUMMARY"; }
left() { echo $((TOTAL_SECONDS - SECONDS)); }
at_most() { echo $(($1 < $2 ? $1 : $2)); }

# part NAME SECONDS LOG COMMAND...: runs a command under a time limit, its output into LOG and onto the screen.
# The interrupt lets pytest and the benchmark still write what they have.
part() {
  local name=$1 limit=$2 log=$3 began=$SECONDS code
  shift 3
  if ((limit < 15)); then
    note "$name: NOT RUN, no time left"
    failed=1
    return 1
  fi
  echo "=== $name (at most $limit s)"
  timeout -s INT -k 15 "$limit" env --default-signal=INT "$@" 2>&1 | tee -a "$OUT/$log"
  code=${PIPESTATUS[0]}
  case $code in
    0) note "$name: ok, $((SECONDS - began)) s" ;;
    124 | 137) note "$name: STOPPED at its limit of $limit s" ;;
    *) note "$name: FAILED with exit code $code after $((SECONDS - began)) s (see $log)" ;;
  esac
  ((code == 0)) || failed=1
  return "$code"
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# The machine, and the architecture to build for. Hopper's own instructions need the "a".
if ! machine=$("$PYTHON" - <<'PY'
import torch

assert torch.cuda.is_available(), "torch sees no CUDA GPU"
major, minor = torch.cuda.get_device_capability()
print(f"{major}.{minor}{'a' if (major, minor) == (9, 0) else ''}")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
PY
); then
  note "NOT RUN: $PYTHON has no torch with CUDA, or there is no GPU"
  exit 2
fi
export TORCH_CUDA_ARCH_LIST=${machine%%$'\n'*}
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
export MHA_EXT_BUILD=cuda PYTHONUNBUFFERED=1
note "${machine#*$'\n'}, $(nproc) CPUs, building for $TORCH_CUDA_ARCH_LIST"

# 1. Build, in place: what is imported from the checkout is then what was built.
install=("$PYTHON" -m pip install --no-build-isolation --no-deps -v -e .)
has pip || install=("$PYTHON" setup.py build_ext --inplace)
: >"$OUT/build.log"
part build 240 build.log "${install[@]}" >/dev/null || tail -n 40 "$OUT/build.log"
tail -n 1 "$SUMMARY"
if ! part "import and a call of each backend" "$(at_most 60 "$(left)")" build.log "$PYTHON" - <<'PY'
import torch

import mha_ext

mha_ext.show_config()
query, key, value = (torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
exact = mha_ext.attention(query.double(), key.double(), value.double(), is_causal=True, backend="reference")
for backend in ("fused", "unfused"):
    ours = mha_ext.attention(query, key, value, is_causal=True, backend=backend).double()
    error = float((ours - exact).norm() / exact.norm())
    print(f"relative error of one bf16 call, {backend}: {error:.1e}")
    assert error < 2e-2
PY
then
  tail -n 25 "$OUT/build.log"
fi

# 2. The tests of the kernels, on the GPU.
: >"$OUT/tests.log"
tests=("$PYTHON" -m pytest tests -q --tb=short --maxfail=20 --continue-on-collection-errors -W default
  -p no:cacheprovider --ignore-glob='*gpusim*')
verdict() { note "  $(grep -E ' in [0-9.]+s' "$OUT/tests.log" | tail -n 1)"; }
can_test=1
if ! has pytest || ! has hypothesis; then
  can_test=0
  note "tests: NOT RUN, pytest or hypothesis is missing; the benchmark verifies every answer it times"
fi
has xdist && tests+=(-n 4)
if ((can_test)); then
  MHA_EXT_TEST_GPU=1 part "kernel tests" "$(at_most 240 $(($(left) - BENCHMARK_SECONDS)))" tests.log \
    "${tests[@]}" -m "(gpu or sim) and not slow" --junitxml="$OUT/tests.xml"
  verdict
fi

if ((can_test)); then # one micro-kernel for each instruction form, compared with a description of the ISA
  MHA_EXT_TEST_GPU=1 part "instruction forms" "$(at_most 90 $(($(left) - BENCHMARK_SECONDS)))" conformance.log \
    "$PYTHON" -m pytest tests/gpusim/conformance -q --tb=short -m sim -W default -p no:cacheprovider
fi

# 3. The benchmark. It stops by itself in time to write its report.
limit=$(at_most 240 $(($(left) - 10)))
part benchmark "$limit" benchmark.log \
  "$PYTHON" -m benchmarks --quick --device cuda --budget $((limit - 50)) --out "$OUT"

# 4. With the time that is left, the long tests of the kernels (more than 2^32 elements), then those that need no kernel.
if ((can_test && $(left) > 60)); then
  MHA_EXT_TEST_GPU=1 part "long kernel tests" "$(at_most 90 $(($(left) - 20)))" tests.log \
    "${tests[@]}" -m "(gpu or sim) and slow"
  verdict
fi
if ((can_test && $(left) > 40)); then
  part "other tests" "$(($(left) - 20))" tests.log "${tests[@]}" -m "not gpu and not sim and not slow"
  verdict
fi

note "$SECONDS s in all"
echo
echo "=== summary (results in $OUT)"
cat "$SUMMARY"
exit "$failed"
