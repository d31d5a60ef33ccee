"""`baton up` as a person uses it: the demo model, one answer, Ctrl-C, and nothing left behind."""

import http.client
import json
import os
import re
import signal
import sys
import tarfile
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.testing.fleet import start_command
from tests import forking_launcher
from tests.forked_module import run_forked
from tests.preloaded import TORCH, PreloadedProcess

START_TIMEOUT_S = 120
SMALL = ("--set", "engine.dtype=float32", "--set", "engine.num_threads=1")
"""One test has the defaults. Processors without bfloat16 are slow with the demo model's, and a
second thread of torch spins while other tests have its core.
"""


def environment(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}


def launcher(arguments, environment, stderr):
    """`baton up`, whose workers import nothing; one test starts it as a person does."""
    return PreloadedProcess(TORCH, forking_launcher.__name__, arguments, environment, stderr)


@contextmanager
def up(tmp_path, *arguments, start=launcher):
    """A running `baton up`; killed at the end whatever happened."""
    with (tmp_path / "stderr").open("wb") as stderr:
        process = start(["up", "--port", "0", *arguments], environment(tmp_path), stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()


def until_ready(process, tmp_path):
    """Everything that was printed until the launch is ready."""
    lines = []
    with os.fdopen(os.dup(process.stdout.fileno()), encoding="utf-8") as printed:
        for line in printed:
            lines.append(line)
            if "Ctrl-C drains" in line:
                return "".join(lines)
    raise AssertionError((tmp_path / "stderr").read_text("utf-8"))


def until_said(tmp_path, part):
    deadline = time.monotonic() + START_TIMEOUT_S
    while part not in (tmp_path / "stderr").read_text("utf-8"):
        assert time.monotonic() < deadline, part
        time.sleep(0.02)


def children_of(pid):
    """This process's children, by pid."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_born(pid):
    """The same, once there are some: the launcher says what it waits for as it starts it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(children := children_of(pid)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return children


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until_gone(pids, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not all(is_gone(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if not is_gone(pid)]


def listening_ports():
    return {
        int(line.split()[1].rpartition(":")[2], 16)
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }


def sockets_of(pids):
    """Inodes of all sockets of some processes."""
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed while we looked
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
                    found.add(match[1])
    return found


def named_sockets(inodes):
    """Abstract or file names of UNIX sockets, of those inodes."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row for row in rows if row[6] in inodes]


def open_request(url, **fields):
    message = {
        "role": "user",
        "content": "Tell me of a house by the sea, and who lived in it, and why.",
    }
    body = {"model": "demo", "messages": [message], "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=60)


def ask(url, **fields):
    with open_request(url, max_tokens=16, **fields) as response:
        return response.read().decode()


def read_to_the_end(answer):
    """What is left of an answer, also where its connection breaks."""
    try:
        return answer.read().decode()
    except http.client.IncompleteRead as cut:
        return cut.partial.decode()


def assert_handed_over(url):
    """The one request so far went from prefill to decode, over shared memory."""
    with urllib.request.urlopen(f"{url}/debug/requests", timeout=60) as response:
        (listed,) = json.load(response)["requests"]
    with urllib.request.urlopen(f"{url}/debug/requests/{listed['id']}", timeout=60) as response:
        trace = json.load(response)
    summary = trace["summary"]
    assert summary["transport"] == summary["expected_transport"] == "shared"
    assert summary["num_received_tokens"] > 0
    assert summary["fallbacks"] == []
    assert_every_stage(trace)


def assert_every_stage(trace):
    """Gateway, prefill, transfer and decode are on one time axis, and in order."""
    lanes = {lane["name"]: lane for lane in trace["timeline"]}
    assert list(lanes) == ["gateway", "prefill", "transfer", "decode"]
    at = {
        (lane["name"], stage["name"]): (stage["start_s"], stage["end_s"])
        for lane in trace["timeline"]
        for stage in lane["stages"]
    }
    assert {lane["clock"]["error_s"] for lane in lanes.values()} == {0.0}, "one host, one clock"
    assert at["gateway", "place"][1] <= at["prefill", "tokenize"][0]
    assert at["prefill", "prefill"][0] <= at["transfer", "transfer"][0]
    assert at["transfer", "transfer"][0] <= at["decode", "accept"][0]
    # The first token came with the KV: its decode worker's first step may begin after it is here.
    assert at["decode", "accept"][1] <= at["gateway", "answer"][0]
    assert sum(num for _, _, num in trace["prefill"]["chunks"]) == summary_tokens(trace)
    assert trace["decode"]["verify_s"] > 0
    assert trace["prefill"]["trace_id"] == trace["gateway"]["trace_id"]
    assert trace["decode"]["parent_id"] == trace["gateway"]["span_id"]
    assert {each["part"] for each in trace["compared"] if each["actual_s"] is not None} >= {
        "queue", "prefill", "handoff", "ttft",
    }  # fmt: skip


def summary_tokens(trace):
    return trace["summary"]["num_prompt_tokens"] - trace["prefill"]["num_cached_tokens"]


def choices_of(events):
    """Of all events that are whole, but for an error's."""
    whole = events[: events.rfind("\n") + 1].splitlines()
    chunks = [json.loads(line[6:]) for line in whole if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk.get("choices", ())]


def streamed_text(events):
    return "".join(choice["delta"].get("content") or "" for choice in choices_of(events))


def finish_reasons(events):
    return [choice["finish_reason"] for choice in choices_of(events)]


def mapped_files(pids):
    """Paths of all that some processes map."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def test_one_command_answers_drains_and_leaves_nothing(tmp_path):
    with up(tmp_path, start=start_command) as process:
        printed = until_ready(process, tmp_path)
        url = re.search(r"Baton answers at (http://127\.0\.0\.1:\d+)", printed)[1]
        assert f"curl -N {url}/v1/chat/completions" in printed
        assert f"\nDashboard: {url}/dashboard\n" in printed

        whole = json.loads(ask(url, stream=False))["choices"][0]["message"]["content"]
        assert whole
        assert_handed_over(url)
        assert streamed_text(ask(url, stream=True)) == whole

        children = children_of(process.pid)
        sockets, ports = sockets_of(children), listening_ports()
        # Shared memory has no name that could stay behind. Other tests' files of it come and go.
        assert any(path.startswith("/memfd:") for path in mapped_files(children))
        assert not any(path.startswith("/dev/shm/") for path in mapped_files(children))
        assert int(url.rpartition(":")[2]) in ports

        assert_bundle_has_workers_metrics(tmp_path, url)

        second = baton(tmp_path, "up", "--port", "0")
        assert second.returncode == 2
        assert f"named default runs already (its launcher is pid {process.pid})" in second.stderr

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert not (tmp_path / "state/baton/fleets/default/monitor").exists()
        assert until_gone(children, timeout_s=0) == []
        assert int(url.rpartition(":")[2]) not in listening_ports()
        assert named_sockets(sockets) == []
        stderr = (tmp_path / "stderr").read_text("utf-8")
        assert "stopped: prefill-0 (exit code 0), decode-0 (exit code 0), gateway (exit" in stderr
        assert "waiting for prefill-0, decode-0" in stderr
        assert "Traceback" not in stderr
        assert "falling back" not in stderr  # the second request is a cache hit: no failure


def assert_bundle_has_workers_metrics(tmp_path, url):
    """The launch made its key up: who asks workers proves itself with what it has issued."""
    made = tmp_path / "bundle.tar.gz"
    words = ["debug", "bundle", "--gateway", url, "--no-doctor", "-o", str(made)]
    other = baton(tmp_path, *words, "--fleet", "other")
    assert "gateway-0/workers/000-metrics.txt: " in other.stdout
    assert "name it with --fleet" in other.stdout
    assert baton(tmp_path, *words).returncode == 0
    issued = tmp_path / "state/baton/fleets/default/monitor"
    with tarfile.open(made) as archive:
        files = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}
    for number in range(2):
        metrics = files[f"baton-bundle/gateway-0/workers/{number:03}-metrics.txt"]
        assert "baton_worker_info{" in metrics
    key = (issued / "tls.key").read_text().splitlines()[1]
    assert not any(key in text for text in files.values())


def test_a_second_ctrl_c_kills_what_still_drains(tmp_path):
    with up(tmp_path, "--prefill", "0", *SMALL) as process:
        url = re.search(r"answers at (\S+)", until_ready(process, tmp_path))[1]
        children = children_of(process.pid)
        assert len(children) == 2
        with open_request(url, stream=True, max_tokens=900, ignore_eos=True) as answer:
            answer.readline()
            process.send_signal(signal.SIGINT)
            until_said(tmp_path, "baton: draining")
            assert answer.readline() is not None
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
            assert until_gone(children, timeout_s=0) == []
            # Where the worker died first, the gateway still had time for an error event and [DONE].
            assert not any(finish_reasons(read_to_the_end(answer)))
    assert "killed by SIGKILL" in (tmp_path / "stderr").read_text("utf-8")


def test_nothing_survives_the_launchers_sudden_death(tmp_path):
    with up(tmp_path, *SMALL) as process:
        until_said(tmp_path, "waiting for prefill-0, decode-0, gateway")
        children = until_born(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert until_gone(children, timeout_s=30) == []


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with up(tmp_path, "--set", "worker.cpu_affinity=4095") as process:
        assert process.wait(timeout=START_TIMEOUT_S) == 1
    stderr = (tmp_path / "stderr").read_text("utf-8")
    message = re.search(
        r"^baton: (prefill|decode)-0 ended while starting \(exit code 2\)", stderr, re.MULTILINE
    )
    assert message
    failure = stderr[message.start() :]
    assert "4095" in failure
    assert "likely cause: its configuration was refused" in failure
    assert "Traceback" not in failure


def baton(tmp_path, *arguments):
    """A command to its end, forked with its modules loaded."""
    module = forking_launcher.__name__ if arguments[0] == "up" else "baton.cli"
    command = [sys.executable, "-m", module, *arguments]
    return run_forked(command, environment(tmp_path), START_TIMEOUT_S)


@contextmanager
def streaming(url, text):
    """Clients that stream the same answer again and again: how many came, and what went wrong."""
    answers, problems, ended = [], [], threading.Event()

    def stream():
        while not ended.is_set():
            try:
                events = ask(url, stream=True)
            except OSError as exc:
                problems.append(repr(exc))
            else:
                answers.append(events)
                if streamed_text(events) != text or "data: [DONE]" not in events:
                    problems.append(events)
            ended.wait(0.5)  # the cores are for the processes that start

    clients = [threading.Thread(target=stream) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield answers, problems
    finally:
        ended.set()
        for client in clients:
            client.join()


def test_a_fleet_in_the_background_is_changed_without_a_failed_request(tmp_path):
    """Scaled, upgraded and ended by the commands: real processes, and requests all the time."""
    words = ("up", "--detach", "--prefill", "0", "--decode", "1", "--port", "0", *SMALL)
    started = baton(tmp_path, *words)
    try:
        assert started.returncode == 0, started.stderr
        assert "[worker-0]" not in started.stderr
        url = re.search(r"Baton answers at (\S+)", started.stdout)[1]
        assert "baton down" in started.stdout
        text = streamed_text(ask(url, stream=True))
        before = members_of(tmp_path)
        assert [(m["name"], m["state"]) for m in before] == [
            ("worker-0", "ready"),
            ("gateway", "ready"),
        ]
        with streaming(url, text) as (answers, problems):
            grown = baton(tmp_path, "scale", "--workers", "2")
            assert grown.returncode == 0, grown.stderr
            assert "worker-1 serves at https://127.0.0.1:" in grown.stdout
            num_grown = len(answers)
            shrunk = baton(tmp_path, "scale", "--workers", "1")
            assert re.search(r"worker-\d ended \(exit code 0\)", shrunk.stdout), shrunk.stderr
            upgraded = baton(tmp_path, "upgrade")
            assert upgraded.returncode == 0, upgraded.stderr
            assert len(answers) > num_grown > 0
        assert problems == []
        after = members_of(tmp_path)
        assert [m["name"] for m in after] == ["gateway", "worker-2"]
        assert not {m["pid"] for m in before} & {m["pid"] for m in after}
        assert all(is_gone(m["pid"]) for m in before)
        assert streamed_text(ask(url, stream=True)) == text  # at the same address
        log = baton(tmp_path, "logs", "gateway", "-n", "1000").stdout
        assert log.count("listening on") == 2
        assert "Traceback" not in log
    finally:
        ended = baton(tmp_path, "down")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("the fleet has ended\n")
    assert all(is_gone(m["pid"]) for m in after)
    assert "stopped: gateway (exit code 0)" in baton(tmp_path, "logs", "launcher").stdout
    assert baton(tmp_path, "status").returncode == 1


def members_of(tmp_path):
    return json.loads(baton(tmp_path, "status", "--json").stdout)["members"]
