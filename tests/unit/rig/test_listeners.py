"""Who listens where, from the kernel's tables."""

import sys

import pytest

from baton.rig.machine import find_open_listeners, parse_address

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid inode"
REST = "00000000:00000000 00:00000000 00000000     0        0"

pytestmark = pytest.mark.skipif(sys.byteorder == "big", reason="recorded on a little-endian host")


def process(root, *rows, six=(), sockets=()):
    for name, lines in (("tcp", rows), ("tcp6", six)):
        table = root / "net" / name
        table.parent.mkdir(exist_ok=True)
        table.write_text("\n".join([HEAD, *lines]))
    (root / "fd").mkdir()
    for fd, inode in enumerate(sockets):
        (root / "fd" / str(fd)).symlink_to(f"socket:[{inode}]")
    (root / "fd" / "99").symlink_to("/dev/null")
    return root


def row(address, state, inode):
    return f"   0: {address} 00000000:0000 {state} {REST} {inode} 1 0000000000000000 100 0 0 10 0"


def test_only_what_this_process_listens_on_outside_loopback(tmp_path):
    root = process(
        tmp_path,
        row("0100007F:1F90", "0A", 1),  # loopback
        row("00000000:1F91", "0A", 2),  # every interface
        row("0500A8C0:1F92", "0A", 3),  # 192.168.0.5
        row("00000000:1F93", "0A", 4),  # another process's
        row("0500A8C0:1F94", "01", 5),  # a connection
        six=(
            row("00000000000000000000000001000000:1F95", "0A", 6),  # ::1
            row("0000000000000000FFFF00000100007F:1F96", "0A", 7),  # ::ffff:127.0.0.1
            row("00000000000000000000000000000000:1F97", "0A", 8),  # ::
        ),
        sockets=(1, 2, 3, 5, 6, 7, 8),
    )
    assert find_open_listeners(root) == ("0.0.0.0:8081", "192.168.0.5:8082", "[::]:8087")


def test_without_proc_nothing_is_known(tmp_path):
    assert find_open_listeners(tmp_path) == ()


def test_addresses():
    assert [str(part) for part in parse_address("0100007F:1F90")] == ["127.0.0.1", "8080"]
