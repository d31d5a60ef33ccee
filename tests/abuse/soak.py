"""Many requests, of which clients leave some at random moments: does anything grow?

`python -m tests.abuse.soak [--requests 100000] [--concurrency 32] [--handoffs] [--json FILE]`. The
model is so small that the requests are many; prompts are random, half of the answers are streamed,
three of ten clients leave. What each process holds is sampled as it goes on; the slopes are least
squares over the second half, and the exit status is 1 where one is above its bound, or where a
request failed.

With `--handoffs` nobody leaves and each answer has one token: as many handoffs as the fleet can do.
At twice as many at once as workers serve, for longer than any expiry (605 s), nothing may be
refused. `--url` and `--pids` name a running fleet: `baton up --engine vllm`, say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import numpy as np

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.testing.fleet import start_command
from tests.abuse.attacks import JSON, MIB, TIMEOUT
from tests.abuse.victims import running_victims
from tests.chaos.process_state import read_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SPEC: Final = RandomModelSpec(
    num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, dtype="float32"
)
SHARE_OF_LEAVERS: Final = 0.3
NUM_SAMPLES: Final = 25
QUIET_S: Final = 4.0
"""Before each sample: the gateway keeps idle connections for three seconds."""
MAX_SLOPES: Final = {"rss_bytes": 64.0, "descriptors": 1e-4, "threads": 1e-5, "shm_bytes": 1.0}
"""For each request. 64 bytes are 61 MiB after a million; a descriptor is one in 10,000."""


@dataclass(frozen=True)
class Sample:
    """What one process holds after so many requests."""

    num_requests: int
    process: str
    rss_bytes: int
    descriptors: int
    threads: int
    shm_bytes: int
    """Of all files in /dev/shm, whosever they are."""


class Soak:
    """Sends the requests. Owner: one event loop."""

    def __init__(
        self, url: str, pids: Mapping[str, int], *, seed: int, handoffs_only: bool
    ) -> None:
        self._url, self._pids, self._random = url, pids, random.Random(seed)
        self._handoffs_only = handoffs_only
        self.outcomes: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.num_begun = 0
        self.was_ended = False

    def end(self) -> None:
        """Begin no more: what was measured so far is the result."""
        self.was_ended = True

    async def run(self, num_requests: int, concurrency: int) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, self.end)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:
            for part in range(NUM_SAMPLES):
                if self.was_ended:
                    return
                until = num_requests * (part + 1) // NUM_SAMPLES
                async with asyncio.TaskGroup() as clients:
                    for _ in range(concurrency):
                        clients.create_task(self._ask_until(session, until))
                await asyncio.sleep(QUIET_S)
                self._sample()
                print(f"{self.num_begun:>8} {dict(self.outcomes)} {self._show()}", flush=True)

    async def _ask_until(self, session: aiohttp.ClientSession, until: int) -> None:
        while self.num_begun < until and not self.was_ended:
            self.num_begun += 1
            self.outcomes[await self._ask(session)] += 1

    async def _ask(self, session: aiohttp.ClientSession) -> str:
        draw = self._random
        stream, num_tokens = draw.random() < 0.5, draw.choice((8, 32, 64))
        leaves_after_s = draw.expovariate(20) if draw.random() < SHARE_OF_LEAVERS else None
        max_tokens = draw.choice((1, 4, 16))
        if self._handoffs_only:
            stream, leaves_after_s, max_tokens = False, None, 1
            num_tokens = draw.choice((32, 64))  # decode computes what is shorter than a block
        body = {
            "model": "demo",
            "prompt": [draw.randrange(300, 4000) for _ in range(num_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        try:
            async with asyncio.timeout(leaves_after_s):
                async with session.post(
                    f"{self._url}/v1/completions", data=json.dumps(body), headers=JSON
                ) as response:
                    answer = await response.read()
        except TimeoutError:
            return "left"
        if response.status != 200:
            return str(response.status)
        is_whole = answer.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in answer
        if is_whole or not stream:
            return "answered"
        print("broken stream:", answer[-300:])
        return "broken stream"

    def _sample(self) -> None:
        shm_bytes = 0
        for file in Path("/dev/shm").rglob("*"):
            with contextlib.suppress(OSError):
                shm_bytes += file.stat().st_blocks * 512
        for name, pid in self._pids.items():
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            rss_bytes, threads = (int(fields[key].split()[0]) for key in ("VmRSS", "Threads"))
            descriptors = len(read_descriptors(pid))
            self.samples.append(
                Sample(self.num_begun, name, rss_bytes * 1024, descriptors, threads, shm_bytes)
            )

    def _show(self) -> str:
        latest = self.samples[-len(self._pids) :]
        return " ".join(f"{s.process} {s.rss_bytes // MIB}M {s.descriptors}fd" for s in latest)


def compute_slopes(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """By process and quantity, for each request, over the second half of its samples."""
    slopes: dict[str, dict[str, float]] = {}
    for process in sorted({sample.process for sample in samples}):
        own = [sample for sample in samples if sample.process == process]
        if len(own) < 3:  # ended early: a line needs two
            continue
        late = own[len(own) // 2 :]
        at = np.array([sample.num_requests for sample in late], dtype=float)
        slopes[process] = {
            name: float(np.polyfit(at, [getattr(sample, name) for sample in late], 1)[0])
            for name in MAX_SLOPES
        }
    return slopes


@contextlib.contextmanager
def _running_fleet() -> Iterator[tuple[str, dict[str, int]]]:
    """A gateway and two embedded engines: its URL, and the processes by name."""
    with tempfile.TemporaryDirectory() as folder:
        make_random_model(Path(folder) / "model", SPEC)
        changes = {
            "worker.model": f"{folder}/model",
            "worker.served_model_name": "demo",
            "engine.num_blocks": 2048,
        }
        with running_victims(
            Path(folder), start_command, engine=changes, max_inflight_requests=256
        ) as victims:
            processes = (victims.gateway, *victims.workers)
            yield victims.gateway.url, {process.name: process.pid for process in processes}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.soak")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write samples and slopes there, too")
    parser.add_argument("--handoffs", action="store_true", help="one token each, nobody leaves")
    parser.add_argument("--url", help="of a running fleet; its model is `demo`")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="of that fleet's processes")
    options = parser.parse_args()
    began_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        if options.url is not None:
            url, pids = options.url, {str(pid): pid for pid in options.pids}
        else:
            url, pids = stack.enter_context(_running_fleet())
        soak = Soak(url, pids, seed=options.seed, handoffs_only=options.handoffs)
        asyncio.run(soak.run(options.requests, options.concurrency))
    elapsed_s = time.monotonic() - began_at
    slopes = compute_slopes(soak.samples)
    print(f"{soak.num_begun} requests in {elapsed_s:.0f} s: {dict(soak.outcomes)}")
    for process, found in slopes.items():
        print(f"{process:12}", *(f"{name} {slope:+.2g}/request" for name, slope in found.items()))
    if options.json is not None:
        result = {
            "num_requests": soak.num_begun,
            "was_ended": soak.was_ended,
            "elapsed_s": elapsed_s,
            "outcomes": soak.outcomes,
            "slopes": slopes,
            "samples": [asdict(sample) for sample in soak.samples],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = soak.outcomes.keys() - {"answered", "left"}
    grows = any(
        slope > MAX_SLOPES[name] for found in slopes.values() for name, slope in found.items()
    )
    sys.exit(bool(failed) or grows)


if __name__ == "__main__":
    main()
