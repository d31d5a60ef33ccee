"""One process under a supervisor: restarts, drain, replacement; its key and settings."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from baton.clock import MachineClock
from baton.config.resolve import CommandLine, resolve
from baton.launch.errors import FleetError
from baton.launch.ray import hosted_process
from baton.launch.ray.hosted_process import HostedProcess, RayHost
from baton.launch.ray.plan import plan_fleet
from baton.launch.ray.process import NUM_LINES, LogTail, SupervisedProcess
from baton.launch.restarts import RestartPolicy
from baton.protocol.members import decode_members

STUB = str(Path(__file__).with_name("stub_child.py"))
WITHIN_S = 10.0
KEY = "ab" * 32


def stub(behaviour, environment=None, **policy):
    return SupervisedProcess(
        "decode-0",
        lambda ports: (sys.executable, STUB, behaviour, str(ports.http)),
        dict(os.environ, **(environment or {})),
        MachineClock(),
        restarts=RestartPolicy(first_delay_s=0.01, **policy),
    )


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_killed_process_starts_again_at_its_address():
    async def scenario():
        process = stub("worker")
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "ready")
        url, pid = process.url, process.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: process.state == "ready" and process.pid not in {None, pid})
        assert (process.url, process.num_restarts) == (url, 1)
        assert process.up_s < WITHIN_S
        process.mark_draining()
        assert process.state == "draining"
        await process.stop(WITHIN_S)
        await life
        assert (process.state, process.reason, process.pid) == ("ended", "exit code 0", None)

    asyncio.run(scenario())


def test_a_process_that_ends_too_often_is_failed_and_tried_again(tmp_path):
    behaviour = tmp_path / "behaviour"
    behaviour.write_text("broken")

    async def scenario():
        process = SupervisedProcess(
            "decode-0",
            lambda _: (sys.executable, STUB, behaviour.read_text(), "0"),
            os.environ,
            MachineClock(),
            restarts=RestartPolicy(max_restarts=2, first_delay_s=0.05),
        )
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "failed")
        assert process.url is None
        assert "ended too often (exit code 3): a dependency is missing" in process.reason
        assert process.reason.endswith("next try after 0.2 s")
        assert process.lines.last(1).lines == ("No module named 'steam'",)
        assert process.num_restarts == 2
        behaviour.write_text("worker")
        await until(lambda: process.state == "ready")
        assert process.reason == ""
        await process.stop(WITHIN_S)
        await life

    asyncio.run(scenario())


def test_a_failed_process_is_replaced_or_stopped_during_its_pause():
    behaviours = ["broken", "worker", "broken"]

    async def scenario():
        process = SupervisedProcess(
            "decode-0",
            lambda _: (sys.executable, STUB, behaviours.pop(0), "0"),
            os.environ,
            MachineClock(),
            restarts=RestartPolicy(max_restarts=0, first_delay_s=300.0),
        )
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "failed")
        await process.replace(WITHIN_S)
        await until(lambda: process.state == "ready")
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: process.state == "failed")
        async with asyncio.timeout(WITHIN_S):
            await process.stop(WITHIN_S)
            await life
        assert process.state == "ended"

    asyncio.run(scenario())


def test_a_preempted_process_drains_by_itself_and_is_not_started_again(tmp_path):
    notice = tmp_path / "notice"

    async def scenario():
        process = stub("spot", {"STUB_DIE_FILE": str(notice)})
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "ready")
        notice.touch()
        await until(lambda: process.preempted is not None)
        assert process.url is not None, "gateways move its streams"
        notice.touch()
        await life
        assert (process.state, process.reason) == ("ended", "its machine will be taken")
        assert (process.url, process.num_restarts) == (None, 0)
        await process.stop(WITHIN_S)

    asyncio.run(scenario())


def test_a_process_that_does_not_drain_is_killed():
    async def scenario():
        process = stub("stubborn")
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "ready")
        await process.stop(0.1)
        await life
        assert process.reason == "killed by SIGKILL"

    asyncio.run(scenario())


def test_a_successor_takes_over_when_it_is_ready():
    behaviours = ["worker", "broken", "worker"]

    async def scenario():
        process = SupervisedProcess(
            "gateway-0",
            lambda _: (sys.executable, STUB, behaviours.pop(0), "0"),
            os.environ,
            MachineClock(),
            restarts=RestartPolicy(max_restarts=0),
        )
        life = asyncio.create_task(process.run())
        await until(lambda: process.state == "ready")
        pid = process.pid
        with pytest.raises(FleetError, match="the old one serves as before; its last line: No mod"):
            await process.replace(WITHIN_S)
        assert (process.pid, process.state) == (pid, "ready")
        await process.replace(WITHIN_S)
        await until(lambda: process.state == "ready" and process.pid not in {None, pid})
        await process.stop(WITHIN_S)
        await life
        assert process.state == "ended"

    asyncio.run(scenario())


def test_what_was_never_started_stops_at_once():
    async def scenario():
        process = stub("worker")
        await process.stop(WITHIN_S)
        await process.run()
        assert (process.state, process.pid) == ("ended", None)

    asyncio.run(scenario())


def test_log_lines_are_bounded_and_numbered():
    tail = LogTail()
    for number in range(NUM_LINES + 10):
        tail.append(f"{number}" + "x" * 5000)
    assert len(tail.since(0).lines) == NUM_LINES
    assert max(map(len, tail.since(0).lines)) <= 2000
    last = tail.last(2)
    assert [line[:4] for line in last.lines] == ["2008", "2009"]
    assert tail.since(last.next_number).lines == ()
    tail.append("new")
    assert tail.since(last.next_number).lines == ("new",)
    assert tail.since(10**6).lines == tail.since(0).lines, "of a life on another host"


class Fleet:
    """Other supervisors, one of which has the key after `num_refusals` questions."""

    def __init__(self, num_refusals=0):
        self.num_refusals = num_refusals

    async def list_names(self, timeout_s):
        if self.num_refusals:
            self.num_refusals -= 1
            raise FleetError("Ray's head is away")
        return frozenset({"decode-0", "decode-1", "prefill-0"})

    async def call(self, name, method, *arguments, timeout_s):
        if method == "status":
            raise FleetError("no answer")
        assert method == "key"
        if name == "decode-1":
            raise FleetError("no answer")
        return KEY


def hosted(fleet, monkeypatch, folder, name="decode-0", *, has_key_file=False, **environment):
    monkeypatch.setattr(hosted_process, "KEY_INTERVAL_S", 0.01)
    assignments = ["gateway.insecure=true", "engine.dtype=float32"]
    resolved = resolve(CommandLine(assignments=assignments), {})
    return HostedProcess(
        name,
        plan_fleet(resolved, "f", "1", "cost", has_key_file=has_key_file),
        RayHost("127.0.0.1", {"rack": "r1", "ray.io/availability-zone": "z"}),
        supervisors=fleet,
        environment={
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "RAY_JOB_ID": "1",
            "BATON_CONFIG": "/nowhere.toml",
            **environment,
        },
        clock=MachineClock(),
    )


@pytest.fixture(name="folder")
def folder_fixture():
    """With a path that has room for sockets' names: pytest's own is too long in some processes."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield Path(folder)


