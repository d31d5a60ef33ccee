"""`tcp` over TLS: the whole contract, and peers whose certificates are not to be trusted."""

import logging
import socket
import threading

import pytest

from baton.errors import ConfigError, TransferError
from baton.testing.transport_contract import (
    MultiArrayContract,
    NetworkReadingContract,
    TransportContract,
)
from baton.testing.transport_contract.kit import NUM_PAGES, TransportKit, check_write
from baton.testing.transport_contract.peers import ALL_PAGES, UnauthenticatedPeerContract
from baton.testing.transport_contract.process import ProcessContract
from baton.testing.transport_pair import TransportPair
from baton.transfer.interface import TRANSPORTS, RemoteLost
from tests.contract.certificates import make_authority, make_certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    make_authority(directory, "ours")
    make_authority(directory, "theirs")
    return {
        "good": make_certificate(directory, "good", authority="ours"),
        "expired": make_certificate(directory, "expired", authority="ours", days=-1),
        "foreign": make_certificate(directory, "foreign", authority="theirs"),
    }


class TestTcpOverTls(
    TransportContract, ProcessContract, NetworkReadingContract, MultiArrayContract
):
    kind = "tcp"
    peer_writes = False

    @pytest.fixture(autouse=True)
    def _encrypt(self, certificates, monkeypatch):
        options = {"tls": certificates["good"], "stripe_bytes": 65_536}
        monkeypatch.setattr(type(self), "options", options)

    def test_it_claims_to_encrypt(self):
        side = self.make_side()
        assert side.transport.capabilities.encrypted
        side.close()

    def test_segments_are_counted(self, pair):
        check_write(pair, pair.attach(), pair.open_grant(range(NUM_PAGES)), ALL_PAGES)
        sent = pair.writer.transport.take_segments()
        assert sent[pair.reader.epoch].num_bytes > NUM_PAGES * 8192

    def test_no_page_crosses_in_plain(self, pair):
        """A relay between the two sees every byte: the page's are not among them."""
        pair.writer.region.memory[:] = b"\x5a" * len(pair.writer.region.memory)
        host, port = pair.reader.descriptor.endpoint.removesuffix("/tls").split(":")
        with Relay((host, int(port))) as relay:
            endpoint = f"127.0.0.1:{relay.port}/tls"
            pair.reader.descriptor = type(pair.reader.descriptor)(
                "tcp",
                pair.reader.region.handle,
                pair.reader.epoch,
                pair.reader.region.arrays,
                endpoint,
            )
            check_write(pair, pair.attach(), pair.open_grant(range(NUM_PAGES)), ALL_PAGES)
            pair.writer.transport.close()
        assert len(relay.seen) > NUM_PAGES * 8192
        assert b"\x5a" * 32 not in relay.seen


class Relay:
    """Passes bytes between connections and one address, and keeps what the dialers said."""

    def __init__(self, target):
        self.target, self.seen = target, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads, self.sockets = [], []
        self.accepting = threading.Thread(target=self.accept)

    def __enter__(self):
        self.accepting.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join()
        for sock in self.sockets:
            sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for sock in (*self.sockets, self.listener):
            sock.close()

    def accept(self):
        while True:
            try:
                dialer, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(self.target)
            self.sockets += [dialer, there]
            for ends in ((dialer, there, self.seen), (there, dialer, bytearray())):
                self.threads.append(threading.Thread(target=pass_on, args=ends))
                self.threads[-1].start()


def pass_on(source, target, seen):
    try:
        while data := source.recv(65_536):
            seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


class TcpKit(TransportKit):
    kind = "tcp"

    def __init__(self, tls):
        self.options = {"tls": tls} if tls else {}


