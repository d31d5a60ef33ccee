"""`baton doctor` as a person runs it: on this machine, with broken transports, on a small /dev/shm,
and against a gateway that runs."""

import asyncio
import http.server
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.gateway.fallbacks import FallbackCause
from baton.gateway.metrics import BrokenStreamCause, GatewayMetrics
from baton.ops.doctor.finding import Area, Level, Report
from baton.protocol.alerts import Alert, AlertList, AlertName, AlertState
from baton.protocol.gateway_http import ALERTS_PATH
from baton.protocol.request_traces import ListedRequest, RequestList, RequestTrace
from baton.protocol.worker_http import Role
from baton.telemetry.trace import RequestSpan, summarize
from baton.transfer.devices.table import TABLE_BYTES, read_table
from tests.forked_module import ForkingSubprocess, run_forked
from tests.integration import patient_doctor
from tests.integration.broken_transports import install_broken_transports
from tests.integration.gateway_cluster import run, until_true
from tests.integration.patient_doctor import TRIED_TRANSPORTS

ROOT = Path(__file__).parents[2]
DOCTOR = (sys.executable, "-m", "baton.cli", "doctor")
PATIENT_DOCTOR = (sys.executable, "-m", patient_doctor.__name__, "doctor")
TIMEOUT_S = 240
LIBRARIES = ("nixl_cu12", "nixl_cu13", "mooncake")


def environment(tmp_path, *paths):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    python_path = os.pathsep.join(map(str, (*paths, ROOT)))
    return {**kept, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": python_path}


def doctor(tmp_path, *arguments, paths=(), before=(), without=LIBRARIES, tried=None):
    """The doctor's report and its exit code. Libraries take a second to start, twice each.

    `tried`: of all transports that are installed, the names of those to try.
    """
    paths = (*paths, tmp_path / "without")
    paths[-1].mkdir(exist_ok=True)
    for name in without:
        (paths[-1] / f"{name}.py").write_text("raise ImportError", "utf-8")
    done = subprocess.run(
        [*before, *PATIENT_DOCTOR, "--json", *arguments],
        capture_output=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environment(tmp_path, *paths) | ({TRIED_TRANSPORTS: tried} if tried else {}),
    )
    assert done.stderr == b"", done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Report), done.returncode


def ask_about(tmp_path, gateway):
    """Its report on this gateway's fleet, and its exit code."""
    done = run_forked([*DOCTOR, "--json", "--gateway", gateway], environment(tmp_path), TIMEOUT_S)
    assert done.stderr == ""
    return msgspec.json.decode(done.stdout, type=Report), done.returncode


def of(report, area):
    return {finding.name: finding for finding in report.findings if finding.area is area}


def test_this_machine(tmp_path):
    before = os.times()
    report, code = doctor(tmp_path, without=())
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of children: others may have the cores meanwhile
    assert cpu_s < 20, "a few seconds"
    assert code == 0, [each for each in report.findings if each.level is Level.PROBLEM]
    transports = of(report, Area.TRANSPORTS)
    assert transports["handoff path"].level is Level.OK
    for kind in ("shared", "tcp"):
        assert transports[kind].level is Level.OK, transports[kind]
        assert "every byte verified" in transports[kind].found
    for name, finding in of(report, Area.KERNEL).items():
        assert name == "CMA" or finding.level is Level.OK, finding
    assert {area for area in Area if of(report, area)} == set(Area) - {Area.FLEET, Area.STORE}
    names = [(finding.area, finding.name) for finding in report.findings]
    assert len(set(names)) == len(names)


def test_text_for_a_file_and_for_a_terminal(tmp_path):
    listed = 200, msgspec.json.encode(RequestList(()))
    ours, theirs = pty.openpty()
    with gateway_that_says({**READY, "/debug/requests": listed}) as url:
        command = (*DOCTOR, "--gateway", url)
        text = run_forked(command, environment(tmp_path), TIMEOUT_S).stdout
        assert max(map(len, text.splitlines())) <= 100
        assert "\x1b" not in text
        assert "transports used" in text

        process = ForkingSubprocess.Popen(
            command,
            stdout=theirs,
            env={**environment(tmp_path), "TERM": "xterm-256color"},
        )
        os.close(theirs)
        shown = b""
        while more := read_terminal(ours):
            shown += more
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)
    assert b"\x1b[32m" in shown  # green


