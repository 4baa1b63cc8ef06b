"""What a machine takes to run a step, measured: the inputs of a prediction, kept for each machine.

`tiermoe doctor --save` measures them on random models (`jobs/measure_machine.py`) and writes them into the user's cache
folder; `configs/machines/` has those of other machines, by data sheets and papers. This table is the only description
of a machine: `plan` and `replay` read it. With L MoE layers and K experts a token, the seconds of one decode step of
one request without waits are

    step(policy) + L (dense_layer + dense bytes / L / dense_gbps + layer(policy) + m miss(policy) + n load(policy)
                      + K (expert + slot bytes / expert_gbps))

where step is the batching loop, and layer the host's part of an MoE layer outside kernels and waits. m is the share of
layers that miss an expert, n the number of experts that are loaded for a layer. A copy occupies the link for
copy + bytes / copy_gbps, or longer where the link is throttled; a wait for it ends wait later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ...actors.base_settings import Settings
from ...errors import ConfigError
from ...proto.private import user_cache
from ..config import configs_dir, no_such_name
from ..host import cpu
from ..yaml_file import explain, read_yaml

MACHINE_FILE = "machine.json"
THIS = "this"  # names the machine that runs the program
_FOLDER = "machines"


class PolicyCosts(Settings):
    """What a preset costs the host, in microseconds, at one row a step."""

    step_us: float = Field(ge=0, description="the batching loop of a step: scheduling, sampling, delivery")
    layer_us: float = Field(ge=0, description="an MoE layer outside kernels and waits, without misses")
    miss_us: float = Field(ge=0, description="added in a layer that misses an expert")
    load_us: float = Field(ge=0, description="added for each expert that is loaded")


class MachineCosts(Settings):
    """Costs of one machine; `_us` in microseconds, `_gbps` in 1e9 bytes a second."""

    version: Literal[2] = 2
    machine: str = Field(min_length=1, description="processor or GPU, and cores")
    executor: Literal["real", "emulated", "simulated"] = "emulated"
    tiermoe: str = Field(min_length=1, description="version of tiermoe that was measured")
    threads: int = Field(default=1, ge=1)
    copy_us: float = Field(ge=0, description="fixed part of an expert's copy to the device")
    copy_gbps: float = Field(gt=0, description="bandwidth of copies to the device")
    wait_us: float = Field(ge=0, description="from the end of a copy until a waiting layer resumes")
    dense_layer_us: float = Field(ge=0, description="fixed part of a layer outside its experts")
    dense_gbps: float = Field(gt=0, description="bandwidth at which dense weights are read")
    expert_us: float = Field(ge=0, description="fixed part of an expert's kernel")
    expert_gbps: float = Field(gt=0, description="bandwidth at which kernels read experts")
    policies: Mapping[str, PolicyCosts] = Field(min_length=1, description="costs of each preset")
    tflops: float | None = Field(
        default=None, gt=0, description="compute rate for many rows, 1e12 a second; default: not known"
    )
    host_gbps: float | None = Field(
        default=None,
        gt=0,
        description="bandwidth of host memory, if kernels share it with copies; default: they do not",
    )
    gpus: int = Field(default=1, ge=1)
    peer_gbps: float | None = Field(default=None, gt=0, description="bandwidth between two GPUs; default: at no cost")
    peer_us: float = Field(default=0.0, ge=0, description="latency of a message between two GPUs, one direction")
    message_us: float = Field(default=0.0, ge=0, description="host time of the lead for each message to or from a peer")
    matcher_us: float = Field(
        default=0.0, ge=0, description="from a published layer until the matcher's command arrives"
    )
    ndp: str | None = Field(default=None, description="NDP device: a name in configs/hardware")
    ndp_workers: int = Field(default=1, ge=1, description="number of NDP devices, if there is one")

    def of_policy(self, name: str) -> PolicyCosts:
        """A preset's costs; of one that was not measured, those of the measured preset that costs most."""
        return self.policies.get(name) or max(self.policies.values(), key=lambda costs: costs.layer_us)

    def dense_s(self, nbytes: float) -> float:
        """Seconds of a layer outside its experts, with its share of the dense bytes."""
        return self.dense_layer_us * 1e-6 + nbytes / (self.dense_gbps * 1e9)

    def expert_s(self, nbytes: float) -> float:
        """Seconds of one expert at one row."""
        return self.expert_us * 1e-6 + nbytes / (self.expert_gbps * 1e9)

    def copy_s(self, nbytes: float) -> float:
        """Seconds of one expert's copy to the device."""
        return self.copy_us * 1e-6 + nbytes / (self.copy_gbps * 1e9)


def machine_name() -> str:
    """Of this machine, as `MachineCosts.machine`."""
    found = cpu()
    kernel = next((s for s in ("avx512_vnni", "avx2") if s in found["instruction_sets"]), found["architecture"])
    return f"{found['model']}, {found['cores']} cores, {kernel}"


def cache_file() -> Path:
    """Where `tiermoe doctor --save` writes."""
    return user_cache() / MACHINE_FILE


def known_costs() -> MachineCosts | None:
    """The costs of this machine, as they were measured; None: they were not."""
    found = read_costs(cache_file())
    return found if found is not None and found.machine == machine_name() else None


def costs_of(machine: str | Path) -> MachineCosts:
    """The costs of `this` machine, of a name in configs/machines, or of a YAML or JSON file.

    Raises:
        ConfigError: the table is missing or refused; this machine was not measured.
    """
    if str(machine) == THIS:
        found = known_costs()
        if found is None:
            raise ConfigError("this machine was not measured", "run `tiermoe doctor --save`, or name a file")
        return found
    path = machine_file(machine)
    try:
        return MachineCosts(**read_yaml(path))
    except ValidationError as error:
        raise explain(error, MachineCosts, str(path)) from error


def machine_file(machine: str | Path) -> Path:
    """A file, or that of a name in configs/machines. Raises ConfigError: there is neither."""
    folder = configs_dir() / _FOLDER
    shipped, file = folder / f"{machine}.yaml", Path(machine).expanduser()
    if not file.suffix and shipped.is_file():
        return shipped
    if not file.exists():
        raise no_such_name("machine", str(machine), [THIS, *sorted(path.stem for path in folder.glob("*.yaml"))])
    return file


def read_costs(path: Path) -> MachineCosts | None:
    """A file of costs; None if it is missing, damaged or of another version: it is measured again in seconds."""
    try:
        return MachineCosts.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, ValueError):
        return None


def write_costs(costs: MachineCosts, path: Path) -> None:
    """Write a file of costs, atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(costs.model_dump_json(indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
