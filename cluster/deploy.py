"""Where the actors run: the one file that starts Ray, places actors and ends them.

    scratch directory -> Ray (local, or joined) -> placement group -> ExpertStore -> NdpWorker -> GpuWorker -> ready

The actor classes are plain classes; `ray.remote` is applied here. `Deployment` is a context manager, and leaving it, in
whatever way, leaves no process, no shared memory and no file behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..actors.engine.stats import EngineStats
from ..actors.requests import GenerationRequest, TokenEvent
from ..actors.settings import EngineSettings
from ..errors import RuntimeFailure, TierMoeError
from .config import RunConfig
from .endpoints import EndpointDirectory, Endpoints
from .failures import as_failure, as_join_failure
from .quiet import without_ray_notices
from .ray_auth import check_joinable, ensure_private_token
from .scratch import Scratch

_CONTROL = "control"  # calls that must get through while every request thread is busy
_CONTROL_THREADS = 4
_CALL_DEADLINE_S = 30.0
_GOODBYE_DEADLINE_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Ray's own switches, which it reads from the environment only.
_RAY_SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` would build a second environment for every actor
}


class Deployment:
    """One store and one worker on Ray, with an NDP worker where the policy uses one, ready inside the `with` block.

    Args:
        config: which Ray, which deadlines.
        settings: what the worker needs.
        store_path: directory of the prepared expert store, visible to the node of the actors.
        worker_class: class with the interface of `GpuWorker`; None: `GpuWorker`.
        store_class: class with the interface of `ExpertStore`; None: `ExpertStore`.

    Attributes:
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
        self._worker: Any = None
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
        if ray.is_initialized():
            raise RuntimeFailure("this process uses Ray already", "leave the other deployment first")
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
        deadline = time.monotonic() + self._config.request_deadline_s
        stream = self._worker.generate.options(num_returns="streaming").remote(request)
        ended = False
        try:
            while not ended:
                event = self._next_event(stream, deadline)
                if event.finish == "error":
                    ended = True
                    raise RuntimeFailure(
                        f"the request failed in the worker: {event.error}", "run again; report it if it stays"
                    )
                ended = event.finish is not None
                yield event
        finally:
            if not ended:
                self.cancel(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a worker that is dead or closed has nothing left to stop."""
        if self._worker is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self._control("cancel", request_id, deadline_s=_GOODBYE_DEADLINE_S)

    def stats(self) -> EngineStats:
        """The worker's counters."""
        return self._ask("stats")

    def reset_stats(self) -> None:
        """Set the worker's counters to zero."""
        self._ask("reset_stats")

    def health(self) -> dict[str, Any]:
        """The worker's own account of its state."""
        return self._ask("health")

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
        return self._ask("trace_events")

    def close(self) -> None:
        """End the actors, and Ray where it was started here. Idempotent; never raises."""
        actors = [self._worker, self._ndp, self._store, self._directory]
        self._worker = self._ndp = self._store = self._directory = None
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
                with contextlib.suppress(Exception):
                    ray.shutdown()
        finally:  # also when a second Ctrl-C cuts the above short
            self._quiet.close()
            if scratch is not None:
                scratch.close()

    def _start_ray(self) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "tiermoe"}
        address = self._config.ray.address
        if address is not None:
            check_joinable(address)
            switches = _RAY_SWITCHES
            options |= {"address": address, "runtime_env": {"env_vars": self._thread_limits()}}
        else:
            ensure_private_token()
            self._scratch = Scratch()
            # The thread limits reach the actors as the environment that Ray's processes inherit. As a runtime_env they
            # would keep Ray from using the worker processes that it starts ahead (one second an actor).
            # torch makes a directory for compiled code as soon as it is imported: let it be swept with the rest
            inductor = {"TORCHINDUCTOR_CACHE_DIR": str(self._scratch.path / "inductor")}
            switches = _RAY_SWITCHES | self._thread_limits() | inductor
            options |= {
                "num_cpus": self._config.ray.num_cpus or self._settings.threads + 1 + self._ndp_threads(),
                "resources": {"ndp": 1} if self._settings.policy.uses_ndp else None,
                "include_dashboard": False,
                "object_store_memory": self._config.ray.object_store_bytes,
                "_temp_dir": str(self._scratch.path),
            }
        with _environment(switches), _private_files(), _own_sigterm():
            try:
                ray.init(**options)
            except Exception as error:
                if address is None:
                    raise
                raise as_join_failure(error, address) from error

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
        self._group = placement_group(bundles, strategy="STRICT_PACK")
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
        self._store = self._actor(store_class, bundle=1, cpus=1, max_concurrency=2).remote(self._store_path)
        view = ray.get(self._store.describe.remote(), timeout=self._left())
        self._worker = self._actor(
            worker_class,
            bundle=0,
            cpus=self._settings.threads,
            max_concurrency=self._settings.kv.max_requests,
            concurrency_groups={_CONTROL: _CONTROL_THREADS},
        ).remote(self._settings, view, self._start_ndp() if self._settings.policy.uses_ndp else None)
        self.plan = ray.get(self._worker.start.remote(), timeout=self._left())

    def _start_ndp(self) -> Any:
        """Start the NDP worker where the resource `ndp` is; the link by which the lead finds it, also restarted."""
        from ..actors.links import PeerLink
        from ..actors.ndp_worker import NdpWorker

        settings = self._settings.ndp
        name = f"endpoints-{secrets.token_hex(8)}"  # another deployment in the same cluster has its own
        self._directory = ray.remote(num_cpus=0, name=name)(EndpointDirectory).remote()
        local = self._config.ray.address is None
        endpoints = Endpoints(name, "127.0.0.1" if local else None)
        token = secrets.token_hex(32)
        self._ndp = ray.remote(
            num_cpus=settings.threads,
            resources={"ndp": 1},
            max_restarts=-1,
            max_concurrency=2,
            runtime_env={"env_vars": dict.fromkeys(_THREAD_VARIABLES, "1")} if not local else None,
        )(NdpWorker).remote(settings, self._store_path, endpoints, token)
        ray.get(self._ndp.health.remote(), timeout=self._left())
        return PeerLink(endpoints, token)

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

    def _actor(self, plain: type, *, bundle: int, cpus: int, **options: Any) -> Any:
        assert self._group is not None
        gpus = self._group.bundle_specs[bundle].get("GPU", 0)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, **options)(plain)

    def _thread_limits(self) -> dict[str, str]:
        threads = str(self._settings.threads)
        return dict.fromkeys(_THREAD_VARIABLES, threads)

    def _left(self) -> float:
        """Seconds until the start-up deadline; never zero, which Ray takes for `do not wait`."""
        return max(0.001, self._deadline_s - time.monotonic())

    def _next_event(self, stream: Any, deadline: float) -> TokenEvent:
        try:
            ready, _ = ray.wait([stream], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeFailure(
                    f"the request passed its deadline of {self._config.request_deadline_s:g} s",
                    "raise request_deadline_s, or ask for fewer tokens",
                )
            return ray.get(next(stream))
        except StopIteration:
            raise RuntimeFailure(
                "the worker ended a request without saying why", "run again; report it if it stays"
            ) from None
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the worker failed during a request") from error

    def _control(self, method: str, *args: Any, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        call = getattr(self._worker, method).options(concurrency_group=_CONTROL)
        return ray.get(call.remote(*args), timeout=deadline_s)

    def _ask(self, method: str) -> Any:
        try:
            return self._control(method)
        except ray.exceptions.RayError as error:
            raise as_failure(error, f"the worker did not answer '{method}'", _CALL_DEADLINE_S) from error


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """Set variables while Ray's processes are born."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's client puts its own handler in place of the program's; put that back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: set by other than Python code, and not ours to restore
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """What Ray writes from here on (logs, tokens, sockets) is for this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _amounts(resources: dict[str, float], keys: Iterable[str]) -> str:
    return " and ".join(f"{resources.get(key, 0.0):g} {key}" for key in keys)
