"""A feed of KV events in a process that runs out of file descriptors for a while."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading

import pytest

from baton.errors import ConfigError
from tests.descriptors import no_descriptors
from tests.integration.following_kv_events import Consumer, wait_until
from tests.integration.scripted_publisher import ScriptedPublisher, stored


@pytest.fixture
def ends(tmp_path):
    return f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"


def test_events_are_followed_again_once_there_are_descriptors(ends):
    with (
        contextlib.closing(ScriptedPublisher(*ends)) as publisher,
        contextlib.closing(Consumer(*ends).connect()) as consumer,
    ):
        publisher.publish(stored(1))
        wait_until(lambda: consumer.take() == {1})
        with no_descriptors():
            publisher.publish(stored(2), is_lost=True)
            publisher.publish(stored(3))
            wait_until(lambda: consumer.health.num_gaps == 1)
        wait_until(lambda: consumer.take() == {1, 2, 3}, lambda: str(consumer.health))
        publisher.publish(stored(4))
        wait_until(lambda: consumer.take() == {1, 2, 3, 4})
        assert consumer.health.num_lost == 0


def test_a_feed_that_cannot_be_opened_is_a_configuration_error_and_leaves_nothing(ends):
    before = threading.active_count()
    with no_descriptors(), pytest.raises(ConfigError, match="Too many open files"):
        Consumer(*ends).start()
    assert threading.active_count() == before
    with (
        contextlib.closing(ScriptedPublisher(*ends)) as publisher,
        contextlib.closing(Consumer(*ends).connect()) as consumer,
    ):
        publisher.publish(stored(1))
        wait_until(lambda: consumer.take() == {1})


def test_more_workers_are_followed_than_libzmq_has_sockets_for_by_itself(ends):
    """By itself it has 1,023: two for a feed, and one while it waits for an answer."""
    code = f"""
import os
import zmq
from tests.integration.following_kv_events import Consumer
consumer = Consumer(*{ends!r}).start()
context = zmq.Context.instance()
sockets = [context.socket(zmq.PUSH) for _ in range(1_100)]
print(len(sockets), flush=True)
os._exit(0)  # to close them one by one takes long
"""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if descriptors < 2_000:
        pytest.skip(f"{descriptors} file descriptors")
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 2000 && exec "$@"', "sh", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("1100\n", 0), done.stderr


@pytest.mark.parametrize("num_left", [0, 3, 6])
def test_the_first_feed_of_a_process_with_few_descriptors_does_not_end_it(ends, num_left):
    """libzmq ends a process in which its first socket finds too few (SIGABRT)."""
    code = f"""
import resource
from pathlib import Path
from baton.errors import ConfigError
from tests.integration.following_kv_events import Consumer
consumer = Consumer(*{ends!r})
highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + {num_left}, highest + {num_left}))
try:
    consumer.start()
except ConfigError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Too many open files; raise ulimit -n" in done.stdout