def read_terminal(fd):
    try:
        return os.read(fd, 65536)
    except OSError:  # what a pseudo-terminal says at its end
        return b""


def test_transports_that_are_broken_are_reported_with_the_reason(tmp_path):
    broken = ("crashing", "lying", "misnamed", "unpackaged", "unlinked", "device")
    install_broken_transports(tmp_path, *broken)
    report, code = doctor(
        tmp_path,
        *("--set", "transfer.transports=lying,tcp"),
        paths=(tmp_path,),
        tried=" ".join((*broken, "shared", "tcp")),
    )
    seen = of(report, Area.TRANSPORTS)
    assert code == 0
    assert seen["shared"].level is Level.OK
    levels = {name: seen[name].level for name in broken}
    assert levels == dict.fromkeys(broken, Level.NOTE) | {"lying": Level.WARNING}, "it is chosen"
    assert seen["handoff path"].level is Level.WARNING
    assert "SIGSEGV" in seen["crashing"].found
    assert "the moon is full" in seen["crashing"].found
    assert seen["lying"].found == ("does not work: 48 pages of 32 KiB, push: other pages changed")
    assert seen["device"].found == "not tried: it moves cuda memory only"
    assert "MISNAMED" in seen["misnamed"].found
    assert seen["unpackaged"].found == (
        "does not work: the Python package mooncake.not_there is not installed"
    )
    install = f"{sys.executable} -m pip install mooncake-transfer-engine"
    assert (seen["unpackaged"].fix or "").startswith(install)
    assert seen["unlinked"].found == (
        "does not work: the system lacks libibverbs.so.1, which its library needs"
    )
    assert seen["unlinked"].fix == "sudo apt-get install libibverbs1 libnuma1"


def test_shared_without_room_for_its_memory_falls_back_to_tcp(tmp_path):
    # No file, a memfd included, may be larger than 512 KiB: a region has 2 MiB.
    before = ("bash", "-c", 'ulimit -f 512 && exec "$@"', "bash")
    report, code = doctor(tmp_path, before=before, tried="shared tcp")
    seen = of(report, Area.TRANSPORTS)
    assert seen["shared"].level is Level.WARNING
    assert "File too large" in seen["shared"].found
    assert of(report, Area.KERNEL)["memfd"].level is Level.WARNING
    assert code == (0 if seen["tcp"].level is Level.OK else 1)
    assert seen["handoff path"].level is (Level.WARNING if code == 0 else Level.PROBLEM)


ISOLATE = "ip link set lo up && mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""Run in a network and a mount namespace of its own."""


def can_isolate():
    command = ("unshare", "-nm", "sh", "-c", ISOLATE)
    return (
        shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0
    )


