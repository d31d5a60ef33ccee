"""Endpoints that come from a peer."""

import socket

import pytest

from baton.clock import MachineClock
from baton.errors import TransferError
from baton.ids import new_epoch
from baton.transfer.endpoints import open_dialer, open_listener
from baton.transfer.interface import TransportContext
from baton.transfer.transports import mooncake, nixl
from baton.transfer.transports.mooncake.session import MooncakeOptions
from baton.transfer.transports.nixl.session import NixlOptions

NAME = "baton-" + "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("reach", "endpoint"),
    [
        ("host", "127.0.0.1:80"),
        ("host", "baton-xyz"),
        ("host", NAME + "0"),
        ("host", ""),
        ("network", NAME),
        ("network", "example.invalid:80"),
        ("network", "127.0.0.1:0"),
        ("network", "127.0.0.1:65536"),
        ("network", "0.0.0.0:80"),
        ("network", "224.0.0.1:80"),
        ("network", "127.0.0.1"),
    ],
)
def test_an_endpoint_of_another_reach_is_refused(reach, endpoint):
    with pytest.raises(TransferError):
        open_dialer(reach, endpoint)


@pytest.mark.parametrize(
    ("reach", "endpoint", "address"),
    [
        ("host", NAME, b"\0" + NAME.encode()),
        ("network", "10.1.2.3:80", ("10.1.2.3", 80)),
        ("network", "[fd00::2]:80", ("fd00::2", 80)),
    ],
)
def test_an_endpoint_is_where_to_connect(reach, endpoint, address):
    sock, found = open_dialer(reach, endpoint)
    sock.close()
    assert found == address


def test_the_kernel_finds_a_peer_that_is_cut_off_from_both_ends():
    listener, endpoint = open_listener("network", "127.0.0.1", None)
    dialer, address = open_dialer("network", endpoint)
    with listener, dialer:
        listener.listen()
        dialer.connect(address)
        accepted, _ = listener.accept()
        with accepted:
            for sock in (dialer, accepted):
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                timeout_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert timeout_ms == 10_000


def test_an_address_that_says_nothing_to_a_peer_is_not_listened_on():
    with pytest.raises(TransferError, match="advertise_host"):
        open_listener("network", "0.0.0.0", None)


def library_args(module, options):
    """What a library's sessions are opened with, where the worker has bound all addresses."""
    context = TransportContext(None, new_epoch(), "0.0.0.0", MachineClock())
    transport = module._make_transport(options, context)
    transport.close()
    return transport._library.open_session.args


def test_where_all_addresses_are_bound_libraries_use_the_interface_of_the_announced_one():
    options = MooncakeOptions(advertise_host="127.0.0.1")
    assert library_args(mooncake, options) == ("127.0.0.1", "lo")
    options = NixlOptions(lanes="network", advertise_host="127.0.0.1")
    (parameters,) = library_args(nixl, options)
    assert parameters["engine_config"] == "TLS=^sm,NET_DEVICES=lo"


def test_where_all_addresses_are_bound_and_none_is_announced_no_library_listens():
    with pytest.raises(TransferError, match=r"no network interface.*nixl\.device"):
        library_args(nixl, NixlOptions(lanes="network"))
