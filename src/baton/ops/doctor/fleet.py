"""A running fleet, by its gateway's pages: is it ready, who is down, which way does KV go?"""

from __future__ import annotations

from collections import Counter
from shlex import quote as quote_for_shell
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.ops.doctor.finding import Area, Finding, Level
from baton.ops.gateway_pages import NOT_FOUND, OK, PageError, RequestIds, decode_page, read_refusal
from baton.protocol.gateway_http import READY_PATH, REQUESTS_PATH
from baton.protocol.worker_http import METRICS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from baton.clock import Clock
    from baton.ops.gateway_pages import Gateway

UNREACHABLE: Final = "no gateway"
"""The name of the one finding there is if nothing answers."""
NUM_TRACES: Final = 32
READ_TRACES_S: Final = 4.0
"""A gateway waits 2 s for each worker of a trace that does not answer; the probe has 8 s."""


class Summary(msgspec.Struct, frozen=True):
    """What is read of one request's summary."""

    transport: str | None = None
    expected_transport: str | None = None


class RequestTrace(msgspec.Struct, frozen=True):
    """What is read of `/debug/requests/{id}`."""

    summary: Summary | None = None


def check_readiness(gateway: Gateway) -> list[Finding]:
    """Does it answer, and could it serve a request now?"""
    why = "A gateway that is not ready refuses every request."
    try:
        status, body = gateway.get(READY_PATH)
    except PageError as exc:
        fix = f"curl -v {quote_for_shell(f'{gateway.url}/health')}"
        return [_finding(UNREACHABLE, Level.PROBLEM, f"no answer from {exc}", why, fix=fix)]
    if status == OK:
        return [_finding("gateway", Level.OK, "ready", why)]
    reason = read_refusal(body)
    return [_finding("gateway", Level.PROBLEM, f"HTTP {status} from {READY_PATH}: {reason}", why)]


def check_counters(gateway: Gateway) -> list[Finding]:
    """Workers, fallbacks and broken streams, from `/metrics`."""
    try:
        families = _read_metrics(gateway)
    except PageError as exc:
        return [_finding("metrics", Level.WARNING, f"cannot be read: {exc}", "Nothing is known.")]
    return [*_workers(families, gateway), _fallbacks(families), _broken_streams(families)]


def check_handoffs(gateway: Gateway, clock: Clock) -> list[Finding]:
    """Expected against used transports, in the latest requests' traces."""
    why = "A handoff by another transport than the expected one works, and is slow in silence."
    try:
        summaries, num_unread = _latest_summaries(gateway, clock)
    except PageError as exc:
        return [_finding("transports used", Level.NOTE, str(exc), why)]
    unread = (
        f" ({num_unread} more requests were not read in {READ_TRACES_S:g} s: does each worker "
        "answer?)"
        if num_unread
        else ""
    )
    used = [summary for summary in summaries if summary.transport is not None]
    if not used:
        found = f"no handoff among the latest {len(summaries)} requests{unread}"
        return [_finding("transports used", Level.OK, found, why)]
    return _compare_transports(used, why, unread)


def _compare_transports(used: Sequence[Summary], why: str, unread: str) -> list[Finding]:
    mismatches = Counter(
        (summary.expected_transport, summary.transport)
        for summary in used
        if summary.expected_transport not in {None, summary.transport}
    )
    if not mismatches:
        by_kind = Counter(str(summary.transport) for summary in used)
        listed = ", ".join(f"{kind} {number}" for kind, number in by_kind.most_common())
        found = f"as expected in the latest {len(used)} handoffs: {listed}{unread}"
        return [_finding("transports used", Level.OK, found, why)]
    return [
        _finding(
            "transport mismatch",
            Level.WARNING,
            f"{number} of the latest {len(used)} handoffs used {actual} where {expected} was "
            f"expected{unread}",
            why + " The doctor on each worker's host finds what is wrong with the expected one.",
            fix="baton doctor",
        )
        for (expected, actual), number in mismatches.most_common()
    ]