def attach_one_to_another(dialer_tls, listener_tls):
    """What the dialer hears of an attach that must fail."""
    pair = TransportPair.of(TcpKit(dialer_tls).make_side(), TcpKit(listener_tls).make_side())
    try:
        pair.writer.transport.attach(pair.reader.descriptor)
        pair.pump(lambda: bool(pair.writer_events))
        pair.poll_for(0.02)
        assert [type(event) for event in pair.writer_events] == [RemoteLost]
        assert not pair.reader_events
        return str(pair.writer_events[0].error)
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("dialer", "listener", "logged"),
    [
        ("good", "foreign", "the peer's certificate: self-signed certificate"),
        ("good", "expired", "the peer's certificate: certificate has expired"),
        ("expired", "good", "the peer refused this side's TLS: certificate expired"),
    ],
)
def test_a_certificate_that_is_not_to_be_trusted_is_refused(
    certificates, caplog, dialer, listener, logged
):
    with caplog.at_level(logging.WARNING):
        error = attach_one_to_another(certificates[dialer], certificates[listener])
    assert logged in error
    assert "certificate" in caplog.text


def test_plain_does_not_begin_to_talk_to_tls(certificates):
    for dialer, listener, logged in (
        (None, certificates["good"], "the peer speaks TLS, and this worker does not"),
        (certificates["good"], None, "the peer does not speak TLS"),
    ):
        with pytest.raises(TransferError, match=logged):
            attach_one_to_another(dialer, listener)


def test_a_plain_peer_behind_an_endpoint_that_promises_tls_is_refused(certificates, caplog):
    plain, secret = TcpKit(None).make_side(), TcpKit(certificates["good"]).make_side()
    pair = TransportPair.of(secret, plain)
    plain.descriptor = type(plain.descriptor)(
        "tcp",
        plain.region.handle,
        plain.epoch,
        plain.region.arrays,
        plain.descriptor.endpoint + "/tls",
    )
    pair.writer.transport.attach(plain.descriptor)
    pair.pump(lambda: bool(pair.seen(RemoteLost)))
    assert "closed the connection" in str(pair.seen(RemoteLost)[0].error)
    pair.close()


class KitOverTls(UnauthenticatedPeerContract):
    kind = "tcp"


def test_a_plain_dialer_is_hung_up_on_by_tls(certificates, caplog):
    kit = KitOverTls()
    kit.options = {"tls": certificates["good"]}
    side = kit.make_side()
    host, port = side.descriptor.endpoint.removesuffix("/tls").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as dialer:
        dialer.sendall(b"\x16\0\0\0BATON\1" + bytes(16))
        with caplog.at_level(logging.WARNING):
            kit.check_hung_up(side, dialer)
    assert "the peer does not speak TLS" in caplog.text
    side.close()


def test_a_silent_tls_peer_does_not_make_the_dialer_spin(certificates):
    """While the handshake waits for the peer, readiness does not say that something can be done."""
    side = TcpKit(certificates["good"]).make_side()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        descriptor = type(side.descriptor)(
            "tcp",
            side.region.handle,
            side.epoch,
            side.region.arrays,
            f"127.0.0.1:{silent.getsockname()[1]}/tls",
        )
        pair = TransportPair.of(side, TcpKit(None).make_side())
        side.transport.attach(descriptor)
        pair.poll_for(0.1)
        num_ready = sum(pair._wait(0.01) for _ in range(10))
        assert num_ready == 0
        pair.close()


@pytest.mark.parametrize("broken", ["certificate", "key", "ca"])
def test_files_that_cannot_be_used_are_refused_at_once(certificates, tmp_path, broken):
    (tmp_path / "broken.pem").write_text("no certificate", "ascii")
    for file in ("broken.pem", "absent.pem"):
        tls = {**certificates["good"], broken: str(tmp_path / file)}
        with pytest.raises(ConfigError, match=file):
            TcpKit(tls).make_side()


def test_half_a_configuration_is_refused(certificates):
    with pytest.raises(ConfigError, match="key"):
        TRANSPORTS.build("tcp", {"tls": {"certificate": certificates["good"]["certificate"]}})
