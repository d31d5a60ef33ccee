from __future__ import annotations

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.config.sections import AlertsSection, GatewaySection
from baton.errors import ConfigError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.protocol.worker_http import Role

KEY = Credentials.of(ClusterKey(b"k" * 32))
DECODE = WorkerAddress("https://127.0.0.1:9000", Role.DECODE)
PREFILL = WorkerAddress("https://127.0.0.1:9001", Role.PREFILL)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_configured_key(host):
    assert GatewayOptions(addresses=(DECODE,), credentials=KEY, host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_elsewhere_a_configured_key_is_needed(host):
    with pytest.raises(ConfigError, match="no cluster key is configured"):
        GatewayOptions(addresses=(DECODE,), credentials=KEY, host=host)
    settings = {"addresses": (DECODE,), "credentials": KEY, "key_origin": "configured"}
    GatewayOptions(**settings, host=host, insecure=True)


@pytest.mark.parametrize("workers", [(), (PREFILL,)])
def test_somebody_must_decode(workers):
    with pytest.raises(ConfigError, match="no worker can decode"):
        GatewayOptions(addresses=workers, credentials=KEY)


def test_a_worker_is_listed_once():
    again = WorkerAddress("https://127.0.0.1:9000/", Role.PREFILL)
    with pytest.raises(ConfigError, match=r"listed twice: https://127\.0\.0\.1:9000"):
        GatewayOptions(addresses=(DECODE, again), credentials=KEY)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9000",
        "ftp://127.0.0.1",
        "http://",
        "http://h:1/v1",
        "http://h:1?x=1",
        "http://h:1#x",
        "http://h:99999",
        "http://[h",
        "http://xn--a:1",
        "",
    ],
)
def test_a_workers_address_is_an_origin(url):
    with pytest.raises(ConfigError, match="is not a worker's address"):
        WorkerAddress(url, Role.DECODE)


@pytest.mark.parametrize("name", ["max_body_bytes", "request_timeout_s", "probe_interval_s"])
def test_limits_are_above_zero(name):
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: 0}, GatewaySection)


def test_a_worker_that_proves_nothing_is_listed_only_where_tls_is_off():
    plain = WorkerAddress("http://127.0.0.1:9001", Role.PREFILL)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9001 does not prove who answers"):
        GatewayOptions(addresses=(DECODE, plain), credentials=KEY)
    GatewayOptions(addresses=(DECODE, plain), credentials=KEY, tls="off")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (("file:/a", "file:/a"), "names a source twice"),
        (("etcd:/a",), r"names no source; write it as KIND:ARGUMENT, with a KIND of: .*dns.*file"),
        (("/run/members.json",), "names no source"),
        (("file:members.json",), "no absolute path"),
        (("dns:workers:8100",), "is not dns:ROLE=HOST:PORT"),
    ],
)
def test_a_source_that_cannot_be_followed_is_refused_at_the_start(members, why):
    with pytest.raises(ConfigError, match=why):
        GatewayOptions(addresses=(DECODE,), credentials=KEY, members=members)


def test_workers_may_all_come_later():
    assert GatewayOptions(addresses=(), credentials=KEY, members=("file:/a",)).addresses == ()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "HTTP://127.0.0.1:1"])
def test_however_it_is_written_an_address_without_tls_is_refused(url):
    assert WorkerAddress(url, Role.DECODE).is_plain
    with pytest.raises(ConfigError, match="does not prove who answers"):
        GatewayOptions(addresses=(WorkerAddress(url, Role.DECODE),), credentials=KEY)


def announcing(**options):
    given = {"addresses": (DECODE,), "credentials": KEY, "key_origin": "configured"}
    given["members"] = () if options.get("announce_port", 9000) is None else ("announced",)
    return GatewayOptions(**{**given, "announce_port": 9000, **options})


def test_each_of_several_processes_takes_announcements_at_a_port_of_its_own():
    options = announcing(processes=3, management_port=7000, peers=("https://gw-2:9000",))
    last = options.of_process(2, status_fd=5)
    assert (last.processes, last.status_fd) == (1, 5)
    assert (last.management_port, last.announce_port) == (7002, 9002)
    assert last.announce_url == "https://127.0.0.1:9002"
    assert last.first_share == pytest.approx(2 / 3), "it begins with other workers than they do"
    siblings = ("https://127.0.0.1:9000", "https://127.0.0.1:9001")
    assert last.peers == ("https://gw-2:9000", *siblings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"announce_host": "0.0.0.0"}, r"no other process can reach 0\.0\.0\.0"),
        ({"announce_host": "10.0.0.1", "key_origin": "generated"}, "without a configured"),
        ({"peers": ("http://gw:9000",)}, r"gateway\.peers: 'http://gw:9000'"),
        ({"announce_url": "gw:9000"}, r"gateway\.announce_url: 'gw:9000'"),
        ({"announce_port": None, "peers": ("https://gw:9000",)}, r"give gateway\.announce_port"),
        ({"announce_port": 0, "processes": 2, "management_port": 1}, "need a fixed"),
    ],
)
def test_a_gateway_that_takes_announcements_can_be_reached(options, message):
    with pytest.raises(ConfigError, match=message):
        announcing(**options)


@pytest.mark.parametrize("options", [{"members": ()}, {"announce_port": None}])
def test_announcements_and_their_source_go_together(options):
    with pytest.raises(ConfigError, match="go together"):
        announcing(**{"members": ("announced",), **options})


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"webhook_url": "file:///secret"}, "alerts.webhook_url is not a URL"),
        ({"webhook_url": "https://"}, "alerts.webhook_url is not a URL"),
        ({"webhook_url": "http://[h/secret"}, "alerts.webhook_url is not a URL"),
        ({"disabled": ("BatonLinkDrift", "LinkDrift")}, "'LinkDrift'; there are BatonLinkDrift"),
    ],
)
def test_alerts_that_cannot_be_raised_or_posted_are_refused(section, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        GatewayOptions(addresses=(DECODE,), credentials=KEY, alerts=AlertsSection(**section))
    assert "secret" not in str(refused.value)
