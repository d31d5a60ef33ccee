"""`--listen`: a listening end. For each conductor that proves the key, a fresh process."""

from __future__ import annotations

import errno
import select
import socket
from typing import TYPE_CHECKING, Final

from baton.bench.channel import Frames, prove_as_listener
from baton.bench.ends import Address, start_part
from baton.bench.part import Terms
from baton.errors import BatonError, ConfigError
from baton.launch.ports import find_listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.bench.ends import PartProcess
    from baton.clock import Clock

MAX_PARTS: Final = 8
REAP_S: Final = 1.0


def listen(address: Address, key: ClusterKey, clock: Clock, say: Callable[[str], None]) -> None:
    """Serve conductors until Ctrl-C, which ends all processes that it started.

    A stranger who connects holds up the others for the few seconds that a proof may take.

    Raises:
        ConfigError: the port is taken, or this process may not listen there.
    """
    parts: list[PartProcess] = []
    with _open(address) as listener:
        port = listener.getsockname()[1]
        say(f"listening on {Address(address.host, port)}; end with Ctrl-C")
        try:
            while True:
                parts = _reap(parts)
                if select.select([listener], [], [], REAP_S)[0]:
                    part = _welcome(listener, key, clock, say, is_full=len(parts) >= MAX_PARTS)
                    parts += [] if part is None else [part]
        finally:
            for part in parts:
                part.kill()


def _open(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            holder = find_listener(address.port) or "a process of another user"
            raise ConfigError(
                f"cannot listen on {address}: the port is taken by {holder}; choose another"
            ) from exc
        raise ConfigError(f"cannot listen on {address}: {exc.strerror or exc}") from exc


def _welcome(
    listener: socket.socket,
    key: ClusterKey,
    clock: Clock,
    say: Callable[[str], None],
    *,
    is_full: bool,
) -> PartProcess | None:
    try:
        sock, peer = listener.accept()
    except OSError as exc:
        say(f"could not accept a connection: {exc}")
        return None
    with sock:
        if is_full:
            say(f"refused {peer[0]}: {MAX_PARTS} processes run already")
            return None
        try:
            prove_as_listener(Frames(sock, clock), key)
        except BatonError as exc:
            say(f"refused {peer[0]}: {exc}")
            return None
        # Where the conductor reached this end, the other end will reach it too.
        terms = Terms(key.secret.hex(), sock.getsockname()[0])
        say(f"a process for {peer[0]}")
        return start_part(sock, terms)


def _reap(parts: list[PartProcess]) -> list[PartProcess]:
    running = [part for part in parts if not part.is_over]
    for part in parts:
        if part not in running:
            part.end()
    return running