def show_environment(process, monkeypatch):
    """Have it print its environment and its command line in place of a worker's start."""
    code = "import os, sys; print(sorted(os.environ.items()))"
    seen = []

    def command(ports):
        seen.append(HostedProcess._command(process, ports))
        return (sys.executable, "-c", code)

    monkeypatch.setattr(process._process, "_command", command)
    return seen


@pytest.mark.parametrize("num_refusals", [0, 3])
def test_a_process_that_ray_started_again_gets_the_key_from_another(
    monkeypatch, folder, num_refusals
):
    process = hosted(Fleet(num_refusals), monkeypatch, folder)
    commands = show_environment(process, monkeypatch)

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process.lines(0).lines)
        await process.stop()
        await life

    asyncio.run(scenario())
    printed = process.lines(0).lines[0]
    assert f"('BATON_CLUSTER_KEY', '{KEY}')" in printed
    assert "RAY_JOB_ID" not in printed
    assert "BATON_CONFIG" not in printed
    assert KEY not in " ".join(commands[0])
    assert "worker.topology=z/r1" in commands[0]
    path = folder / "baton" / "ray-f-decode-0" / "settings.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert tomllib.loads(path.read_text())["engine"] == {"dtype": "float32"}
    assert KEY not in path.read_text()


def test_with_a_key_file_no_key_is_asked_for(monkeypatch, folder):
    process = hosted(None, monkeypatch, folder, has_key_file=True, BATON_CLUSTER_KEY="other")
    show_environment(process, monkeypatch)

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process.lines(0).lines)
        await process.stop()
        await life

    asyncio.run(scenario())
    assert "BATON_CLUSTER_KEY" not in process.lines(0).lines[0]


def test_without_a_key_it_waits_and_reports_that(monkeypatch, folder):
    process = hosted(Fleet(10**6), monkeypatch, folder)

    async def scenario():
        life = asyncio.create_task(process.run())
        await asyncio.sleep(0.05)
        report = await process.report()
        assert (report.state, report.host, report.labels["rack"]) == ("starting", "127.0.0.1", "r1")
        assert "waits for the cluster key" in report.reason
        life.cancel()

    asyncio.run(scenario())


