"""What clients and strangers without a key have sent to harm a fleet: one function for each attack.

`python -m tests.abuse` measures each; tests/abuse/test_attacks.py judges what does not depend on
the machine's speed. Where the attacks come from: docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from baton.auth.credentials import Credentials
from baton.gateway.asgi import ALWAYS_READ_BYTES
from baton.net.framing import DialerHandshake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MIB: Final = 1 << 20
JSON: Final = {"content-type": "application/json"}
HEAD: Final = (
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)
TIMEOUT: Final = aiohttp.ClientTimeout(total=120)
LONGEST_READ: Final = ALWAYS_READ_BYTES
"""Of a body, in bytes, where the context is as short as the demo model's."""
NUM_STRANGERS: Final = 150
"""At each port: more than have a place before they have proved who they are."""


class Addresses(msgspec.Struct, frozen=True):
    """What is attacked: the gateway, and every port on which a worker listens."""

    gateway_url: str
    host: str
    gateway_port: int
    worker_ports: tuple[int, ...]


@dataclass(frozen=True)
class Attack:
    """One attack. Afterwards `log` is in the log, and the metric `counted` has grown, of `victim`.

    `counted` is the beginning of a sample's line.
    """

    run: Callable[[Addresses], Awaitable[None]]
    counted: str
    log: str
    victim: str = "gateway"

    @property
    def name(self) -> str:
        return self.run.__name__


def refused(reason: str) -> str:
    return f'baton_gateway_refused_connections_total{{reason="{reason}"}}'


def answered(code: int) -> str:
    return f'baton_warnings_total{{source="gateway.completions",subject="{code}"}}'


async def post(
    addresses: Addresses, body: bytes, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(
            addresses.gateway_url + path, data=io.BytesIO(body), headers={**JSON, **headers}
        ) as response,
    ):
        return response.status, await response.json()


@contextlib.asynccontextmanager
async def connected(
    host: str, port: int, num: int, first: bytes = b""
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many connections, each with these first bytes; closed at the end."""
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(num):
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(first)
                held.append((reader, writer))
        yield held
    finally:
        for _, writer in held:
            writer.close()


async def long_names(addresses: Addresses) -> None:
    """Unknown models whose names were kept: six of them took 576 MiB."""
    for num_chars in [LONGEST_READ // 12 - 100] * 30 + [2 * MIB]:
        body = json.dumps({"model": "\U0001f600" * num_chars, "prompt": "a"}).encode()
        status, answer = await post(addresses, body)
        if len(body) > LONGEST_READ:
            assert status == 413
        else:
            assert (status, answer["error"]["param"]) == (400, "model")
        assert len(str(answer)) < 1000


async def endless_heads(addresses: Addresses) -> None:
    """One connection with 32 MiB of headers took 351 MiB."""
    for _ in range(4):
        async with connected(addresses.host, addresses.gateway_port, 1, HEAD.encode()) as held:
            ((reader, writer),) = held
            with contextlib.suppress(ConnectionError):
                for n in range(32 * MIB // 4096):
                    writer.write(f"h{n}: {'x' * 4080}\r\n".encode())
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert not answer or b" 431 " in answer


async def half_requests(addresses: Addresses) -> None:
    """A thousand of them left no place for anybody: more than one address may have."""
    async with connected(addresses.host, addresses.gateway_port, 1100, HEAD.encode()):
        await asyncio.sleep(1.0)


async def stalled_bodies(addresses: Addresses) -> None:
    """They held every place of `max_inflight_requests`, which are eight here."""
    body = (HEAD + "content-length: 1000000\r\n\r\n{").encode()
    async with connected(addresses.host, addresses.gateway_port, 20, body) as held:
        for reader, _ in held:
            with contextlib.suppress(ConnectionError):
                assert b" 408 " in await reader.read()


async def endless_bodies(addresses: Addresses) -> None:
    """Chunks without end, as fast as they are taken."""
    head = (HEAD + "transfer-encoding: chunked\r\n\r\n").encode()
    chunk = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    for _ in range(3):
        async with connected(addresses.host, addresses.gateway_port, 1, head) as held:
            ((reader, writer),) = held
            with contextlib.suppress(ConnectionError):
                for _ in range(2048):
                    writer.write(chunk)
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                assert b" 413 " in await reader.read(4096)


async def millions_of_ids(addresses: Addresses) -> None:
    """14 millions of them took a second of the event loop, and 2 GiB of a worker."""
    for num_ids in (LONGEST_READ // 2 - 100, 14 * MIB):
        for listed in (b"1," * num_ids + b"1", b"[" + b"1," * num_ids + b"1]"):
            for _ in range(3):
                body = b'{"model":"demo","max_tokens":1,"prompt":[' + listed + b"]}"
                status, answer = await post(addresses, body)
                if len(body) > LONGEST_READ:
                    assert status == 413
                else:
                    assert status == 400
                    code = answer["error"]["code"]
                    assert code in {"context_length_exceeded", "too_many_prompts"}


async def many_messages(addresses: Addresses) -> None:
    """A million took a second of the event loop."""
    message = b'{"role":"user","content":"a"}'
    listed = b",".join([message] * (LONGEST_READ // (len(message) + 1) - 10))
    body = b'{"model":"demo","messages":[' + listed + b"]}"
    for _ in range(10):
        status, answer = await post(addresses, body, "/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (400, "too_many_messages")


async def long_texts(addresses: Addresses) -> None:
    """Twelve of 19 MiB, whose clients left, held 5 GiB in each worker."""
    text = "one word after another " * (LONGEST_READ // 23 - 10)
    body = json.dumps({"model": "demo", "prompt": text, "max_tokens": 1}).encode()
    for _ in range(12):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await post(addresses, body)
    chat = json.dumps({"model": "demo", "messages": [{"role": "user", "content": text}]}).encode()
    for path, sent in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        status, answer = await post(addresses, sent, path)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _ = await post(addresses, body * 5)
    assert status == 413


async def nonsense(addresses: Addresses) -> None:
    """Bytes that are no text, deep nesting, wrong types, huge numbers: 400, never 500."""
    for body in (
        b'{"model":"\xff","prompt":"a"}',
        b'{"model":"demo","prompt":"a","cache_salt":"\xff"}',
        b'{"model":"demo","prompt":"a","vllm_xargs":{"x":"\xff"}}',
        b'{"model":"demo","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"demo","prompt":"a","max_tokens":1e400}',
        b'{"model":"demo","prompt":"a","max_tokens":' + b"9" * 10_000 + b"}",
        b'{"model":"demo","prompt":"a","temperature":-1}',
        b'{"model":"demo","prompt":{"a":1}}',
        b'{"model":"demo","prompt":[4000000000]}',
        b'{"model":"demo","prompt":[-1]}',
        b'{"model":"demo","prompt":[[1],["a"]]}',
        b"[]",
        b"\x00",
        b"",
    ):
        status, answer = await post(addresses, body)
        assert status == 400, (body[:60], answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(str(answer)) < 2000


async def other_sites(addresses: Addresses) -> None:
    """What a page in somebody's browser can send, to this address by another name, too."""
    good = b'{"model":"demo","prompt":"a","max_tokens":1}'
    for headers, expected in (
        ({"content-type": "text/plain"}, 415),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"host": "elsewhere.example"}, 403),
    ):
        status, _ = await post(addresses, good, **headers)
        assert status == expected, headers


