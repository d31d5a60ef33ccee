"""The gateway's part, played by a test that must have its hand on each leg."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.ids import new_ticket_id
from baton.telemetry.trace import RequestSpan
from tests.e2e_vllm.client import KEY, TLS, get_text, make_body, post, read_answer, read_info
from tests.tickets import issue

if TYPE_CHECKING:
    from concurrent.futures import Future

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.client import Answer, Json


@dataclass(frozen=True)
class Server:
    """A vLLM server with our connector, asked without a gateway."""

    process: FleetProcess
    info: Json = field(repr=False)

    @classmethod
    def of(cls, process: FleetProcess) -> Server:
        return cls(process, read_info(process))

    @property
    def ref(self) -> WorkerRef:
        info = self.info
        return WorkerRef(
            info["worker"], info["epoch"], info["handoff_address"], tuple(info["rank_addresses"])
        )

    def complete(self, prompt: list[int], params: Json, **changes: object) -> tuple[int, Json]:
        body = make_body(prompt, kv_transfer_params=params, **changes)
        return post(f"{self.process.url}/v1/completions", body)

    def find_trace(self, request_id: str) -> RequestSpan | None:
        """What rank 0 remembers; None: nothing."""
        path = f"/baton/v1/traces/{request_id}"
        status, body = _get(self.info["control_urls"][0] + path)
        return msgspec.json.decode(body, type=RequestSpan) if status == 200 else None

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Say, as the gateway does, that a ticket's other half failed."""
        body = msgspec.json.encode({"reason": reason})
        path = f"/baton/v1/handoffs/{ticket.id.hex()}/abort"
        status, _ = _post(self.info["control_urls"][0] + path, body)
        assert status == 204


@dataclass(frozen=True)
class Handoff:
    """One ticket for a prompt, from `prefill` to `decode`; each leg is asked when told."""

    prefill: Server
    decode: Server
    prompt: list[int]
    ticket: Ticket
    text: str
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    @classmethod
    def make(
        cls,
        prefill: Server,
        decode: Server,
        prompt: list[int],
        *,
        valid_s: float = 60,
        num_prefix_tokens: int = 0,
    ) -> Handoff:
        ticket = make_ticket(
            prefill.ref, decode.ref, valid_s=valid_s, num_prefix_tokens=num_prefix_tokens
        )
        return cls(
            prefill, decode, prompt, ticket, seal(ticket, Credentials.of(ClusterKey.from_hex(KEY)))
        )

    def ask_prefill(self, num_tokens: int = 1) -> Future[tuple[int, Json]]:
        params: Json = {"baton_ticket": self.text, "do_remote_decode": True}
        if self.ticket.num_prefix_tokens:
            params["baton_prefix_tokens"] = self.ticket.num_prefix_tokens
        return self.pool.submit(self.prefill.complete, self.prompt, params, max_tokens=num_tokens)

    def ask_decode(self, **changes: object) -> Future[tuple[int, Json]]:
        params = {"baton_ticket": self.text, "do_remote_prefill": True}
        return self.pool.submit(self.decode.complete, self.prompt, params, **changes)

    def read_decode_trace(self) -> RequestSpan:
        trace = self.decode.find_trace(self.ticket.request_id)
        assert trace is not None
        return trace


def make_ticket(
    prefill: WorkerRef, decode: WorkerRef, *, valid_s: float = 60, num_prefix_tokens: int = 0
) -> Ticket:
    return Ticket(
        id=new_ticket_id(),
        request_id=f"direct-{new_ticket_id().hex()}",
        prefill=prefill,
        decode=decode,
        mode="push",
        issue=issue(valid_s),
        num_prefix_tokens=num_prefix_tokens,
    )


def read_tokens(answered: tuple[int, Json]) -> Answer:
    status, answer = answered
    assert status == 200, answer
    return read_answer(answer, None)


def read_prefill_result(answered: tuple[int, Json]) -> Json:
    """What a prefill leg's answer says about its KV."""
    status, answer = answered
    assert status == 200, answer
    return answer["kv_transfer_params"]["baton"]


def _get(url: str) -> tuple[int, bytes]:
    try:
        return 200, get_text(url).encode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _post(url: str, body: bytes) -> tuple[int, bytes]:
    with urllib.request.urlopen(
        urllib.request.Request(url, body), timeout=60, context=TLS
    ) as response:
        return response.status, response.read()
