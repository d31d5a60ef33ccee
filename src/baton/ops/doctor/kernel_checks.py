"""What the kernel allows this process, tried: memfd, huge pages, proof of death, CMA."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import select
import signal
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError
from baton.ops.doctor.finding import Area, Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.ops.doctor.host import Host

CHECK_BYTES: Final = 1 << 20
DEATH_TIMEOUT_S: Final = 1.0
SECRET: Final = b"baton-doctor-reads-this"

HUGE_CHECK_BYTES: Final = 16 << 20
ALLOW_HUGE_PAGES: Final = (
    "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled  # and Linux 6.1 or newer"
)
_MAPPING: Final = re.compile("([0-9a-f]+)-([0-9a-f]+) ")

_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("3i")


def check_memfd(_host: Host) -> list[Finding]:
    """Make, commit, seal and map a memfd, as `shared` regions are."""
    why = "`shared` and vLLM's pools live in sealed memfds: memory that a peer cannot cut short."
    try:
        fd = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, CHECK_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, CHECK_BYTES, flags=mmap.MAP_SHARED) as memory:
            memory[:1] = b"x"
        cut = _refusal(lambda: os.ftruncate(fd, 0))
    except (OSError, AttributeError) as exc:
        return [_finding("memfd", Level.WARNING, f"does not work: {exc}", why)]
    if cut is None:
        return [_finding("memfd", Level.WARNING, "the kernel cut a sealed memfd short", why)]
    return [_finding("memfd", Level.OK, "made, sealed and mapped; cutting it was refused", why)]


def check_huge_regions(_host: Host) -> list[Finding]:
    """Allocate a region of each kind, and count its huge pages."""
    from baton.transfer import region as regions  # noqa: PLC0415 - numpy, in the probe only

    why = (
        "With huge pages a KV pool starts ten times faster, and a peer maps it in no time; copies "
        "are a few percent faster over `shared`, and much faster over NIXL."
    )
    shapes, found = [(1, HUGE_CHECK_BYTES)], {}
    for kind, allocate in (
        ("shared", regions.allocate_shared_region),
        ("private", regions.allocate_host_region),
    ):
        region = allocate(shapes)
        region.memory[:] = bytes(HUGE_CHECK_BYTES)
        found[kind] = _count_huge_bytes(regions.view_pages(region.memory, region.arrays[0]))
        regions.release_region(region)
    counts = ", ".join(f"{kind} {num >> 20} MiB" for kind, num in found.items())
    text = f"of regions of {HUGE_CHECK_BYTES >> 20} MiB: {counts}"
    if found["shared"]:
        return [_finding("huge pages in regions", Level.OK, text, why)]
    return [_finding("huge pages in regions", Level.NOTE, text, why, fix=ALLOW_HUGE_PAGES)]


def _count_huge_bytes(pages: NDArray[np.uint8]) -> int:
    """Bytes that are mapped in huge pages, in the mapping that holds these pages."""
    address, num_bytes, is_inside = int(pages.ctypes.data), 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        mapping = _MAPPING.match(line)
        if mapping is not None:
            is_inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif is_inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
            num_bytes += int(line.split()[1]) << 10
    return num_bytes


def check_pidfd(_host: Host) -> list[Finding]:
    """Watch a process through the Unix socket that it connected with, kill it, and notice."""
    why = (
        "`shared` lets a peer write into this worker's pages, and may reuse them after a crash "
        "only when the peer's process is proved dead."
    )
    if not hasattr(os, "pidfd_open"):
        return [_finding("pidfd", Level.WARNING, "this system has no pidfd", why)]
    with socket.socket(socket.AF_UNIX) as listener:
        pid = _fork_peer(listener)
        try:
            how = _detect_exit(listener, pid)
        except OSError as exc:
            return [_finding("pidfd", Level.WARNING, f"does not work: {exc}", why)]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [_finding("pidfd", Level.OK, f"a peer's death was noticed ({how})", why)]


def check_cma(host: Host) -> list[Finding]:
    """Read the memory of a process that is no child of the reader (CMA, process_vm_readv)."""
    why = (
        "UCX (and NIXL over it) copies between processes with it; without, it is slower there. "
        "Baton's own `shared` does not need it."
    )
    scope = host.read("/proc/sys/kernel/yama/ptrace_scope")
    setting = "no yama" if scope is None else f"kernel.yama.ptrace_scope = {scope}"
    try:
        _read_parent_in_child()
    except TransferError as exc:
        return [
            _finding(
                "CMA",
                Level.NOTE,
                f"refused: {exc}; {setting}",
                why,
                fix="docker run --cap-add=SYS_PTRACE …"
                if scope in {None, "0"}
                else "sudo sysctl -w kernel.yama.ptrace_scope=0",
            )
        ]
    return [_finding("CMA", Level.OK, f"another process's memory was read; {setting}", why)]


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_parent_in_child() -> None:
    """Raises `TransferError` with the reason where the kernel refuses.

    The child reads the parent: the other way round is allowed even where peers may not.
    """
    secret = ctypes.create_string_buffer(SECRET)
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_fd, _read_memory(parent, ctypes.addressof(secret), len(SECRET)))
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    if output != b"ok":
        raise TransferError(output.decode(errors="replace") or "the reading process died")


def _read_memory(pid: int, address: int, num_bytes: int) -> bytes:
    """`ok`, or why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return b"this system has no process_vm_readv"
    # The child's copy of the secret lies in another place: what is read comes from the parent.
    into = ctypes.create_string_buffer(num_bytes)
    local = _IoVec(ctypes.cast(into, ctypes.c_void_p), num_bytes)
    remote = _IoVec(address, num_bytes)
    count = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if count < 0:
        return os.strerror(ctypes.get_errno()).encode()
    return b"ok" if into.raw == SECRET else b"other bytes were read than are there"


def _fork_peer(listener: socket.socket) -> int:
    """A child that connects and waits for its end."""
    listener.bind("")  # the kernel chooses an abstract name: no file
    listener.listen()
    listener.settimeout(DEATH_TIMEOUT_S)
    pid = os.fork()
    if pid == 0:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(listener.getsockname())
                signal.pause()
        finally:
            os._exit(1)
    return pid


def _detect_exit(listener: socket.socket, pid: int) -> str:
    """Kill the peer; by which means its death was noticed.

    Raises:
        OSError: the kernel gives no pidfd, or the death was not noticed.
    """
    connection, _ = listener.accept()
    with connection:
        try:
            fd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
            how = "SO_PEERPIDFD"
        except OSError:
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            fd = os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
            how = "SO_PEERCRED and pidfd_open"
        os.kill(pid, signal.SIGKILL)
        is_detected = bool(select.select([fd], [], [], DEATH_TIMEOUT_S)[0])
        os.close(fd)
    if not is_detected:
        raise TimeoutError(f"a death was not noticed within {DEATH_TIMEOUT_S:g} s")
    return how


def _refusal(attempt: Callable[[], None]) -> OSError | None:
    try:
        attempt()
    except OSError as exc:
        return exc
    return None


def _finding(name: str, level: Level, found: str, why: str, *, fix: str | None = None) -> Finding:
    return Finding(area=Area.KERNEL, name=name, level=level, found=found, why=why, fix=fix)