def test_a_directory_that_others_can_change_is_refused(monkeypatch, folder):
    (folder / "baton").mkdir()
    (folder / "baton").chmod(0o777)
    process = hosted(Fleet(), monkeypatch, folder)

    async def scenario():
        await process.run()
        report = await process.report()
        assert report.state == "failed"
        assert "can be changed by other users" in report.reason

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("decode-0", "settings.toml"),
        ("gateway-0", "settings.toml"),
        ("gateway-0", ".members.json.new"),
    ],
)
def test_a_process_on_a_full_disk_starts_when_there_is_room(monkeypatch, folder, name, file):
    monkeypatch.setattr(hosted_process, "DISK_INTERVAL_S", 0.01)
    own = folder / "baton" / f"ray-f-{name}"
    own.mkdir(parents=True, mode=0o700)
    own.parent.chmod(0o700)
    (own / file).symlink_to("/dev/full")
    process = hosted(Fleet(), monkeypatch, folder, name, BATON_GATEWAY__PORT="0")
    show_environment(process, monkeypatch)

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process._failure is not None)
        report = await process.report()
        assert report.state == "failed"
        assert f"cannot write into {own}: No space left on device; make room" in report.reason
        assert not process.lines(0).lines, "it was started all the same"
        (own / file).unlink()
        await until(lambda: process.lines(0).lines)
        assert process._failure is None
        await process.stop()
        await life

    asyncio.run(scenario())


def test_a_gateways_command_names_its_file_of_workers_and_its_sockets(monkeypatch, folder):
    process = hosted(Fleet(), monkeypatch, folder, "gateway-0", BATON_GATEWAY__PORT="0")
    commands = show_environment(process, monkeypatch)

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process.lines(0).lines)
        port = process._sockets.port
        await process.stop()
        await life
        return port

    port = asyncio.run(scenario())
    own = folder / "baton" / "ray-f-gateway-0"
    assert f'gateway.members=["file:{own}/members.json"]' in commands[0]
    assert {"gateway.host=127.0.0.1", f"gateway.port={port}", "--listen-fds"} <= set(commands[0])
    assert decode_members((own / "members.json").read_bytes()).workers == ()


def test_a_gateway_starts_when_its_port_is_free(monkeypatch, folder):
    monkeypatch.setattr(hosted_process, "PORT_INTERVAL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = hosted(Fleet(), monkeypatch, folder, "gateway-0", BATON_GATEWAY__PORT=port)
        show_environment(process, monkeypatch)

        async def scenario():
            life = asyncio.create_task(process.run())
            await until(lambda: process._failure is not None)
            report = await process.report()
            assert (report.state, f"port {port} on 127.0.0.1 is taken" in report.reason) == (
                "failed",
                True,
            )
            taken.close()
            await until(lambda: process.lines(0).lines)
            await process.stop()
            await life

        asyncio.run(scenario())


def test_a_gateway_is_ready_when_it_serves_and_names_the_workers_that_it_uses(monkeypatch, folder):
    process = hosted(Fleet(), monkeypatch, folder, "gateway-0", BATON_GATEWAY__PORT="0")
    answers = {"/ready": b'{"error":"no worker"}', "/metrics": b"", "/": b""}
    monkeypatch.setattr(hosted_process, "get", lambda url, path: answers[path])
    monkeypatch.setattr(
        process._process, "_command", lambda _: (sys.executable, STUB, "worker", "0")
    )

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process._process.state == "ready")
        report = await process.report()
        assert (report.state, report.reason) == ("starting", '{"error":"no worker"}')
        assert await process.list_used() == frozenset()
        answers["/ready"] = b'{"status":"ready"}'
        answers["/metrics"] = b'baton_gateway_worker_up{role="both",url="https://a:1"} 1.0\n'
        assert (await process.report()).state == "ready"
        assert await process.list_used() == {"https://a:1"}
        await process.stop()
        await life

    asyncio.run(scenario())


def test_a_gateway_with_client_keys_answers_its_supervisor_elsewhere(monkeypatch, folder):
    keys = {"BATON_GATEWAY__TLS_CERTIFICATE": "/c.pem", "BATON_GATEWAY__TLS_KEY": "/k.pem"}
    process = hosted(Fleet(), monkeypatch, folder, "gateway-0", BATON_GATEWAY__PORT="0", **keys)
    commands = show_environment(process, monkeypatch)

    async def scenario():
        life = asyncio.create_task(process.run())
        await until(lambda: process.lines(0).lines)
        await process.stop()
        await life

    asyncio.run(scenario())
    assert {"--management-fds", "gateway.management_port=0"} <= set(commands[0])
