import pytest

from baton.errors import TransferError
from baton.transfer.transports.tcp.addresses import format_endpoint, parse_endpoint


@pytest.mark.parametrize("address", [("127.0.0.1", 80), ("10.1.2.3", 65535), ("::1", 9)])
def test_endpoints_are_read_as_they_were_written(address):
    assert parse_endpoint(format_endpoint(*address)) == address


@pytest.mark.parametrize(
    "endpoint",
    ["", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "localhost:80",
     "0.0.0.0:80", "[::]:80", "224.0.0.1:80", "127.0.0.1:80:80", "1:2:3", "127.0.0.1:-1"],
)  # fmt: skip
def test_what_is_no_address_of_a_peer_is_refused(endpoint):
    with pytest.raises(TransferError, match="no address"):
        parse_endpoint(endpoint)
