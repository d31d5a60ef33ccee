"""Text, JSON pages and metrics without secrets.

Of pages and metrics only listed names of strings and labels are kept. Numbers and truth values are,
but for lists of numbers under other names: they may be a prompt's tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.errors import UNDECODABLE, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

CUT: Final = "(cut)"
MIN_SECRET_CHARS: Final = 6
"""Shorter ones are words like `on`, which would cut half of a log."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

PAGE_STRINGS: Final = frozenset({
    # Gateways' pages and the traces of requests
    "actual", "cause", "chosen", "decode", "distance", "encoding", "encodings", "endpoint", "epoch",
    "expected", "expected_transport", "fallbacks", "from", "fullest", "health", "id", "kind",
    "medium", "missing", "mode", "model", "moves", "not_tokenized", "op", "operation", "outcome",
    "part", "peer", "placement", "prefill", "priority", "problem", "ranks", "reason", "receiver",
    "request_id", "reroutes", "role", "sender", "source", "source_problems", "sources", "state",
    "status", "tier", "to", "topology", "transport", "url", "used", "version", "why",
    "why_withdrawn", "worker",
    # Alerts
    "alert", "labels", "not_evaluated", "runbook_url", "severity", "subject", "summary",
    # The doctor's report
    "area", "baton", "fix", "found", "level", "name",
})  # fmt: skip
"""Fields of JSON pages whose strings are kept. Not tenants, tickets, prompts or answers."""

PAGE_NUMBER_LISTS: Final = frozenset({
    "ended",
    "exposed_share",
    "observed_ratio",
    "s_per_mib",
    "transfer_s",
})
"""Fields of JSON pages whose lists of numbers are kept: histograms, and latencies of answers."""

LABELS: Final = frozenset({
    "alert", "cause", "code", "cost", "direction", "distance", "encoding", "engine", "expected",
    "field", "finished_reason", "form", "implementation", "kind", "le", "major", "minor", "mode",
    "model", "model_name", "op", "operation", "outcome", "part", "patchlevel", "phase", "priority",
    "quantile", "reason", "result", "role", "source", "state", "status", "tier", "transport", "url",
    "used", "version", "worker",
})  # fmt: skip
"""Labels of metrics whose values are kept."""

_PATTERNS: Final = (
    (re.compile(r"-----BEGIN [^-\n]+-----.*?(-----END [^-\n]+-----|\Z)", re.DOTALL), CUT),
    (re.compile(r"(://)[^\s/@\"'<>]+@"), rf"\1{CUT}@"),
    # Of a header everything to the end of its line: cookies have spaces.
    (
        re.compile(
            r"(?im)(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie|x-(?!request-id)[a-z0-9-]*+)"
            r"([\"']?\s*[:=]).*$"
        ),
        rf"\1\2 {CUT}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"']+"), rf"\1 {CUT}"),
    (
        re.compile(
            r"(?i)((?:api|access|cluster|private|secret|signing|account)[-_ ]?key(?:[-_ ]?id)?|"
            r"token|secret|passw(?:or)?d|passphrase|credentials?|signature)"
            r"([\"']?\s*[:=]\s*)(\"[^\"\n]*\"?|'[^'\n]*'?|[^\s,;}\]]+)"
        ),
        rf"\1\2{CUT}",
    ),
    # What clients send and get: engines log it where they are asked to.
    (
        re.compile(
            r"(?im)\b(prompt|prompt_token_ids|prompt_tokens_ids|messages|input_ids|token_ids|"
            r"output_text|text)([\"']?\s*[:=]\s*)(?=[\"'\[{]).*$"
        ),
        rf"\1\2{CUT}",
    ),
    # API keys: Baton's own (bk-), and those of services around it.
    (
        re.compile(
            r"\b(?:bk|sk|pk|rk|nvapi|glpat|xox[abpr]|hf|gh[pousr]|github_pat)[-_]"
            r"[A-Za-z0-9_-]{12,}"
        ),
        CUT,
    ),
    (re.compile(r"\b[0-9a-fA-F]{48,}\b"), CUT),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), CUT),
)
"""What looks like a secret, and what takes its place. Ids of requests have 32 hex digits.

Each is linear in the text: a client may have written it.
"""
_URL: Final = re.compile(r"(://[^\s?#\"'<>]*)([?#][^\s\"'<>]+)?")
"""A URL after its scheme, cut where it has a query. Without one it matches, too: else the search
would go on within it, and through it again."""

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_COMMENT: Final = re.compile(r"# (?:HELP|TYPE) [a-zA-Z_:][\w:]* .*")


class Redactor:
    """Cuts what an archive must not have. `secrets` are texts that are known to be secret."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {text for text in secrets if len(text) >= MIN_SECRET_CHARS}
        longest_first = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None

    def text(self, text: str) -> str:
        """Free text."""
        if self._known is not None:
            text = self._known.sub(CUT, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return _URL.sub(_cut_query, text)

    def page(self, body: bytes) -> bytes:
        """A JSON page, with line breaks.

        Raises:
            ProtocolError: it is not JSON, or nested too deep.
        """
        try:
            decoded: Json = msgspec.json.decode(body)
            return msgspec.json.format(msgspec.json.encode(self._value("", decoded)))
        except UNDECODABLE as exc:
            raise ProtocolError(f"it is not JSON: {exc}") from exc

    def metrics(self, body: bytes) -> bytes:
        """Prometheus's text format; lines that are not of that format are left out."""
        lines = (self._metric_line(line) for line in body.decode(errors="replace").split("\n"))
        return "".join(f"{line}\n" for line in lines if line is not None).encode()

    def _value(self, name: str, value: Json, *, is_listed: bool = False) -> Json:
        if isinstance(value, dict):
            # Keys are names of fields, transports, models: free text, too.
            return {self.text(key): self._inner(name, key, inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._value(name, inner, is_listed=True) for inner in value]
        if isinstance(value, str):
            return self.text(value) if name in PAGE_STRINGS else CUT
        is_token = is_listed and isinstance(value, int | float)
        return CUT if is_token and name not in PAGE_NUMBER_LISTS else value

    def _inner(self, name: str, key: str, value: Json) -> Json:
        """Of a table by model or by label, the table's name decides."""
        is_listed = name in PAGE_STRINGS and isinstance(value, str)
        return self._value(name if is_listed else key, value)

    def _metric_line(self, line: str) -> str | None:
        if _COMMENT.fullmatch(line):
            return self.text(line)
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            return None
        name, labels, value = sample.groups()
        if labels is None:
            return f"{name} {value}"
        kept = ",".join(self._label(*found.groups()) for found in _LABEL.finditer(labels))
        return f"{name}{{{kept}}} {value}"

    def _label(self, name: str, value: str) -> str:
        return f'{name}="{self.text(value) if name in LABELS else CUT}"'


def _cut_query(url: re.Match[str]) -> str:
    start, query = url.groups()
    return start if query is None else f"{start}?{CUT}"
