"""Names of the policy presets that ship with the package."""

from tiermoe.cluster.config import configs_dir

POLICIES = sorted(path.stem for path in (configs_dir() / "policies").glob("*.yaml"))
