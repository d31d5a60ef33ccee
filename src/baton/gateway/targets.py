"""What a client, or the operator for a model, wants of a request: when, how fast, before whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, get_args

from baton.errors import InvalidRequestError
from baton.router.fair_queue import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable

TTFT_HEADER: Final = "x-baton-ttft-ms"
TPOT_HEADER: Final = "x-baton-tpot-ms"
ITL_HEADER: Final = "x-baton-itl-ms"
PRIORITY_HEADER: Final = "x-baton-priority"
MIN_MS: Final = 0.001
MAX_TTFT_MS: Final = 3_600_000
MAX_TPOT_MS: Final = 60_000
"""Of gaps between tokens, too."""

_PREFIX: Final = b"x-baton-"
_NUMBER: Final = re.compile(rb"[0-9]{1,32}(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,3})?")
_PRIORITIES: Final = {name.encode(): name for name in get_args(Priority)}


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token, and for each token after it; the class. None: not named.

    `itl_s`: for all but 1 % of the gaps between tokens of an answer.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: Priority | None = None
    itl_s: float | None = None


NO_TARGETS: Final = Targets()


def read_targets(headers: Iterable[tuple[bytes, bytes]]) -> Targets:
    """What a request's headers name; of a header that is sent twice the last one counts.

    Raises:
        InvalidRequestError: a value is not what it should be.
    """
    found = {name: value for name, value in headers if name.startswith(_PREFIX)}
    if not found:
        return NO_TARGETS
    return Targets(
        _read_ms(found, TTFT_HEADER, MAX_TTFT_MS),
        _read_ms(found, TPOT_HEADER, MAX_TPOT_MS),
        _read_priority(found),
        _read_ms(found, ITL_HEADER, MAX_TPOT_MS),
    )


def _read_ms(found: dict[bytes, bytes], name: str, most: int) -> float | None:
    value = found.get(name.encode())
    if value is None:
        return None
    milliseconds = float(value) if _NUMBER.fullmatch(value) else 0.0
    if not MIN_MS <= milliseconds <= most:
        raise InvalidRequestError(
            f"{name} must be milliseconds, from {MIN_MS} to {most}; correct the header, or leave "
            "it out",
            param=name,
            code="invalid_value",
        )
    return milliseconds / 1000


def _read_priority(found: dict[bytes, bytes]) -> Priority | None:
    value = found.get(PRIORITY_HEADER.encode())
    if value is None:
        return None
    if value not in _PRIORITIES:
        raise InvalidRequestError(
            f"{PRIORITY_HEADER} must be low, normal or high; correct the header, or leave it out",
            param=PRIORITY_HEADER,
            code="invalid_value",
        )
    return cast("Priority", _PRIORITIES[value])