async def crowds_at_ports(addresses: Addresses) -> None:
    """At each port of the workers: silent ones, and those that send a byte now and then.

    They took all places, so that a new link between workers was refused.
    """
    async with contextlib.AsyncExitStack() as held:
        crowd = [
            connection
            for port in addresses.worker_ports
            for connection in await held.enter_async_context(
                connected(addresses.host, port, NUM_STRANGERS)
            )
        ]
        for _ in range(4):
            await asyncio.sleep(0.5)
            for _, writer in crowd[::2]:
                with contextlib.suppress(ConnectionError):
                    writer.write(b"\0")


async def garbage_at_ports(addresses: Addresses) -> None:
    """Random bytes, half a handshake, a proof with another key, at every port of the workers."""
    opening = DialerHandshake(Credentials.generate(), "handoff").opening()
    firsts = (
        os.urandom(1024),
        b"\xff" * 64,
        opening,
        opening + os.urandom(512),
        b"GET / \r\n",
    )

    async def send(port: int, first: bytes) -> None:
        async with connected(addresses.host, port, 8, first) as held:
            for reader, _ in held:
                with contextlib.suppress(ConnectionError):
                    async with asyncio.timeout(30):
                        answer = await reader.read()
                    assert b"HTTP/1.1 2" not in answer

    # All at once: fewer at each port than have a place, and each waits until it is hung up on.
    await asyncio.gather(
        *(send(port, first) for port in addresses.worker_ports for first in firsts)
    )


ATTACKS: Final = tuple(
    Attack(*attack)
    for attack in (
        (long_names, answered(400), "answered 127.0.0.1 with 400"),
        (endless_heads, refused("head_too_large"), "closed a connection from 127.0.0.1"),
        (half_requests, refused("too_many_connections"), "closed a connection from 127.0.0.1"),
        (stalled_bodies, refused("body_timeout"), "closed a connection from 127.0.0.1"),
        (endless_bodies, answered(413), "answered 127.0.0.1 with 413"),
        (millions_of_ids, answered(400), "answered 127.0.0.1 with 400"),
        (many_messages, answered(400), "answered 127.0.0.1 with 400"),
        (long_texts, answered(400), "answered 127.0.0.1 with 400"),
        (nonsense, answered(400), "answered 127.0.0.1 with 400"),
        (other_sites, answered(415), "answered 127.0.0.1 with 415"),
        (crowds_at_ports, 'baton_warnings_total{source="handoff.peers",subject="unauthenticated"}',
         "handoff: a connection was closed", "prefill"),
        (garbage_at_ports, 'baton_warnings_total{source="net.endpoints",subject="unauthenticated"}',
         "a transfer connection was closed", "decode"),
    )
)  # fmt: skip


async def repeat(attack: Attack, addresses: Addresses, for_s: float) -> int:
    """Attack again and again for a time, once at least; how often."""
    loop = asyncio.get_running_loop()
    until, num_rounds = loop.time() + for_s, 0
    while num_rounds == 0 or loop.time() < until:
        await attack.run(addresses)
        num_rounds += 1
    return num_rounds


def main() -> None:
    """`python -m tests.abuse.attacks NAME SECONDS ADDRESSES`: a process of the attacker's own."""
    name, for_s, addresses = sys.argv[1:]
    (attack,) = (each for each in ATTACKS if each.name == name)
    target = msgspec.json.decode(addresses, type=Addresses)
    print(asyncio.run(repeat(attack, target, float(for_s))))


if __name__ == "__main__":
    main()
