"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """On this machine. Below those that connections get by themselves (on Linux from 32,768), so that none of these has
    taken it by the time that a server listens there."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free between 20000 and 32767")
