"""The GPUs that this machine shows, and whether CUDA can use them; without torch, which takes seconds to load.

A GPU that is there and cannot be used is refused: the CPU stands in for one only where none is there, or where the
user says so, by `device: cpu` or an empty CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from ..errors import ConfigError

ROOT = Path("/")
_ORDER, _BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_LIBRARY = "libcuda.so.1"  # the driver's part in user space: what torch loads
_DEVICES = ("dev/nvidia*", "dev/nvhost-gpu")  # of the driver, and of Tegra's
_WSL = ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")  # the first is there whatever GPU Windows has
_NVIDIA_SMI_S = 10.0
_CONTEXT_BYTES = 512 << 20  # that CUDA takes of a GPU for each process, about
# The oldest driver by CUDA's major version, whose minor versions all run on it.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
_STAND_IN = "let the CPU stand in for it with --device cpu or an empty CUDA_VISIBLE_DEVICES"


def has_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a driver of an NVIDIA GPU is here that the environment does not hide."""
    there = any(next(ROOT.glob(pattern), None) for pattern in _DEVICES) or all((ROOT / name).exists() for name in _WSL)
    return there and not hidden(environ)


def hidden(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names no GPU. CUDA takes the names before the first invalid one."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    return given is not None and given.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs of this machine that the environment does not hide, by their device files; none of WSL's or Tegra's."""
    if hidden(environ):
        return 0
    count = len(list(ROOT.glob("dev/nvidia[0-9]*")))
    given = environ.get("CUDA_VISIBLE_DEVICES")
    return count if given is None else min(count, len(given.split(",")))


def number_by_bus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have CUDA number GPUs as nvidia-smi and Ray do, unless the user says otherwise; before CUDA starts.

    Its own order begins with the fastest one, so that on a mixed machine GPU 0 of one is not GPU 0 of the other.
    """
    environ.setdefault(_ORDER, _BY_BUS)


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch.

    Attributes:
        version: as `torch.__version__`.
        cuda: version of CUDA that it was built with; None: for CPUs.
    """

    version: str
    cuda: str | None

    @property
    def oldest_driver(self) -> str | None:
        """The oldest driver that it runs on; None: not known here."""
        return None if self.cuda is None else _OLDEST_DRIVER.get(int(self.cuda.partition(".")[0]))

    @classmethod
    def installed(cls) -> TorchBuild:
        """From the files of the package, which is not imported."""
        found = util.find_spec("torch")
        text = ""
        for folder in () if found is None else found.submodule_search_locations or ():
            path = Path(folder) / "version.py"
            text = path.read_text(encoding="utf-8") if path.is_file() else text
        values = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
        return cls(values.get("__version__") or metadata.version("torch"), values.get("cuda"))


def check_gpu(device: str, torch: TorchBuild | None = None) -> None:
    """Refuse a GPU that CUDA cannot use, as far as that can be known before torch is loaded.

    Args:
        device: `auto`, `cpu` or `cuda`, as configured.
        torch: None: the one that is installed.

    Raises:
        ConfigError: one is there, and torch or the driver does not fit.
    """
    if device == "cpu" or not has_gpu():
        return
    torch = torch or TorchBuild.installed()
    if torch.cuda is None:
        raise unusable(torch)
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise unusable(torch, f"{_LIBRARY} cannot be loaded") from None
    supported = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(supported)) == 0 and supported.value:
        major, minor = supported.value // 1000, supported.value % 1000 // 10
        if major < int(torch.cuda.partition(".")[0]):
            raise unusable(torch, f"the driver supports CUDA {major}.{minor}")


def unusable(torch: TorchBuild, reason: str = "") -> ConfigError:
    """The refusal of this machine's GPU: its driver's version and the needed one. reason: further details."""
    driver = driver_version()
    here = "this machine has an NVIDIA GPU that CUDA cannot use: "
    shown = f"the driver is {driver}" if driver else "the driver's version is not known"
    if torch.cuda is None:
        known = ", ".join(f"CUDA {major} needs driver {oldest} or newer" for major, oldest in _OLDEST_DRIVER.items())
        return ConfigError(
            f"{here}torch {torch.version} is built for CPUs, and {shown}",
            f"install a build of torch for CUDA ({known}, see docs/gpu.md), or {_STAND_IN}",
        )
    oldest = torch.oldest_driver
    needs = f"needs driver {oldest} or newer" if oldest else "needs a driver that supports it"
    what = f"{here}torch {torch.version} is built for CUDA {torch.cuda}, which {needs}, and {shown}"
    if driver is None or oldest is None or _numbers(driver) < _numbers(oldest):
        remedy = "update the driver, install a build of torch for an older CUDA (docs/gpu.md)"
    else:
        remedy = "see what nvidia-smi says"
    return ConfigError(what + (f" ({reason})" if reason else ""), f"{remedy}, or {_STAND_IN}")


def absent() -> ConfigError:
    """The refusal of `device: cuda` without a visible GPU."""
    what = "CUDA_VISIBLE_DEVICES hides every GPU" if hidden() else "this machine has no CUDA device"
    return ConfigError(what, "use --device cpu (the CPU stands in for a GPU), or join a cluster that has one")


def driver_version() -> str | None:
    """The version of the kernel's module, else (WSL) that of nvidia-smi; None: neither reports one."""
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if found := re.search(r"Module\s.*?(\d+\.\d+(?:\.\d+)?)\s", text + "\n"):
        return found[1]
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found[1] if (found := re.match(r"(\d+\.\d+(?:\.\d+)?)\s", said)) else None


def gpus_free_bytes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Free memory of each GPU that the environment does not hide, less CUDA's own of a process; empty: not known.

    nvidia-smi says it without a CUDA context, for which this process would keep some hundred MiB there. It numbers GPUs
    by bus: of several in another order nobody knows here which one is meant.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden(environ) or (program := shutil.which("nvidia-smi")) is None:
        return ()
    command = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if given is not None:
        command.insert(1, f"--id={given}")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    if said.returncode != 0 or not all(line.isdigit() for line in lines):
        return ()
    if len(lines) > 1 and environ.get(_ORDER, _BY_BUS) != _BY_BUS:
        return ()
    return tuple(max(0, (int(line) << 20) - _CONTEXT_BYTES) for line in lines)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
