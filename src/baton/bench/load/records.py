"""Records of requests, and their figures. Pure.

Definitions and names are those of `vllm bench serve`.

TTFT: sending → first chunk with tokens. TPOT: (last chunk - first) / (tokens - 1), of a request.
ITL: a gap between two chunks, counted once however many tokens the later one carries. E2E: sending
→ last chunk. All of complete answers only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from baton.bench.load.stream import Failure, Tokens
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Phase = Literal["warm-up", "measured"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. All times in seconds since its phase began: the warm-up has a clock of its own.

    `scheduled_s`: its scheduled time (None: no schedule). `held_s`: how long it then waited because
    `max_in_flight` was reached. `token_s`: when each chunk with tokens arrived. `ended_s`: when the
    last chunk arrived, or the failure. `is_cut`: it was still running when the run ended; neither
    complete nor failed. `tokens`: the server's counts; `asked_*`: what was requested.
    """

    index: int
    conversation: int
    turn: int = 0
    phase: Phase = "measured"
    scheduled_s: float | None = None
    held_s: float = 0.0
    sent_s: float
    first_byte_s: float | None = None
    token_s: tuple[float, ...] = ()
    ended_s: float
    tokens: Tokens = Tokens()
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    status: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    is_cut: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it has a complete answer."""
        return self.failure is None and not self.is_cut

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer: the server's count, else a token for each chunk."""
        counted = self.tokens.num_output
        return len(self.token_s) if counted is None else counted

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's count, else the requested number."""
        return self.tokens.num_prompt or self.asked_prompt_tokens or 0

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the last chunk of the answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None without a second token."""
        if not self.token_s or self.num_output_tokens < 2:  # noqa: PLR2004 - the first and one more
            return None
        return (self.ended_s - self.token_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between chunks, whatever number of tokens a chunk carries."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def late_s(self) -> float | None:
        """How late this client sent it, after its scheduled time and `held_s`."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s - self.held_s


SHOWN_HELD_S: Final = 0.001
_SLO: Final = re.compile(r"(ttft|tpot|e2el?):(\d+(?:\.\d+)?)(?:ms)?")


class Spread(msgspec.Struct, frozen=True):
    """Of samples: percentiles are interpolated linearly. A p99 of few samples is their largest."""

    num: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True):
    """Bounds within which a request counts as good; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no bound."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None

    def is_met(self, record: Record) -> bool:
        """Whether a request is within all bounds; a TPOT that does not exist is."""
        if not record.is_complete:
            return False
        pairs = (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.e2e_s, record.e2e_s),
        )
        return all(most is None or (took or 0.0) <= most for most, took in pairs)

    def is_missed(self, record: Record) -> bool:
        """Whether a cut request had exceeded the bound of its first token, or of its end."""
        ttft_s = record.e2e_s if record.ttft_s is None else record.ttft_s
        pairs = ((self.ttft_s, ttft_s), (self.e2e_s, record.e2e_s))
        return any(most is not None and took > most for most, took in pairs)


class Goodput(msgspec.Struct, frozen=True):
    """Requests within the SLO: their rate, and their share of those that ended.

    A cut request counts where it had missed the SLO already.
    """

    slo: Slo
    share: float
    requests_per_s: float


class FailureCount(msgspec.Struct, frozen=True):
    """Failures of one kind, and the message of one."""

    kind: str
    num: int
    example: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run.

    Rates are over `window_s`: until the last answer, or until sending was stopped (`--duration`,
    Ctrl-C); then tokens of cut requests that arrived before count too. `mean_in_flight`: mean
    number of requests in flight. `held_s`: how long `max_in_flight` delayed requests.
    `tokens_per_chunk`: above 1, ITL is not the time between tokens.
    """

    window_s: float
    num_complete: int
    num_failed: int
    num_cut: int
    failures: tuple[FailureCount, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    requests_per_s: float
    offered_requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_in_flight: float
    tokens_per_chunk: float | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    held_s: Spread | None
    goodput: Goodput | None


def compute_figures(records: Sequence[Record], window_s: float, slo: Slo) -> Figures:
    """Figures of a run's measured requests; `window_s` is how long it was measured."""
    measured = [record for record in records if record.phase == "measured"]
    complete = [record for record in measured if record.is_complete]
    failed = [record for record in measured if record.failure is not None]
    window_s = max(window_s, 1e-9)
    num_in = sum(_prompt_tokens_within(record, window_s) for record in measured)
    num_out = sum(_output_tokens_within(record, window_s) for record in measured)
    held = [record.held_s for record in measured if record.scheduled_s is not None]
    cached = [r.tokens.num_cached for r in complete if r.tokens.num_cached is not None]
    num_chunks = sum(len(record.token_s) for record in complete)
    busy_s = sum(_overlap(record, window_s) for record in measured)
    return Figures(
        window_s=window_s,
        num_complete=len(complete),
        num_failed=len(failed),
        num_cut=len(measured) - len(complete) - len(failed),
        failures=count_failures(failed),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in complete),
        num_output_tokens=sum(record.num_output_tokens for record in complete),
        num_cached_tokens=sum(cached) if cached else None,
        requests_per_s=sum(r.ended_s <= window_s for r in complete) / window_s,
        offered_requests_per_s=sum(r.sent_s <= window_s for r in measured) / window_s,
        prompt_tokens_per_s=num_in / window_s,
        output_tokens_per_s=num_out / window_s,
        total_tokens_per_s=(num_in + num_out) / window_s,
        mean_in_flight=busy_s / window_s,
        tokens_per_chunk=sum(r.num_output_tokens for r in complete) / num_chunks
        if num_chunks
        else None,
        ttft_s=spread([r.ttft_s for r in complete if r.ttft_s is not None]),
        tpot_s=spread([r.tpot_s for r in complete if r.tpot_s is not None]),
        itl_s=spread([gap for record in complete for gap in record.itl_s]),
        e2e_s=spread([record.e2e_s for record in complete]),
        held_s=spread(held) if max(held, default=0.0) >= SHOWN_HELD_S else None,
        goodput=None if slo.is_empty else _compute_goodput(measured, slo, window_s),
    )