def _latest_summaries(gateway: Gateway, clock: Clock) -> tuple[list[Summary], int]:
    """Of the latest requests, and how many there was no time for."""
    deadline = clock.now() + READ_TRACES_S
    answer = gateway.get(REQUESTS_PATH)
    if answer[0] == NOT_FOUND:
        raise PageError("the gateway shows requests to its own host only: run the doctor there")
    listed = decode_page(gateway, REQUESTS_PATH, answer, RequestIds)
    summaries: list[Summary] = []
    requests = listed.requests[:NUM_TRACES]
    for num_read, request in enumerate(requests):
        if clock.now() >= deadline:
            return summaries, len(requests) - num_read
        path = f"{REQUESTS_PATH}/{quote(request.id, safe='')}"
        if (answer := gateway.get(path))[0] == NOT_FOUND:  # forgotten meanwhile
            continue
        summary = decode_page(gateway, path, answer, RequestTrace).summary
        if summary is not None:
            summaries.append(summary)
    return summaries, 0


def _workers(families: dict[str, Metric], gateway: Gateway) -> Iterator[Finding]:
    samples = list(_samples(families, "baton_gateway_worker_up"))
    if not samples:
        yield _finding(
            "workers", Level.WARNING, "the gateway knows no worker", "Nothing is served."
        )
    for labels, value in samples:
        role = labels.get("role", "?")
        url, is_up = labels.get("url", "?"), value > 0
        num_up = sum(v > 0 for other, v in samples if other.get("role") == role)
        yield _finding(
            f"{role} worker",
            Level.OK if is_up else Level.WARNING,
            f"{url} is {'up' if is_up else 'down'}; {num_up} of this role up",
            "No request is placed on it until it answers its health checks.",
            fix=None if is_up else _look_at(url, gateway),
        )


def _look_at(worker_url: str, gateway: Gateway) -> str:
    """A worker with TLS answers only those who have a certificate of its cluster."""
    if worker_url.startswith("https:"):
        return f"baton top --once --gateway {quote_for_shell(gateway.url)}"
    return f"curl -sS {quote_for_shell(f'{worker_url}/health')}"


def _fallbacks(families: dict[str, Metric]) -> Finding:
    counts = _nonzero(families, "baton_gateway_fallbacks", "cause")
    return _finding(
        "fallbacks",
        Level.NOTE if counts else Level.OK,
        _listed(counts) or "none since the gateway started",
        "Requests that were served in another way than intended: slower, never wrong.",
    )


def _broken_streams(families: dict[str, Metric]) -> Finding:
    counts = _nonzero(families, "baton_gateway_broken_streams", "cause")
    return _finding(
        "broken streams",
        Level.WARNING if counts else Level.OK,
        _listed(counts) or "none since the gateway started",
        "Answers that ended with an error after they had begun.",
    )


def _read_metrics(gateway: Gateway) -> dict[str, Metric]:
    status, body = gateway.get(METRICS_PATH)
    if status != OK:
        raise PageError(f"HTTP {status} from {METRICS_PATH}")
    try:
        return {family.name: family for family in text_string_to_metric_families(body.decode())}
    except (ValueError, KeyError, IndexError) as exc:  # what the parser raises: "not Prometheus"
        raise PageError(f"{METRICS_PATH} is not in Prometheus's format: {exc}") from exc


def _samples(families: dict[str, Metric], name: str) -> Iterator[tuple[dict[str, str], float]]:
    family = families.get(name)
    for sample in () if family is None else family.samples:
        if sample.name in {name, f"{name}_total"}:
            yield sample.labels, sample.value


def _nonzero(families: dict[str, Metric], name: str, label: str) -> dict[str, int]:
    return {
        labels.get(label, "?"): int(value) for labels, value in _samples(families, name) if value
    }


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} x {cause}" for cause, number in counts.items())


def _finding(name: str, level: Level, found: str, why: str, *, fix: str | None = None) -> Finding:
    return Finding(area=Area.FLEET, name=name, level=level, found=found, why=why, fix=fix)
