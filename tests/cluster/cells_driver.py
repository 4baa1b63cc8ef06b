"""A program that spreads things over the nodes of a Ray; each waits for a file before it ends.

usage: cells_driver.py HOST:PORT FOLDER COUNT
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tiermoe.cluster.jobs.bench.nodes import joined, over_nodes


def measure(thing: tuple[str, int]) -> dict[str, int]:
    """Says where it runs, then waits for `go-NUMBER`."""
    import ray

    folder, number = Path(thing[0]), thing[1]
    begun = folder / f"begun-{number}-{ray.util.get_node_ip_address()}-{os.getpid()}"
    begun.touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.05)
    begun.rename(folder / begun.name.replace("begun", "ended"))
    return {"number": number, "tenfold": 10 * number}


def main() -> None:
    address, folder, count = sys.argv[1:]
    with joined(address):
        for index, found, node in over_nodes(measure, [(folder, i) for i in range(int(count))]):
            print(json.dumps({"index": index, "found": found, "node": node}), flush=True)


if __name__ == "__main__":
    main()
