"""The kit's own processes do not outlive a failed test, and a claim without its suite fails one."""

import subprocess
import sys

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.ids import new_epoch
from baton.testing.transport_contract import MultiArrayContract, ReadingContract, TransportContract
from baton.testing.transport_contract.kit import TransportKit, list_open_fds
from baton.testing.transport_contract.process import SHAPES, OwnerProcess, WriterProcess
from baton.testing.transport_pair import TransportPair
from baton.testing.transport_peer import PeerTask


class Kit(TransportKit):
    kind = "tcp"


@pytest.mark.parametrize("process", [WriterProcess, OwnerProcess])
def test_a_process_that_is_never_attached_is_not_left_behind(process, monkeypatch):
    pump = process.pump
    monkeypatch.setattr(process, "pump", lambda self, until, *_: pump(self, until, 0.5))
    before, kit = list_open_fds(), Kit()
    waited_for = process(kit.make_side(SHAPES), Credentials.generate(), {})
    with pytest.raises(AssertionError), waited_for:
        pytest.fail("the peer holds another key")
    assert waited_for._process.poll() is not None
    assert not list_open_fds() - before


def test_a_peer_that_cannot_attach_says_why_and_ends():
    side = Kit().make_side(SHAPES)
    key_hex = Kit.credentials.key.secret.hex()
    task = PeerTask("tcp", {}, key_hex, new_epoch(), side.descriptor, b"", 1)
    side.close()
    ended = subprocess.run(
        [sys.executable, "-m", "baton.testing.transport_peer"],
        input=msgspec.json.encode(task) + b"\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "transport_peer: not attached: cannot reach the peer" in ended.stderr.decode()


class FileSuites(TransportContract):
    kind = "file"


class FileSuitesAndReads(FileSuites, ReadingContract): ...


class TcpSuitesWithoutReads(TransportContract, MultiArrayContract):
    kind = "tcp"


del TransportContract, MultiArrayContract, ReadingContract


@pytest.mark.parametrize(
    ("suites", "fits"),
    [(FileSuites, True), (FileSuitesAndReads, False), (TcpSuitesWithoutReads, False)],
)
def test_a_claim_without_its_suite_or_a_suite_without_its_claim_fails(suites, fits, tmp_path):
    kit = suites()
    kit.options = {"directory": str(tmp_path)} if kit.kind == "file" else {}
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    try:
        if fits:
            kit.test_every_claim_has_its_suite(pair)
        else:
            with pytest.raises(AssertionError, match="ReadingContract"):
                kit.test_every_claim_has_its_suite(pair)
    finally:
        pair.close()