def spread(samples: Sequence[float]) -> Spread | None:
    """The spread of samples; None without a sample."""
    if not samples:
        return None
    array = np.asarray(samples, dtype=np.float64)
    p50, p90, p95, p99 = (float(each) for each in np.percentile(array, (50, 90, 95, 99)))
    return Spread(
        len(array),
        float(array.mean()),
        float(array.std()),
        float(array.min()),
        p50,
        p90,
        p95,
        p99,
        float(array.max()),
    )


def count_failures(failed: Sequence[Record]) -> tuple[FailureCount, ...]:
    """Failures by kind, the most frequent first."""
    found: dict[str, list[str]] = {}
    for record in failed:
        if record.failure is not None:
            found.setdefault(record.failure.kind, []).append(record.failure.message)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return tuple(FailureCount(kind, len(messages), messages[0]) for kind, messages in ordered)


def parse_slo(bounds: Sequence[str]) -> Slo:
    """From `ttft:500` and the like, in milliseconds, as `vllm bench serve --goodput` takes them.

    Raises:
        ConfigError: it is written otherwise.
    """
    found: dict[str, float] = {}
    for text in bounds:
        match = _SLO.fullmatch(text)
        if match is None:
            raise ConfigError(f"--goodput {text}: write ttft:500, tpot:50 or e2e:10000 (in ms)")
        name, bound_ms = match.groups()
        found["e2e" if name.startswith("e2e") else name] = float(bound_ms) / 1000
    return Slo(found.get("ttft"), found.get("tpot"), found.get("e2e"))


def _compute_goodput(measured: Sequence[Record], slo: Slo, window_s: float) -> Goodput:
    good = [record for record in measured if slo.is_met(record)]
    num_ended = sum(not record.is_cut or slo.is_missed(record) for record in measured)
    num_within = sum(record.ended_s <= window_s for record in good)
    return Goodput(slo, len(good) / max(1, num_ended), num_within / window_s)


def _overlap(record: Record, window_s: float) -> float:
    return max(0.0, min(record.ended_s, window_s) - record.sent_s)


def _prompt_tokens_within(record: Record, window_s: float) -> int:
    """A prompt counts when it is computed: when the first token arrives."""
    if record.failure is not None or not record.token_s or record.token_s[0] > window_s:
        return 0
    return record.num_prompt_tokens


def _output_tokens_within(record: Record, window_s: float) -> float:
    """Tokens of an answer, by the share of its chunks that arrived in time; a failure has none."""
    if record.failure is not None or not record.token_s:
        return 0.0
    num_within = sum(at <= window_s for at in record.token_s)
    return record.num_output_tokens * num_within / len(record.token_s)
