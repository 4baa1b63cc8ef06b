"""Which ports of a process tree other machines reach."""

from __future__ import annotations

import ipaddress

import psutil


def off_loopback(pid: int) -> dict[str, set[int]]:
    """Ports of the process and of all below it that listen elsewhere than on loopback, by the name of the process."""
    found: dict[str, set[int]] = {}
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        for socket in one.net_connections("inet"):
            where = ipaddress.ip_address(socket.laddr.ip)
            where = getattr(where, "ipv4_mapped", None) or where
            if socket.status == psutil.CONN_LISTEN and not where.is_loopback:
                found.setdefault(" ".join(one.cmdline()).strip(), set()).add(socket.laddr.port)
    return found
