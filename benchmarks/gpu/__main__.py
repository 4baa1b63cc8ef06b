"""`python -m tiermoe.benchmarks.gpu`: see `run.sh` and docs/gpu.md."""

import sys

from .job import main

if __name__ == "__main__":
    sys.exit(main())