@pytest.mark.skipif(not can_isolate(), reason="this user may not have namespaces of its own")
def test_64_mib_of_shared_memory_and_a_transport_that_listens_on_every_interface(tmp_path):
    install_broken_transports(tmp_path, "listening")
    script = f"{ISOLATE} && stat -f -c '%S %b' /dev/shm > {tmp_path}/size && exec \"$@\""
    before = ("unshare", "-nm", "sh", "-c", script, "sh")
    report, code = doctor(tmp_path, paths=(tmp_path,), before=before, tried="shared listening")
    block_bytes, num_blocks = map(int, (tmp_path / "size").read_text().split())
    assert block_bytes * num_blocks == 64 << 20, "the fault did not happen"
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize != 64 << 20
    shm = of(report, Area.MEMORY)["/dev/shm"]
    assert shm.level is Level.WARNING
    assert shm.found == "64 MiB, 64 MiB free"
    assert shm.fix is not None
    seen = of(report, Area.TRANSPORTS)
    assert seen["shared"].level is Level.OK  # a memfd is not in /dev/shm
    assert seen["listening"].level is Level.OK
    assert seen["listening listens"].level is Level.WARNING
    assert "0.0.0.0:" in seen["listening listens"].found
    assert code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gateway", "127.0.0.1:8000"],
        ["--gateway", "http://127.0.0.1:99999"],
        ["--gateway", "http://a/b"],
        ["--set", "transfer.transport=tcp"],
        ["--bogus"],
    ],
)
def test_a_wrong_command_line_exits_with_2(tmp_path, arguments):
    done = run_forked([*DOCTOR, *arguments], environment(tmp_path), TIMEOUT_S)
    assert done.returncode == 2
    assert not done.stdout or "Error" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_fleet_of_which_a_worker_is_lost(tmp_path):
    async def scenario(cluster):
        report, code = await asyncio.to_thread(ask_about, tmp_path, cluster.url)
        assert [f for f in report.findings if f.level is not Level.OK] == []
        assert code == 0

        cluster.prefills[0].kill()

        async def is_noticed():
            return await cluster.metric("baton_gateway_worker_up{") == 2

        await until_true(is_noticed)
        report, code = await asyncio.to_thread(ask_about, tmp_path, cluster.url)
        down = [f for f in report.findings if f.level is Level.WARNING]
        assert [(f.name, code) for f in down] == [("prefill worker", 0)]
        assert down[0].found == f"{cluster.prefills[0].url} is down; 1 of this role up"

    run(scenario, prefills=2)


@contextmanager
def gateway_that_says(pages):
    """An HTTP server with these pages: path → (status, body)."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = pages.get(self.path, (404, b'{"error": {"message": "not here"}}'))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def listed_request(request_id):
    return ListedRequest(
        id=request_id,
        status=200,
        mode="push",
        outcome="stop",
        received_at=0.0,
        first_token_s=None,
        total_s=None,
        peer=None,
        model="",
        trace_id="",
    )


def trace_page(request_id, used, expected):
    """The page that a gateway would show for a request, by the gateway's own types."""
    leg = RequestSpan(
        request_id=request_id,
        worker="d",
        epoch="0" * 32,
        role="decode",
        transport=used,
        expected_transport=expected,
    )
    page = RequestTrace(
        id=request_id,
        status=200,
        placement=(),
        summary=summarize(None, leg, None),
        gateway=leg,
        decode=leg,
        prefill=None,
        missing=(),
    )
    return 200, msgspec.json.encode(page)


READY = {"/ready": (200, b'{"status": "ready"}'), "/metrics": (200, b"")}


def test_handoffs_by_another_transport_than_expected(tmp_path):
    used = ["tcp", "tcp", "shared", None]
    listed = RequestList(tuple(listed_request(f"r {i}") for i in range(5)))
    pages = {**READY, "/debug/requests": (200, msgspec.json.encode(listed))}
    for i, kind in enumerate(used):  # the fifth is forgotten
        pages[f"/debug/requests/r%20{i}"] = trace_page(f"r {i}", kind, kind and "shared")
    with gateway_that_says(pages) as url:
        report, code = ask_about(tmp_path, url)
    assert code == 0
    mismatch = of(report, Area.FLEET)["transport mismatch"]
    assert mismatch.level is Level.WARNING
    assert mismatch.found == "2 of the latest 3 handoffs used tcp where shared was expected"


def test_a_gateway_that_counts_trouble(tmp_path):
    metrics = GatewayMetrics()
    metrics.fallbacks[FallbackCause.PREFILL_LOST].inc(3)
    metrics.broken_streams[BrokenStreamCause.WORKER_LOST].inc()
    metrics.worker_up("http://a;rm -rf \x1b[31m", Role.DECODE, up=False)
    refusal = {"error": {"message": "not ready: no decode \x1b[2Jworker"}}
    pages = {"/ready": (503, json.dumps(refusal).encode()), "/metrics": (200, metrics.exposition())}
    with gateway_that_says(pages) as url:
        report, code = ask_about(tmp_path, url)
    seen = of(report, Area.FLEET)
    assert code == 1
    assert seen["gateway"].level is Level.PROBLEM
    assert "no decode" in seen["gateway"].found
    assert seen["fallbacks"].found == "3 x prefill_lost"
    assert seen["broken streams"].level is Level.WARNING
    assert seen["decode worker"].fix is not None
    assert seen["decode worker"].fix.startswith("curl -sS 'http://a;rm -rf ")
    assert "its own host only" in seen["transports used"].found
    assert all(finding.found.isprintable() for finding in report.findings)


