"""`baton worker --engine vllm`: why it does not start, how it starts, and how it ends.

One test begins by its command, and `make chaos` has one that starts it so to the end; others take
processes that have vLLM loaded.
"""

import asyncio
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.handoff.lease_file import LeaseFile
from baton.net.tls import ClusterTls
from baton.testing.fleet import start_command
from tests.free_ports import find_free_port
from tests.integration.announcing import gateway
from tests.preloaded import start_preloaded_vllm

START_TIMEOUT_S = 240
POOL = "engine.kv_cache_bytes=134217728"
LEASE, LEASE_S = "worker.announce_lease_s", 2.0


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def runtime():
    """This user's runtime directory: short, since sockets lie in it."""
    path = tempfile.mkdtemp(prefix="b-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path)


@contextmanager
def worker(runtime, *arguments, start=start_command):
    """A running worker; it and what it started are killed at the end whatever happened."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment = {**kept, "XDG_STATE_HOME": str(runtime), "XDG_RUNTIME_DIR": str(runtime)}
    with (runtime / "stderr").open("wb") as stderr:
        process = start(["worker", "--engine", "vllm", *arguments], environment, stderr)
    # Ends what waits for a line.
    watchdog = threading.Timer(START_TIMEOUT_S, process.send_signal, [signal.SIGKILL])
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        process.stdout.close()


def until_said(process, runtime, event, phase=None):
    """What it announces until it announces this."""
    for line in process.stdout:
        said = json.loads(line)
        if said["event"] == event and phase in {None, said.get("phase")}:
            return said
    raise AssertionError((runtime / "stderr").read_text("utf-8"))


def descendants(pid):
    children = [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]
    return [*children, *(pid for child in children for pid in descendants(child))]


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until_gone(pids, timeout_s=5):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not all(is_gone(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if not is_gone(pid)]


def refused(runtime, *arguments, is_loaded=False):
    """What a worker writes that does not start, and has not begun with vLLM unless `is_loaded`."""
    with worker(runtime, *arguments, start=start_preloaded_vllm) as process:
        said = process.stdout.read()
        assert process.wait(timeout=60) == 2
    assert b"ready" not in said
    assert (b"importing vLLM" in said) is is_loaded
    message = (runtime / "stderr").read_text("utf-8")
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere"), "--model /nowhere: there is no such folder"),
        (("--model", "/tmp"), "--model /tmp: no config.json in it"),
        (("--set", "engine.block_size=16"), "multiples of 32"),
        (("--set", f"engine.kv_cache_bytes={2**50}"), "not enough memory: 1073741824 MiB for KV"),
        (("--host", "0.0.0.0"), "0.0.0.0 needs a cluster key"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(runtime, arguments, message):
    assert message in refused(runtime, *arguments)


def test_a_taken_port_is_said_before_anything_loads(runtime):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} is taken" in refused(runtime, "--port", port)


def test_a_flag_that_vllm_does_not_know_is_said_by_vllm(runtime):
    warp = 'engine.arguments=["--warp-speed"]'
    said = refused(runtime, "--set", warp, is_loaded=True)
    assert "unrecognized arguments: --warp-speed" in said


def is_importing(process):
    """Whether it has begun with vLLM: what it imports first maps torch."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def has_engine(process):
    return bool(descendants(process.pid))


@pytest.mark.parametrize(
    ("phase", "is_reached", "start"),
    [
        ("importing vLLM", is_importing, start_command),
        ("starting vLLM's engine", has_engine, start_preloaded_vllm),
    ],
    ids=["importing", "starting"],
)
def test_ctrl_c_while_loading_leaves_at_once_and_nothing_behind(
    runtime, monkeypatch, phase, is_reached, start
):
    monkeypatch.setenv("TESTS_START_METHOD", "spawn")  # as the command starts its engine
    with worker(runtime, "--set", POOL, start=start) as process:
        until_said(process, runtime, "loading", phase)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_reached(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert until_said(process, runtime, "draining")["timeout_s"] == 0.0
        assert until_gone(children) == []
        assert not list(runtime.glob("baton/worker-*"))


def credentials_of(runtime):
    """Of a holder of the key that the worker has made up."""
    return Credentials.of(
        ClusterKey.from_hex((runtime / "baton" / "cluster.key").read_text("ascii"))
    )


@contextmanager
def taking_announcements(port, credentials):
    """A gateway's listener, in a thread of its own; yields what it knows."""
    opened, may_end = queue.SimpleQueue(), threading.Event()

    async def serve():
        async with gateway(port=port, credentials=credentials) as running:
            opened.put(running)
            await asyncio.to_thread(may_end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield opened.get(timeout=10)
    finally:
        may_end.set()
        thread.join()


def until_health(url, tls, status, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10, context=tls) as answer:
                found = answer.status
        except urllib.error.HTTPError as error:
            with error:
                found = error.code
        if found == status:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def ask(url, tls, **fields):
    body = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120, context=tls)


def status_of(question):
    with pytest.raises(urllib.error.HTTPError) as caught:
        question()
    with caught.value as error:
        return error.code, json.load(error)


def check_fence(runtime, url, tls, port, credentials, epoch):
    """It serves, and may write to others, only while a gateway accepts its announcements."""
    (file,) = runtime.glob("baton/worker-*/lease")
    lease, now = LeaseFile.open(file), MachineClock().now
    assert lease.until < now()
    until_health(url, tls, 503)
    code, body = status_of(lambda: ask(url, tls, max_tokens=1))
    assert (code, body["error"]["code"]) == (503, "fenced")
    with taking_announcements(port, credentials) as known:
        until_health(url, tls, 200)
        assert known.epoch_of("v") == epoch
        assert now() < lease.until <= now() + LEASE_S
        answer = ask(url, tls, stream=True, max_tokens=2000, ignore_eos=True)
        assert answer.readline().startswith(b"data: ")
        deadline = time.monotonic() + 10
        while known.count("baton_gateway_heartbeats_total", result="taken") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with answer:
        lines = [line for line in answer if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    assert json.loads(lines[-2].removeprefix(b"data: "))["error"]["code"] == "fenced"
    assert lease.until <= now()
    until_health(url, tls, 503)


@pytest.mark.parametrize(
    "start",
    [start_preloaded_vllm, pytest.param(start_command, marks=pytest.mark.every)],
    ids=["loaded", "command"],
)
def test_a_worker_starts_answers_and_drains(runtime, stack, monkeypatch, start):
    """Its engine and that one's worker are started as the command starts them, and load vLLM."""
    monkeypatch.setenv("TESTS_START_METHOD", "spawn")
    probe_port = find_free_port()

    def probe(path):
        address = f"http://127.0.0.1:{probe_port}{path}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    port = find_free_port()
    options = ("--set", POOL, "--set", "engine.num_threads=1", "--set", "engine.dtype=float32")
    options += ("--announce-to", f"https://127.0.0.1:{port}", "--set", f"{LEASE}={LEASE_S}")
    probes = ("--set", f"worker.probe_port={probe_port}")
    with worker(runtime, "--name", "v", *options, *probes, start=start) as process:
        ready = until_said(process, runtime, "ready")
        url, engines = ready["url"], descendants(process.pid)
        credentials = credentials_of(runtime)
        tls = ClusterTls(credentials).dialing
        check_fence(runtime, url, tls, port, credentials, ready["epoch"])
        stack.enter_context(taking_announcements(port, credentials))
        until_health(url, tls, 200)
        assert (probe("/live"), probe("/ready"), probe("/v1/models")) == (200, 200, 404)
        assert (ready["worker"], ready["role"]) == ("v", "both")
        assert ready["epoch"]
        assert int(ready["handoff_address"].rpartition(":")[2]) > 0
        (directory,) = runtime.glob("baton/worker-*")
        assert {path.name for path in directory.iterdir()} >= {"events", "replay", "lease"}
        assert directory.stat().st_mode & 0o077 == 0

        usage = {"include_usage": True}  # a busy server sends several tokens at once
        with ask(
            url, tls, stream=True, stream_options=usage, max_tokens=200, ignore_eos=True
        ) as answer:
            assert answer.readline().startswith(b"data: ")
            os.killpg(process.pid, signal.SIGTERM)
            until_said(process, runtime, "draining")
            health = status_of(
                lambda: urllib.request.urlopen(f"{url}/health", timeout=60, context=tls)
            )
            assert health == (503, {"status": "draining", "reason": None, "load": None})
            assert (probe("/live"), probe("/ready")) == (200, 503)
            code, body = status_of(lambda: ask(url, tls, max_tokens=1))
            assert (code, body["error"]["code"]) == (503, "draining")
            lines = [line for line in answer if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] == 200
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=60) == 0
        assert until_gone(engines) == []
        assert not list(runtime.glob("baton/worker-*"))


FOLLOWER = """
import multiprocessing, os, time
from pathlib import Path
from baton.config.environment import change_environment
from baton.config.sections import LogSection
from baton.engines.vllm.engine_process import exit_with_parent, server_variables

def follow(pipe):
    exit_with_parent()
    pipe.send((os.getpid(), os.getpgid(0)))
    time.sleep(60)

if __name__ == "__main__":
    change_environment(server_variables(LogSection(), Path()) if {tied} else {{}})
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=follow, args=(theirs,), daemon=True).start()
    print(*ours.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_ends_with_its_server_and_only_with_it(tmp_path, tied):
    script = tmp_path / "server.py"
    script.write_text(FOLLOWER.format(tied=tied), "utf-8")
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    with server:
        pid, group = (int(word) for word in server.stdout.readline().split())
        try:
            assert (group == pid) is tied  # a signal for the server's group does not reach it
            server.kill()
            server.wait()
            assert (until_gone([pid], timeout_s=2) == []) is tied
        finally:
            server.kill()
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


LEAVER = """
import multiprocessing
from pathlib import Path
from baton.config.environment import change_environment
from baton.config.sections import LogSection
from baton.engines.vllm.engine_process import exit_at_end, server_variables

def leave(error):
    try:
        if error is not None:
            raise error
    finally:  # as vLLM's engine does
        exit_at_end()
        print("went on", flush=True)

if __name__ == "__main__":
    change_environment(server_variables(LogSection(), Path()) if {tied} else {{}})
    context = multiprocessing.get_context("spawn")
    for error in (SystemExit(), SystemExit(3), RuntimeError(), None):
        process = context.Process(target=leave, args=(error,))
        process.start()
        process.join()
        print(process.exitcode, flush=True)
"""


@pytest.mark.parametrize(
    ("tied", "first"), [(True, ["0"]), (False, ["went on", "0"])], ids=["ours", "another"]
)
def test_an_engine_exits_at_the_end_of_an_orderly_shutdown(tmp_path, tied, first):
    """After an error vLLM goes on, and so do engines that are not Baton's."""
    script = tmp_path / "server.py"
    script.write_text(LEAVER.format(tied=tied), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [*first, "went on", "3", "went on", "1", "went on", "0"]
