"""Part files as files: around the page cache where that is possible, by way of it elsewhere."""

import fcntl
import mmap
import os

import numpy as np
import pytest

from baton.errors import PeerUnreachableError, ProtocolError, TransferError
from baton.transfer.interface import PageArray
from baton.transfer.scatter_gather import Geometry
from baton.transfer.transports.file.spool import (
    IncomingPartFile,
    OutgoingPartFile,
    find_spool,
    is_aligned,
)

PAYLOAD = np.random.default_rng(0).integers(0, 256, 65_536, np.uint8).tobytes()


def aligned_memory():
    memory = memoryview(mmap.mmap(-1, len(PAYLOAD)))
    memory[:] = PAYLOAD
    return memory


def geometry_of(start, length):
    return Geometry(np.array([0, 1]), np.array([start]), np.array([length]))


@pytest.mark.parametrize("sync", [True, False])
def test_a_direct_part_file_does_not_touch_the_page_cache(tmp_path, sync):
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem cannot")
    path, source = tmp_path / "part_file", aligned_memory()
    part_file = OutgoingPartFile(
        path, iter([[source[:4096], source[4096:]]]), direct=True, sync=sync
    )
    assert fcntl.fcntl(part_file._fd, fcntl.F_GETFL) & os.O_DIRECT
    assert not path.exists()
    while not part_file.write_slice():
        pass
    part_file.close()
    assert path.read_bytes() == PAYLOAD
    target = memoryview(mmap.mmap(-1, len(PAYLOAD)))
    incoming = IncomingPartFile(path, len(PAYLOAD), iter([[target]]), direct=True)
    assert fcntl.fcntl(incoming._fd, fcntl.F_GETFL) & os.O_DIRECT
    while not incoming.read_slice():
        pass
    incoming.close()
    assert target == PAYLOAD
    assert not path.exists()


def test_a_direct_part_file_that_the_file_refuses_goes_by_way_of_the_page_cache(tmp_path):
    path, source = tmp_path / "part_file", aligned_memory()
    part_file = OutgoingPartFile(
        path, iter([[source[1:4097], source[:3]]]), direct=True, sync=False
    )
    while not part_file.write_slice():
        pass
    assert path.read_bytes() == PAYLOAD[1:4097] + PAYLOAD[:3]


@pytest.mark.parametrize(
    ("offset", "page_bytes", "start", "length", "expected"),
    [
        (0, 8192, 0, 8192, True),
        (4096, 8192, 4096, 4096, True),
        (64, 8192, 0, 8192, False),
        (0, 8192 + 64, 0, 4096, False),
        (0, 8192, 512, 4096, False),
        (0, 8192, 0, 512, False),
    ],
)
def test_only_whole_multiples_are_aligned(offset, page_bytes, start, length, expected):
    array = PageArray(offset, page_bytes, 2)
    assert is_aligned(geometry_of(start, length), aligned_memory(), array) == expected


def test_what_is_not_finished_leaves_nothing(tmp_path):
    part_file = OutgoingPartFile(
        tmp_path / "part_file", iter([[aligned_memory()]]), direct=False, sync=False
    )
    assert [path.name for path in tmp_path.iterdir()] == ["part_file.part"]
    part_file.close()
    part_file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_an_error(tmp_path):
    (tmp_path / "part_file.part").touch()
    with pytest.raises(TransferError, match="File exists"):
        OutgoingPartFile(tmp_path / "part_file", iter([]), direct=False, sync=False)


def test_a_part_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path, target = tmp_path / "part_file", bytearray(len(PAYLOAD))
    path.write_bytes(PAYLOAD)
    incoming = IncomingPartFile(path, len(PAYLOAD), iter([[memoryview(target)]]), direct=False)
    os.truncate(path, 100)
    with pytest.raises(ProtocolError, match="shorter"):
        incoming.read_slice()
    incoming.close()


def test_a_pipe_in_place_of_a_part_file_is_not_waited_for(tmp_path):
    path, target = tmp_path / "part_file", bytearray(100)
    os.mkfifo(path)
    with pytest.raises(ProtocolError, match="it has 0"):
        IncomingPartFile(path, 100, iter([[memoryview(target)]]), direct=False)


def test_a_pipe_in_place_of_a_folders_proof_is_not_waited_for(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "proof")
    with pytest.raises(PeerUnreachableError, match="is not the peer's folder"):
        find_spool(tmp_path, "folder", bytes(16))
