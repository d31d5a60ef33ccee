import socket
from contextlib import contextmanager

import pytest

from baton.errors import TransferError
from baton.transfer.endpoints import format_endpoint, open_dialer, parse_tcp_endpoint
from baton.transfer.transports.tcp.sockets import (
    TcpOptions,
    fit_buffers,
    open_listener,
    open_stream,
)
from tests.descriptors import no_descriptors

BUFFERS = (socket.SO_SNDBUF, socket.SO_RCVBUF)


@pytest.mark.parametrize("address", [("127.0.0.1", 80), ("10.1.2.3", 65535), ("::1", 9)])
def test_endpoints_are_read_as_they_were_written(address):
    assert parse_tcp_endpoint(format_endpoint(*address)) == address


@pytest.mark.parametrize(
    "endpoint",
    ["", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "localhost:80",
     "0.0.0.0:80", "[::]:80", "224.0.0.1:80", "127.0.0.1:80:80", "1:2:3", "127.0.0.1:-1"],
)  # fmt: skip
def test_what_is_no_address_of_a_peer_is_refused(endpoint):
    with pytest.raises(TransferError, match="no address"):
        parse_tcp_endpoint(endpoint)


@pytest.mark.parametrize(
    "open_one",
    [
        lambda: open_stream(("127.0.0.1", 80), TcpOptions()),
        lambda: open_dialer("network", "127.0.0.1:80"),
        lambda: open_dialer("host", "baton-" + "0123456789abcdef" * 2),
    ],
    ids=["tcp", "network", "host"],
)
def test_without_a_descriptor_left_a_peer_is_out_of_reach(open_one):
    with no_descriptors(), pytest.raises(TransferError, match="Too many open files"):
        open_one()


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_each_rank_listens_at_the_configured_port_plus_its_number():
    options = TcpOptions(port=find_free_port() - 3)
    listener, endpoint = open_listener("127.0.0.1", options, rank=3)
    with listener:
        listener.listen()
        assert parse_tcp_endpoint(endpoint) == ("127.0.0.1", options.port + 3)
        with pytest.raises(TransferError, match=f"port {options.port + 3} of"):
            open_listener("127.0.0.1", options, rank=3)


def test_a_port_is_taken_again_though_a_connection_to_it_is_still_ending():
    options = TcpOptions(port=find_free_port())
    with connection(options, "127.0.0.1") as (dialed, accepted):
        accepted.close()  # first, so that this end waits for late packets
        dialed.close()
    listener, endpoint = open_listener("127.0.0.1", options)
    with listener:
        assert parse_tcp_endpoint(endpoint)[1] == options.port


def test_a_rank_beyond_the_last_port_is_refused():
    with pytest.raises(TransferError, match="port 65536 of"):
        open_listener("127.0.0.1", TcpOptions(port=65_535), rank=1)


@contextmanager
def connection(options, source):
    """Both ends of a stream to 127.0.0.1 that comes from `source`, buffers fitted."""
    listener, endpoint = open_listener("127.0.0.1", options)
    with listener, open_stream(parse_tcp_endpoint(endpoint), options) as dialed:
        listener.listen()
        dialed.bind((source, 0))
        dialed.connect(parse_tcp_endpoint(endpoint))
        accepted, _ = listener.accept()
        with accepted:
            for end in (dialed, accepted):
                fit_buffers(end, options)
            yield dialed, accepted


def sizes_of(sock):
    """Linux doubles what it is asked for, and reports that."""
    return [sock.getsockopt(socket.SOL_SOCKET, option) // 2 for option in BUFFERS]


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("127.0.0.1", {}, 1 << 17),
        ("127.0.0.2", {}, 1 << 18),  # another address: for all that is known, another host
        ("127.0.0.1", {"local_buffer_bytes": 1 << 19}, 1 << 18),  # never larger than elsewhere
    ],
)
def test_buffers_are_smaller_where_both_ends_are_on_one_host(source, options, expected):
    wanted = {"socket_buffer_bytes": 1 << 18, "local_buffer_bytes": 1 << 17, **options}
    with connection(TcpOptions(**wanted), source) as ends:
        assert [sizes_of(end) for end in ends] == [[expected] * 2] * 2


def test_the_kernels_own_tuning_stays_on_where_it_is_wanted():
    options = TcpOptions(socket_buffer_bytes=None, local_buffer_bytes=1 << 17)
    with connection(options, "127.0.0.1") as (dialed, _):
        before = sizes_of(dialed)
        fit_buffers(dialed, options)
        assert sizes_of(dialed) == before != [1 << 17] * 2


def test_a_connection_that_is_gone_is_left_to_whoever_reads_it():
    with socket.socket() as never_connected:
        before = sizes_of(never_connected)
        fit_buffers(never_connected, TcpOptions())
        assert sizes_of(never_connected) == before
