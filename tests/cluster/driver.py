"""A program that deploys the fake actors and generates, for tests that interrupt or kill it.

usage: driver.py generate|start|join [HOST:PORT]

It prints a line when there is something to interrupt: PLACED (actors are about to start), READY, TOKEN.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fakes import FAKE_FACTS, FakeStore, FakeWorker, StuckWorker

from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.config import RaySettings, RunConfig, engine_settings
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.launch import Launch, StandIns
from tiermoe.errors import RuntimeFailure


def announce(step: str) -> None:
    if step == "starting the store and its peers":
        print("PLACED", flush=True)


def main() -> None:
    worker = StuckWorker if sys.argv[1] == "start" else FakeWorker
    # auto would open the store, which is none
    ray = RaySettings(address=sys.argv[2] if sys.argv[1] == "join" else None)
    config = RunConfig(threads=1, policy="next-gate", ray=ray)
    stand_ins = StandIns(worker, FakeStore, FAKE_FACTS)
    deployment = Deployment(Launch(config, engine_settings(config), "store", stand_ins, step=announce))
    try:
        with deployment as runtime:
            print("READY", flush=True)
            length = 5 if sys.argv[1] == "join" else 1_000_000_000
            for event in runtime.generate(GenerationRequest("r", (1,), SamplingParams(max_tokens=length))):
                if event.token_ids == (3,):
                    print("TOKEN", flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeFailure as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
