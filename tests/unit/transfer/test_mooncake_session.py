"""Mooncake's process, where it cannot be started."""

import pytest

from baton.errors import TransferError
from baton.transfer.transports.mooncake.session import MooncakeSession
from tests.descriptors import no_descriptors


def test_without_a_descriptor_left_a_session_fails_as_transfers_do():
    with no_descriptors(), pytest.raises(TransferError, match="Too many open files"):
        MooncakeSession("127.0.0.1", "lo", protocol="tcp", devices="")
