"""Where the actors run: places them on Ray, names them and ends them.

    scratch directory -> Ray (local, or joined) -> placement group -> ExpertStore -> NdpWorker -> GpuWorker -> ready

The actor classes are plain classes; `ray.remote` is applied here. Their names begin with the deployment's id
(`names.py`), so that others find them (`attach.py`). `Deployment` is a context manager, and leaving it, in whatever
way, leaves no process, no shared memory and no file behind.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..actors.engine.stats import EngineStats
from ..actors.requests import GenerationRequest, TokenEvent
from ..actors.settings import EngineSettings
from ..errors import RuntimeFailure, TierMoeError
from .config import RunConfig
from .endpoints import EndpointDirectory, Endpoints
from .failures import as_failure
from .lead import CONTROL, CONTROL_THREADS, Lead
from .names import ENDPOINTS, LEAD, STORE, new_id
from .quiet import without_ray_notices
from .ray_session import head_address, join, leave, refuse_second, start_local, thread_limits
from .scratch import Scratch

_CALL_DEADLINE_S = 30.0


class Deployment:
    """One store and one worker on Ray, with an NDP worker where the policy uses one, ready inside the `with` block.

    Args:
        config: which Ray, which deadlines.
        settings: what the worker needs.
        store_path: directory of the prepared expert store, visible to the node of the actors.
        worker_class: class with the interface of `GpuWorker`; None: `GpuWorker`.
        store_class: class with the interface of `ExpertStore`; None: `ExpertStore`.

    Attributes:
        id: what the names of its actors begin with.
        plan: the worker's effective plan, once started.
        startup_s: seconds from the call to ready.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: EngineSettings,
        store_path: str,
        *,
        worker_class: type | None = None,
        store_class: type | None = None,
    ) -> None:
        self.id = new_id()
        self._config = config
        self._settings = settings
        self._store_path = store_path
        self._worker_class = worker_class
        self._store_class = store_class
        self._deadline_s = 0.0  # on the monotonic clock, once started
        self._quiet = contextlib.ExitStack()
        self._scratch: Scratch | None = None
        self._group: PlacementGroup | None = None
        self._store: Any = None
        self._lead = Lead(None)
        self._directory: Any = None
        self._ndp: Any = None
        self.plan: dict[str, Any] = {}
        self.startup_s = 0.0

    def __enter__(self) -> Deployment:
        """Start everything.

        Raises:
            RuntimeFailure: Ray or an actor did not start in time, or the cluster lacks the resources.
            TierMoeError: what the store or the worker refused (bad store, budget too small, ...).
        """
        refuse_second()
        begin = time.monotonic()
        self._deadline_s = begin + self._config.ray.startup_deadline_s
        try:
            self._quiet.enter_context(without_ray_notices())
            self._start_ray()
            self._place()
            self._start_actors()
        except BaseException as error:
            self.close()
            # Ray makes the actor's typed error a class of both kinds, whose text is a traceback: that is unwrapped
            ours = isinstance(error, TierMoeError) and not isinstance(error, ray.exceptions.RayTaskError)
            if ours or not isinstance(error, Exception):
                raise
            deadline_s = self._config.ray.startup_deadline_s
            raise as_failure(error, "the runtime did not start", deadline_s, "ray.startup_deadline_s") from error
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Stream the tokens of one request; leaving the iteration early cancels the request.

        Raises:
            RuntimeFailure: the worker died, reported an error, or the request passed its deadline.
        """
        return self._lead.generate(request, self._config.request_deadline_s)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a worker that is dead or closed has nothing left to stop."""
        self._lead.cancel(request_id)

    @property
    def address(self) -> str:
        """HOST:PORT by which others join the Ray that this runs on."""
        return head_address()

    def watch(self) -> bool:
        """Whether the deployment goes on; False: somebody ended it in order (`Attachment.end`).

        Raises:
            RuntimeFailure: the worker died, or its loop did.
        """
        try:
            self._lead.alive()
        except RuntimeFailure:
            if self._group is not None and placement_group_table(self._group)["state"] == "REMOVED":
                return False
            raise
        return True

    def stats(self) -> EngineStats:
        """The worker's counters."""
        return self._lead.ask("stats")

    def reset_stats(self) -> None:
        """Set the worker's counters to zero."""
        self._lead.ask("reset_stats")

    def health(self) -> dict[str, Any]:
        """The worker's own account of its state."""
        return self._lead.ask("health")

    def ndp_health(self) -> dict[str, Any]:
        """The NDP worker's own account of its state.

        Raises:
            RuntimeFailure: there is none, or it does not answer (Ray may be restarting it).
        """
        if self._ndp is None:
            raise RuntimeFailure("this deployment has no NDP worker", "choose a policy that uses one")
        try:
            return ray.get(self._ndp.health.remote(), timeout=_CALL_DEADLINE_S)
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the NDP worker did not answer 'health'", _CALL_DEADLINE_S) from error

    def trace_events(self) -> list[dict[str, Any]]:
        """Chrome trace events that the worker recorded."""
        return self._lead.ask("trace_events")

    def close(self) -> None:
        """End the actors, and Ray where it was started here. Idempotent; never raises."""
        actors = [self._lead.handle, self._ndp, self._store, self._directory]
        self._lead, self._ndp, self._store, self._directory = Lead(None), None, None, None
        group, self._group = self._group, None
        scratch, self._scratch = self._scratch, None
        try:
            if ray.is_initialized():
                for actor in actors:
                    if actor is not None:
                        with contextlib.suppress(Exception):
                            ray.kill(actor, no_restart=True)
                if group is not None:
                    with contextlib.suppress(Exception):
                        remove_placement_group(group)
                leave()
        finally:  # also when a second Ctrl-C cuts the above short
            self._quiet.close()
            if scratch is not None:
                scratch.close()

    def _start_ray(self) -> None:
        address = self._config.ray.address
        if address is not None:
            join(address, thread_limits(self._settings.threads))
            return
        self._scratch = Scratch()
        start_local(
            self._scratch,
            self._config.ray.num_cpus or self._settings.threads + 1 + self._ndp_threads(),
            {"ndp": 1} if self._settings.policy.uses_ndp else {},
            self._config.ray.object_store_bytes,
            self._settings.threads,
        )

    def _place(self) -> None:
        """Reserve one node for worker and store together: they share the store's mapped files."""
        wants_gpu = self._settings.device == "cuda" or (
            self._settings.device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1
        )
        worker = {"CPU": float(self._settings.threads)} | ({"GPU": 1.0} if wants_gpu else {})
        bundles = [worker, {"CPU": 1.0}]
        wanted = {key: sum(bundle.get(key, 0.0) for bundle in bundles) for key in sorted(worker)}
        have = ray.cluster_resources()
        if self._settings.policy.uses_ndp and have.get("ndp", 0.0) < 1:
            raise RuntimeFailure(
                f"policy '{self._settings.policy.name}' needs a node with the resource ndp, Ray has none",
                "start that node with `ray start ... --resources '{\"ndp\": 1}'`, or choose another policy",
            )
        fits = all(have.get(key, 0.0) >= value for key, value in wanted.items())
        self._group = placement_group(bundles, strategy="STRICT_PACK", name=self.id)
        # a cluster that was joined may be busy, or grow: wait. A local Ray has what it has.
        if (fits or self._config.ray.address is not None) and self._group.wait(timeout_seconds=self._left()):
            return
        if fits:
            raise ray.exceptions.GetTimeoutError("placement group")
        raise RuntimeFailure(
            f"the actors need a node with {_amounts(wanted, wanted)}, Ray has {_amounts(have, wanted)} in all",
            "lower threads, raise ray.num_cpus, use --device cpu, or join a larger cluster",
        )

    def _start_actors(self) -> None:
        store_class, worker_class = self._classes()
        self._store = self._actor(store_class, STORE, bundle=1, cpus=1, max_concurrency=2).remote(self._store_path)
        view = ray.get(self._store.describe.remote(), timeout=self._left())
        worker = self._actor(
            worker_class,
            LEAD,
            bundle=0,
            cpus=self._settings.threads,
            max_concurrency=self._settings.kv.max_requests,
            concurrency_groups={CONTROL: CONTROL_THREADS},
        ).remote(self._settings, view, [self._start_ndp()] if self._settings.policy.uses_ndp else [])
        self._lead = Lead(worker)
        self.plan = ray.get(worker.start.remote(), timeout=self._left())

    def _start_ndp(self) -> Any:
        """Start the NDP worker where the resource `ndp` is; the link by which the lead finds it, also restarted."""
        from ..actors.links import PeerLink, ndp_name
        from ..actors.ndp_worker import NdpWorker

        settings = self._settings.ndp
        name = f"{self.id}/{ENDPOINTS}"  # another deployment in the same cluster has its own
        self._directory = ray.remote(num_cpus=0, name=name)(EndpointDirectory).remote()
        local = self._config.ray.address is None
        endpoints = Endpoints(name, "127.0.0.1" if local else None)
        token = secrets.token_hex(32)
        self._ndp = ray.remote(
            name=f"{self.id}/{ndp_name(0)}",
            num_cpus=settings.threads,
            resources={"ndp": 1},
            max_restarts=-1,
            max_concurrency=2,
            runtime_env={"env_vars": thread_limits(1)} if not local else None,
        )(NdpWorker).remote(settings, self._store_path, endpoints, token)
        ray.get(self._ndp.health.remote(), timeout=self._left())
        return PeerLink(endpoints, token, name=ndp_name(0))

    def _ndp_threads(self) -> int:
        return self._settings.ndp.threads if self._settings.policy.uses_ndp else 0

    def _classes(self) -> tuple[type, type]:
        """The classes to run; imported here so that only a deployment pays for them."""
        store, worker = self._store_class, self._worker_class
        if store is None:
            from ..actors.expert_store import ExpertStore

            store = ExpertStore
        if worker is None:
            from ..actors.gpu_worker import GpuWorker

            worker = GpuWorker
        return store, worker

    def _actor(self, plain: type, role: str, *, bundle: int, cpus: int, **options: Any) -> Any:
        assert self._group is not None
        gpus = self._group.bundle_specs[bundle].get("GPU", 0)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        name = f"{self.id}/{role}"
        return ray.remote(name=name, num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, **options)(plain)

    def _left(self) -> float:
        """Seconds until the start-up deadline; never zero, which Ray takes for `do not wait`."""
        return max(0.001, self._deadline_s - time.monotonic())


def _amounts(resources: dict[str, float], keys: Iterable[str]) -> str:
    return " and ".join(f"{resources.get(key, 0.0):g} {key}" for key in keys)
