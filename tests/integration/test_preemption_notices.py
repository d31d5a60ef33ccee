"""A preemption notice: each source over its real protocol, and what follows in a process."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from baton.clock import MachineClock
from baton.config.sections import PreemptionSection
from baton.errors import PeerUnreachableError, ProtocolError
from baton.net.metadata_services import LEAST_NOTICE_S, MOST_NOTICE_S
from baton.net.preemption import LEAVE_BEFORE_S, PreemptionNotice, PreemptionWatch, open_source
from baton.protocol.worker_http import Health
from baton.telemetry.process_status import Draining, StatusReporter, read_status
from baton.testing.clocks import ManualClock
from tests.integration.metadata_server import Cloud, serving

WITHIN_S = 20.0
CLOUDS = ("aws", "gcp", "azure")


def source_of(kind, **settings):
    return open_source(PreemptionSection(source=kind, **settings), "decode-0", MachineClock())


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_cloud_gives_a_notice_with_its_time(kind):
    cloud = Cloud()
    with serving(cloud, kind) as url:
        source = source_of(kind, url=url, notice_s=30.0)
        assert source.look() is None
        cloud.preempt(in_s=110.0)
        found = source.look()
        again = source.look()
    assert found is not None
    assert again is not None
    assert found.in_s == (30.0 if kind == "gcp" else pytest.approx(110.0, abs=10.0))
    assert found.what == {
        "aws": "terminate",
        "gcp": "preempted",
        "azure": "Preempt, Scheduled",
    }.get(kind)


@pytest.mark.parametrize("kind", ["aws", "azure"])
@pytest.mark.parametrize(("in_s", "taken"), [(-7200.0, LEAST_NOTICE_S), (7200.0, MOST_NOTICE_S)])
def test_the_time_of_a_clock_that_is_wrong_is_bounded(kind, in_s, taken):
    cloud = Cloud()
    cloud.preempt(in_s=in_s)
    with serving(cloud, kind) as url:
        assert source_of(kind, url=url).look().in_s == taken


def test_the_token_of_a_session_that_is_over_is_renewed():
    cloud = Cloud()
    with serving(cloud, "aws") as url:
        source = source_of("aws", url=url)
        assert source.look() is source.look() is None
        assert cloud.num_tokens == 1
        cloud.token = "another"
        assert source.look() is None
        assert cloud.num_tokens == 2


def test_a_long_poll_ends_with_the_change():
    cloud = Cloud()
    with serving(cloud, "gcp") as url:
        source = source_of("gcp", url=url)
        assert source.look() is None
        found = []
        looking = threading.Thread(target=lambda: found.append(source.look()), daemon=True)
        looking.start()
        deadline = time.monotonic() + WITHIN_S
        while len(cloud.asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "wait_for_change=true" in cloud.asked[1][1]
        assert looking.is_alive(), "it waits"
        cloud.preempt(in_s=30.0)
        looking.join(WITHIN_S)
    assert [each.what for each in found] == ["preempted"]


def test_events_of_other_machines_and_of_other_types_are_not_this_ones():
    cloud = Cloud()
    cloud.preempt(in_s=30.0)
    with serving(cloud, "azure") as url:
        source = source_of("azure", url=url)
        cloud.resources = ["vm-6"]
        assert source.look() is None
        cloud.resources, cloud.event_type = ["vm-6", "vm-7"], "Reboot"
        assert source.look() is None
        cloud.event_type = "Preempt"
        assert source.look() is not None


@pytest.mark.parametrize("kind", CLOUDS)
def test_what_is_not_documented_is_an_error_with_its_remedy(kind):
    cloud = Cloud()
    cloud.broken_status = 500
    with serving(cloud, kind) as url:
        source = source_of(kind, url=url)
        with pytest.raises(ProtocolError, match=r"answered 500 to /.*out of order"):
            source.look()
    with pytest.raises(PeerUnreachableError, match=r"change preemption\.source"):
        source.look()


def test_the_second_signal_counts_only_if_somebody_sent_both(tmp_path):
    read_fd, write_fd = os.pipe()
    clock = ManualClock()
    section = PreemptionSection(source="file", file=str(tmp_path / "{worker}.notice"))
    watch = PreemptionWatch(section, "decode-0", clock, StatusReporter(write_fd))
    assert watch.describe_health() == Health("draining")
    watch.notice = PreemptionNotice("its machine will be taken", clock.now() + 20.0)
    assert watch.note_signal(30.0) == 20.0 - LEAVE_BEFORE_S, "the notice's own"
    assert watch.describe_health().preempted_in_s == 20.0
    assert watch.note_signal(30.0) == 20.0 - LEAVE_BEFORE_S, "the machine goes all the same"
    assert watch.note_signal(30.0) is None
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as lines:
        assert [read_status(line) for line in lines] == [Draining(20.0 - LEAVE_BEFORE_S)]


def test_a_notice_in_mid_drain_shortens_it():
    read_fd, write_fd = os.pipe()
    clock = ManualClock()
    watch = PreemptionWatch(PreemptionSection(), "decode-0", clock, StatusReporter(write_fd))
    assert watch.note_signal(30.0) == 30.0
    clock.advance(4.0)
    watch.notice = PreemptionNotice("its machine will be taken", clock.now() + 12.0)
    assert watch.note_signal(30.0) == 12.0 - LEAVE_BEFORE_S
    clock.advance(1.0)
    assert watch.note_signal(30.0) is None
    os.close(read_fd)
    os.close(write_fd)


def test_a_token_that_no_header_can_have_is_asked_for_again():
    cloud = Cloud()
    cloud.token_end = "\n-"
    with serving(cloud, "aws") as url:
        source = source_of("aws", url=url)
        with pytest.raises(ProtocolError, match="answered 200 to /latest/api/token"):
            source.look()
        cloud.token_end = ""
        cloud.preempt(in_s=30.0)
        assert source.look() is not None


def test_what_nobody_expected_does_not_end_the_watch(caplog):
    """No socket has this port: a ValueError."""
    section = PreemptionSection(source="aws", url="http://127.0.0.1:99999", interval_s=0.01)
    watch = PreemptionWatch(section, "decode-0", MachineClock(), StatusReporter(-1))
    watch.start()
    until(lambda: "Port out of range" in caplog.text)
    assert "Traceback" in caplog.text
    assert any(thread.name == "preemption-watch" for thread in threading.enumerate())


def until(is_so):
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PROCESS = """
import signal, sys, threading
from baton.clock import MachineClock
from baton.config.sections import PreemptionSection
from baton.net.preemption import PreemptionWatch
from baton.telemetry.process_status import StatusReporter

section = PreemptionSection(source="file", file=sys.argv[1], interval_s=0.02, notice_s=25.0)
watch = PreemptionWatch(section, "decode-0", MachineClock(), StatusReporter(1))
ended = threading.Event()

def end(*_):
    print(watch.note_signal(60.0), flush=True)
    ended.set()

signal.signal(signal.SIGTERM, end)
watch.start()
print("watches", flush=True)
while not ended.wait(0.05):
    pass
"""


def test_a_file_that_appears_drains_the_process_whose_name_it_has(tmp_path):
    template = str(tmp_path / "{worker}.notice")
    process = subprocess.Popen([sys.executable, "-c", PROCESS, template], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"watches\n"
        (tmp_path / "decode-1.notice").touch()
        time.sleep(0.1)
        assert process.poll() is None
        (tmp_path / "decode-0.notice").touch()
        output, _ = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
        process.wait()
    status, drain_s = output.splitlines()
    assert json.loads(status)["preempted"].startswith("its machine will be taken (file: ")
    assert 0 < float(drain_s) <= 25.0 - LEAVE_BEFORE_S
    assert process.returncode == 0