def test_a_gateway_whose_alerts_fire(tmp_path):
    def alert(name, state, severity):
        return Alert(
            alert=name,
            state=state,
            severity=severity,
            labels={"to": "d"},
            summary="slow \x1b[2J",
            value=2.0,
            starts_at=1.0,
            runbook_url="https://docs.example/#x"
            if name is AlertName.DIGEST_FAILURES
            else "alerts.md#x",
        )

    listed = AlertList(
        alerts=(
            alert(AlertName.LINK_DRIFT, AlertState.FIRING, "warning"),
            alert(AlertName.DIGEST_FAILURES, AlertState.FIRING, "critical"),
            alert(AlertName.STORE_SLOWER, AlertState.PENDING, "warning"),
            alert(AlertName.LEASES_LAPSED, AlertState.RESOLVED, "warning"),
        )
    )
    with gateway_that_says({**READY, ALERTS_PATH: (200, msgspec.json.encode(listed))}) as url:
        report, code = ask_about(tmp_path, url)
    seen = of(report, Area.FLEET)
    assert code == 1
    assert seen["BatonLinkDrift"].level is Level.WARNING
    assert seen["BatonDigestFailures"].level is Level.PROBLEM
    assert f"{url}/dashboard/runbook.html#batonlinkdrift" in seen["BatonLinkDrift"].why
    assert "https://docs.example/#x" in seen["BatonDigestFailures"].why
    assert not {"BatonStoreSlower", "BatonLeasesLapsed", "alerts"} & seen.keys()
    assert all(finding.found.isprintable() for finding in report.findings)
    with gateway_that_says(READY) as url:
        report, code = ask_about(tmp_path, url)
    assert (code, of(report, Area.FLEET)["alerts"].level) == (0, Level.NOTE)


OTHER_NONSENSE = (b"{", b"a{b 1\n", b"[]" * 1000)


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", *(pytest.param(each, marks=pytest.mark.every) for each in OTHER_NONSENSE)],
)
def test_a_gateway_that_talks_nonsense(tmp_path, body):
    pages = dict.fromkeys(("/ready", "/metrics", "/debug/requests", ALERTS_PATH), (200, body))
    with gateway_that_says(pages) as url:
        report, code = ask_about(tmp_path, url)
    assert code == 0
    assert of(report, Area.FLEET)["transports used"].level is Level.NOTE
    assert of(report, Area.FLEET)["alerts"].level is Level.NOTE


def test_no_gateway(tmp_path):
    report, code = ask_about(tmp_path, "http://127.0.0.1:1")
    (finding,) = report.findings
    assert (finding.level, code) == (Level.PROBLEM, 1)
    assert "Connection refused" in finding.found


def test_the_doctor_tries_shared_over_the_device_that_is_configured(tmp_path):
    device = tmp_path / "device"
    device.write_bytes(b"\xee" * (16 << 20))
    chosen = ("--set", f"transfer.options.shared.device.path={device}")
    report, code = doctor(tmp_path, *chosen, paths=(ROOT / "src",), tried="shared")
    (shared,) = [f for f in report.findings if (f.area, f.name) == (Area.TRANSPORTS, "shared")]
    assert (shared.level, code) == (Level.OK, 0), shared.found
    with device.open("rb") as file:
        assert len(read_table(file.read(TABLE_BYTES)).extents) == 2  # one of each side
    os.truncate(device, 2 << 20)
    report, _ = doctor(tmp_path, *chosen, paths=(ROOT / "src",), tried="shared")
    (shared,) = [f for f in report.findings if (f.area, f.name) == (Area.TRANSPORTS, "shared")]
    assert shared.level is not Level.OK
    assert "at least 4194304 are needed" in shared.found
