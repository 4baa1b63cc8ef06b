"""Routing traces, and the executor that replays them on a virtual clock."""
