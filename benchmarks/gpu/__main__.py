"""`python -m tiermoe.benchmarks.gpu`: see `run.sh` and docs/gpu-measurements.md."""

import sys

from .run_parts import main

if __name__ == "__main__":
    sys.exit(main())
