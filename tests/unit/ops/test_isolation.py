"""Probes that crash, hang, shout or leave children behind harm nobody."""

import faulthandler
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from baton.clock import MachineClock
from baton.ops.doctor.finding import Area, Finding, Level, Probe
from baton.ops.doctor.host import this_host
from baton.ops.doctor.isolation import NUM_AT_ONCE, run_probes


def finding(name, found="well"):
    return Finding(area=Area.KERNEL, name=name, level=Level.OK, found=found, why="a test")


def run(*looks, timeout_s=5.0):
    """A probe for each look; it has time enough if it is `well`, on a busy machine too."""
    probes = [
        Probe(Area.KERNEL, f"probe {n}", look, Level.WARNING, 30.0 if look is well else timeout_s)
        for n, look in enumerate(looks)
    ]
    return run_probes(probes, this_host(), MachineClock())


def well(_host):
    return [finding("well")]


def raises(_host):
    os.write(1, b"noise before the end\n")
    raise ZeroDivisionError("by zero")


def dies(number, _host):
    faulthandler.disable()  # pytest's own: it writes to the terminal
    os.write(2, b"last words\n")
    os.kill(os.getpid(), number)
    return []


def hangs(_host):
    while True:
        signal.pause()


def leaves(_host):
    os._exit(0)


def test_findings_come_in_the_order_of_the_probes():
    looks = [partial(lambda n, _host: [finding(str(n)), finding(f"{n}b")], n) for n in range(20)]
    assert len(looks) > NUM_AT_ONCE
    names = [f.name for f in run(*looks)]
    assert names == [name for n in range(20) for name in (str(n), f"{n}b")]


def test_a_probe_with_nothing_to_say():
    assert run(lambda _host: [], well) == [finding("well")]


@pytest.mark.parametrize(
    ("look", "found"),
    [
        (raises, "the probe failed: ZeroDivisionError: by zero"),
        (partial(dies, signal.SIGSEGV), "killed by SIGSEGV while it was tried: last words"),
        (partial(dies, signal.SIGKILL), "killed by SIGKILL while it was tried: last words"),
        (leaves, "the probe failed"),
        (lambda _host: ["no finding"], "the probe answered nonsense"),
    ],
)
def test_what_crashes_is_a_finding_and_the_others_go_on(look, found, capfd):
    before, broken, after = run(well, look, well)
    assert before == after == finding("well")
    assert (broken.name, broken.level) == ("probe 1", Level.WARNING)
    assert broken.found == found
    assert capfd.readouterr() == ("", "")


def test_what_hangs_is_cut():
    clock = MachineClock()
    started = clock.now()
    assert run(hangs, well, timeout_s=0.3) == [
        Finding(
            area=Area.KERNEL,
            name="probe 0",
            level=Level.WARNING,
            found="no answer within 0.3 s",
            why=run(leaves)[0].why,
        ),
        finding("well"),
    ]
    assert 0.3 <= clock.now() - started < 20, "it was not cut"


def is_ended(pid):
    """Whether a process ends within a moment; a zombie whose parent does not bury it has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 2)[0])
    finally:
        os.close(process)


def test_a_probe_s_own_children_end_with_it():
    def has_a_child(host):
        pid = os.fork()
        if pid == 0:
            hangs(host)
        return [finding(str(pid))]

    (child,) = run(has_a_child)
    assert is_ended(int(child.name))


def test_a_probe_that_never_stops_talking_is_cut():
    def shouts(_host):
        while True:
            os.write(1, b"x" * 10_000)
            if os.fstat(1).st_size > 5_000_000:
                hangs(_host)

    (cut,) = run(shouts, timeout_s=2.5)  # it begins within that, on a busy machine too
    assert cut.found.startswith("no answer within 2.5 s: xxx")
    assert len(cut.found) < 250


def test_nothing_is_left_open():
    """In a process of its own: other tests' threads open and close descriptors here."""
    program = f"from {__name__} import *; check_descriptors()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def check_descriptors() -> None:
    run(well)
    before = find_open()
    run(well, raises, leaves)
    assert find_open() == before


def find_open() -> set[tuple[str, str]]:
    """Descriptors of this process, and what they are of; not that by which they are listed."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add((fd.name, str(fd.readlink())))
    return found
