"""`baton route explain`: asks a gateway where a request would go, or went, and prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from baton.ops.doctor.finding import one_line
from baton.ops.gateway_pages import Gateway, decode_page
from baton.ops.request_traces import page_of
from baton.protocol.gateway_http import ROUTE_PATH
from baton.protocol.route_explanation import RouteCandidate, RouteExplanation

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS: Final = "_s"
WIDTH: Final = 200
"""Of the table, at most: a figure must not be cut."""


class GatewaySpan(msgspec.Struct, frozen=True):
    """What is read of the gateway's trace."""

    mode: str | None = None
    peer: str | None = None
    outcome: str | None = None
    fallbacks: tuple[str, ...] = ()


class PlacedRequest(msgspec.Struct, frozen=True):
    """What is read of `/debug/requests/{id}`."""

    id: str
    status: int
    placement: tuple[str, ...]
    gateway: GatewaySpan


def explain_request(
    gateway: Gateway, body: bytes, targets_ms: Mapping[str, float | None], api_key: str | None
) -> RouteExplanation:
    """Where a completion's body would go now, with these targets, by header; None: not named.

    Raises:
        PageError: the gateway gives no explanation, and why.
    """
    headers = {name: str(target) for name, target in targets_ms.items() if target is not None}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    answer = gateway.post(ROUTE_PATH, body, headers)
    return decode_page(gateway, ROUTE_PATH, answer, RouteExplanation)


def find_request(gateway: Gateway, request_id: str) -> PlacedRequest:
    """Where a request went.

    Raises:
        ConfigError: no request has such an id.
        PageError: the gateway does not remember it, or shows nothing.
    """
    path = page_of(request_id)
    return decode_page(gateway, path, gateway.get(path), PlacedRequest)


def print_explanation(found: RouteExplanation, out: TextIO) -> None:
    """As a table, the best candidate first."""
    console = Console(file=out, markup=False, highlight=False, soft_wrap=True, width=WIDTH)
    kind = "tokens" if found.is_tokenized else "tokens, estimated: the prompt is not tokenized here"
    num = found.num_prompt_tokens
    console.print(one_line(f"{found.model}, policy {found.policy}: a prompt of {num} {kind}"))
    if found.num_answers > 1:
        console.print(f"{found.num_answers} answers are asked for; this is the first prompt's way")
    names = list(dict.fromkeys(name for each in found.candidates for name in each.figures))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "workers"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(_heading(name), justify="right", no_wrap=True)
    for each in found.candidates:
        if each.why_not is None:
            mark = "*" if each.is_chosen else ""
            figures = [_figure(name, each.figures.get(name)) for name in names]
            name = one_line(_name(each))
            table.add_row(mark, name, *figures, style="bold" if mark else None)
    if table.row_count:
        console.print(table)
    for each in found.candidates:
        if each.why_not is not None:
            console.print(one_line(f"not {_name(each)}: {each.why_not}"))
    if found.decode is None:
        console.print("no worker can serve it now:")
    for line in found.why:
        console.print(one_line(line))


def print_request(found: PlacedRequest, out: TextIO) -> None:
    """The policy's lines, and what became of the request."""
    console = Console(file=out, markup=False, highlight=False, soft_wrap=True)
    span = found.gateway
    where, mode = span.peer or "no worker", span.mode or "not placed"
    console.print(one_line(f"{found.id}: {where}, {mode}, {span.outcome or 'running'}"))
    for line in (*found.placement, *(f"fallback: {each}" for each in span.fallbacks)):
        console.print(one_line(line))
    if not found.placement:
        console.print("the policy gave no reasons")


def _name(candidate: RouteCandidate) -> str:
    match candidate.part:
        case "prefill":
            return f"{candidate.prefill} prefills"
        case "decode":
            return f"{candidate.decode} answers"
        case "request":
            named = (candidate.prefill, candidate.decode)
            return " → ".join(each for each in named if each is not None)


def _heading(name: str) -> str:
    """`queue_s` → `queue, s`."""
    words = one_line(name).removesuffix(SECONDS).removeprefix("num_").replace("_", " ")
    return f"{words}, s" if name.endswith(SECONDS) else words


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.startswith("tpot"):
        return f"{value:.4f}"
    return f"{value:.3f}" if name.endswith(SECONDS) or value % 1 else f"{value:.0f}"
