"""A workload's name and its flags → the workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.bench.workloads.lengths import PRESETS, Lengths, fixed_lengths
from baton.bench.workloads.reuse import MultiTurn, SharedPrefix, multi_turn, shared_prefix
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.workloads.asking import Workload

NAMES: Final = ("fixed", *PRESETS, "shared-prefix", "multi-turn")
MAX_TOKENS: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for; None is the workload's own default."""

    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_prefixes: int | None = None
    num_prefix_tokens: int | None = None
    num_turns: int | None = None
    pause_s: float | None = None


def choose_workload(name: str, wishes: Wishes) -> Workload:
    """The workload of this name.

    Raises:
        ConfigError: there is none, or a number is out of bounds.
    """
    _check(wishes)
    if name in PRESETS or name == "fixed":
        _refuse_reuse(name, wishes)
        return fixed_lengths(_lengths(wishes, PRESETS.get(name, PRESETS["balanced"])), name)
    if name == "shared-prefix":
        return shared_prefix(
            SharedPrefix(
                wishes.num_prefixes or 8,
                wishes.num_prefix_tokens or 1024,
                _lengths(wishes, Lengths(128, 64)),
            )
        )
    if name == "multi-turn":
        return multi_turn(
            MultiTurn(
                wishes.num_turns or 4,
                wishes.num_prefix_tokens or 256,
                _lengths(wishes, Lengths(64, 64)),
                wishes.pause_s or 0.0,
            )
        )
    raise ConfigError(f"--workload {name}: not one of {', '.join(NAMES)}")


def _lengths(wishes: Wishes, default: Lengths) -> Lengths:
    return Lengths(
        wishes.num_input_tokens or default.num_input_tokens,
        wishes.num_output_tokens or default.num_output_tokens,
    )


def _check(wishes: Wishes) -> None:
    given = {
        "--input-len": wishes.num_input_tokens,
        "--output-len": wishes.num_output_tokens,
        "--prefixes": wishes.num_prefixes,
        "--prefix-len": wishes.num_prefix_tokens,
        "--turns": wishes.num_turns,
    }
    for flag, number in given.items():
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise ConfigError(f"{flag}: {number} is not in [1, {MAX_TOKENS}]")
    if wishes.pause_s is not None and wishes.pause_s < 0:
        raise ConfigError("--pause: not below 0")


def _refuse_reuse(name: str, wishes: Wishes) -> None:
    given = (wishes.num_prefixes, wishes.num_prefix_tokens, wishes.num_turns, wishes.pause_s)
    if any(each is not None for each in given):
        raise ConfigError(
            f"--workload {name} shares nothing: --prefixes, --prefix-len, --turns and --pause are "
            "for shared-prefix and multi-turn"
        )
