"""For every test: one thread per process, and the helpers of this folder importable."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# before torch is imported anywhere; two busy cores are slower with two threads a process than with one
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# before triton is imported anywhere: where there is no GPU its kernels are interpreted
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A suite that a shell started in the background ignores SIGINT, and so would the programs that it interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))
