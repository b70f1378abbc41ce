"""`python -m benchmarks`."""

import sys
from pathlib import Path

# `python -m` puts the checkout first, where mha_ext may lie without its compiled part: prefer what is installed.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT] + [str(_ROOT)]

if __name__ == "__main__":
    from benchmarks.cli import main

    sys.exit(main())
