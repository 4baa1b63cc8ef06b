"""What the process that started a runtime watches: its lead, which it starts again after a death.

Ray makes a dead lead's process anew, without its weights. The keeper notices, starts it, and gives up when it dies too
often. The other actors register and serve again by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray

from ..errors import RuntimeFailure
from .attach import CONTROL, ActorRecord, Lead, lead_record
from .placement import remake
from .ray_session import as_failure

DEATHS, WITHIN_S = 3, 60.0  # a lead that dies so often so soon is not started again
SILENT_S = 8.0  # without an answer: said
HUNG_S = 30.0  # ended, and started again
_LOG = "see the lead's log in Ray's session folder, or lower --budget"


class LeadKeeper:
    """Starts a lead again that has died or hangs. No call blocks on the lead.

    Args:
        deployment: its id.
        lead: that serves.
        notify: called with a line for each death, each silence and each return.
    """

    def __init__(self, deployment: str, lead: Lead, notify: Callable[[str], None]) -> None:
        self._deployment, self._lead, self._notify = deployment, lead, notify
        record = lead_record(deployment)
        self._restarts = 0 if record is None else record.restarts
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._dead = False  # not started since its death
        self._start: Any = None  # its start under way
        self._health: Any = None  # a call without an answer yet
        self._asked_s = 0.0  # when it was made
        self._silent = False

    def look(self) -> None:
        """Look once, and do what is to be done.

        Raises:
            RuntimeFailure: the lead has ended for good, has died `DEATHS` times within `WITHIN_S`, or its loop died.
            TierMoeError: it refused to start again.
        """
        record = lead_record(self._deployment)
        if record is None or record.state == "DEAD":
            raise RuntimeFailure("the worker failed: its process ended", "start it again")
        if record.restarts > self._restarts:
            self._died(record.restarts)
        if self._dead and record.state == "ALIVE":
            self._dead, self._start = False, self._call("start")
        if self._start is not None:
            self._follow_start()
        elif not self._dead:
            self._follow_health(record)

    def _died(self, restarts: int) -> None:
        now_s = time.monotonic()
        self._deaths.extend([now_s] * (restarts - self._restarts))
        self._restarts, self._dead, self._start, self._health = restarts, True, None, None
        if len(self._deaths) == DEATHS and now_s - self._deaths[0] < WITHIN_S:
            raise RuntimeFailure(f"the lead died {DEATHS} times within {WITHIN_S:g} s", _LOG)
        self._notify("the lead died; it is started again, and requests wait")

    def _follow_start(self) -> None:
        if not ray.wait([self._start], timeout=0)[0]:
            return
        start, self._start = self._start, None
        try:
            ray.get(start)
        except ray.exceptions.RayActorError:
            return  # it died again: the next look finds out
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the lead did not start again") from error
        self._notify(f"the lead serves again, {time.monotonic() - self._deaths[-1]:.0f} s after it died")

    def _follow_health(self, record: ActorRecord) -> None:
        if self._health is None:
            self._health, self._asked_s, self._silent = self._call("health"), time.monotonic(), False
        if ray.wait([self._health], timeout=0)[0]:
            health, self._health = self._health, None
            try:
                ray.get(health)
            except ray.exceptions.RayActorError:
                return  # the table says so at the next look
            except ray.exceptions.RayError as error:
                raise as_failure(error, "the worker failed") from error
            return
        silent_s = time.monotonic() - self._asked_s
        if silent_s > HUNG_S:
            self._notify(f"the lead has not answered for {silent_s:.0f} s and is ended")
            self._health = None
            here = record.node == ray.get_runtime_context().get_node_id()
            remake(self._lead.handle, record.pid if here else None)
        elif silent_s > SILENT_S and not self._silent:
            self._silent = True
            self._notify(f"the lead has not answered for {silent_s:.0f} s")

    def _call(self, method: str) -> Any:
        return getattr(self._lead.handle, method).options(concurrency_group=CONTROL).remote()
