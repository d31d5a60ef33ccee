"""Transports that do not work, each in its own way: plug-ins of the tests of the doctor.

`install_broken_transports` makes them a distribution with entry points, as a stranger's would be.
"""

import os
import signal
import socket
from functools import partial

import msgspec
import numpy as np

from baton.errors import ConfigError
from baton.registry import Plugin
from baton.transfer.transports.tcp.sockets import TcpOptions
from baton.transfer.transports.tcp.transport import TcpTransport


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to say."""


class LyingTransport(TcpTransport):
    """Says that a write arrived, with one bit of another page flipped."""

    def expose(self, region):
        self._exposed = region
        return super().expose(region)

    def poll(self):
        events = super().poll()
        if any(type(event).__name__ == "Arrived" for event in events):
            np.frombuffer(self._exposed.memory, np.uint8)[-1:] ^= 1
        return events


class ListeningTransport(TcpTransport):
    """Opens a port of its own on every interface."""

    def expose(self, region):
        self._extra = socket.create_server(("", 0))
        return super().expose(region)


class DeviceOnlyTransport(TcpTransport):
    """Moves memory that this machine does not have."""

    capabilities = msgspec.structs.replace(TcpTransport.capabilities, memory=("cuda",))


def crash(_options):
    os.write(2, b"libbroken: assertion failed: the moon is full\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def need_a_library(_options):
    raise ConfigError("this needs Mooncake (No module named 'mooncake.not_there')")


def need_a_shared_library(_options):
    raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")


CRASHING = Plugin(NoOptions, crash)
UNPACKAGED = Plugin(NoOptions, need_a_library)
UNLINKED = Plugin(NoOptions, need_a_shared_library)
LYING = Plugin(TcpOptions, lambda options: partial(LyingTransport, options))
DEVICE = Plugin(TcpOptions, lambda options: partial(DeviceOnlyTransport, options))
LISTENING = Plugin(TcpOptions, lambda options: partial(ListeningTransport, options))


def install_broken_transports(directory, *kinds):
    """Write the distribution's metadata; the directory belongs on PYTHONPATH."""
    lines = ["[baton.transports]", *(f"{k} = {__name__}:{k.upper()}" for k in kinds)]
    metadata = directory / "broken_transports-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: broken-transports\nVersion: 1.0\n", "utf-8")
    (metadata / "entry_points.txt").write_text("\n".join(lines), "utf-8")
