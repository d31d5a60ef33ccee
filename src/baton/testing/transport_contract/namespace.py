"""The other process lives on another host: a network namespace at the end of a cable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from baton.testing.transport_contract.kit import TransportKit
from baton.testing.transport_contract.process import (
    MAX_QUIESCENCE_S,
    NUM_READS,
    SHAPES,
    OwnerProcess,
    ProcessPlacement,
    WriterProcess,
)
from baton.transfer.interface import ReadCompleted, ReadFailed

if TYPE_CHECKING:
    from baton.testing.far_network import FarHost
    from baton.testing.transport_pair import Side

CUT_TIMEOUT_S = 8.0


class NamespaceContract(TransportKit):
    """For transports between hosts. The cable is a fixture of the session, `far_cable`.

    Laid before the first test of a process: UCX reads the routes once, when it is first used.
    `notices_cuts`: whether the transport itself finds out that a cable was cut. Where it does not,
    the handoff's own link does (`AgentOptions.liveness_timeout_s`), and detaches.
    """

    notices_cuts: ClassVar[bool]

    @pytest.fixture
    def far(self, far_cable: FarHost, monkeypatch: pytest.MonkeyPatch) -> FarHost:
        """The other host; this process's transports bind this end of the cable."""
        monkeypatch.setattr(type(self), "host", far_cable.near_address)
        return far_cable

    def test_a_writer_on_another_host_that_is_killed_leaves_a_quiescent_grant(
        self, far: FarHost
    ) -> None:
        with self.writer_on(far) as writer:
            assert (writer.reader.pages() != 0).all()
            writer.kill()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_quiescent()

    def test_an_owner_on_another_host_is_read_until_it_is_killed(self, far: FarHost) -> None:
        with self.owner_on(far) as owner:
            first = owner.read()
            owner.pump(lambda: owner.num_ended == 1)
            assert owner.ended[0] == ReadCompleted(first, SHAPES[0][0] * SHAPES[0][1])
            owner.check_bytes()
            owner.kill()
            for _ in range(NUM_READS):
                owner.read()
            owner.pump(lambda: owner.is_lost and owner.num_ended == 1 + NUM_READS)
            assert isinstance(owner.ended[-1], ReadFailed)
            owner.check_bytes()

    def test_a_cut_cable_fails_a_read_in_mid_transfer(self, far: FarHost) -> None:
        """16 MiB at 8 MB/s: the cable is cut when some of it has come."""
        with self.owner_on(far) as owner, far.limited(8_000_000):
            owner.read()
            owner.pump_for(0.4)
            assert not owner.ended
            with far.cut():
                if self.notices_cuts:
                    owner.pump(lambda: owner.is_lost, CUT_TIMEOUT_S)
                else:
                    owner.pump_for(MAX_QUIESCENCE_S)
                    owner.reader.transport.detach(owner.remote)
                owner.pump(lambda: owner.num_ended == 1)
            assert isinstance(owner.ended[0], ReadFailed)
            assert owner.ended[0].error.retryable
            owner.check_alive()
            owner.check_bytes()
            owner.pump_for(
                MAX_QUIESCENCE_S
            )  # the cable is there again: nothing of it lands any more
            assert owner.num_ended == 1

    def writer_on(self, far: FarHost) -> WriterProcess:
        """A writer there, which writes into a region here."""
        return WriterProcess(self._make_reader(), self.key, self.options, place_on(far))

    def owner_on(self, far: FarHost) -> OwnerProcess:
        """An owner there, whose region is read from here."""
        return OwnerProcess(self._make_reader(), self.key, self.options, place_on(far))

    def _make_reader(self) -> Side:
        return self.make_side(SHAPES)


def place_on(far: FarHost) -> ProcessPlacement:
    """Where a process of that host is started, and what it binds."""
    return ProcessPlacement(far.prefix, far.address)
