"""Whether two workers can exchange KV, and through which of their KV views. Pure.

KV goes from the listener (prefill) to the dialer (decode); the dialer's preference counts first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import LayoutMismatchError
from baton.kv.compatibility import find_differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from baton.handoff.messages import Hello, KVViewDescriptor
    from baton.kv.layout import KVLayout

MAX_REASONS: Final = 64
MAX_REASON_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class ViewPair:
    """Which view of either side: indices into the `views` of their Hellos."""

    dialer: int
    listener: int


@dataclass(frozen=True, slots=True)
class NegotiatedViews:
    """The pair as one side sees it: `ours` is an index into its own views."""

    ours: int
    theirs: KVViewDescriptor


def choose_views(dialer: Sequence[KVLayout], listener: Sequence[KVLayout]) -> ViewPair | None:
    """The first pair, in the dialer's order, between which KV can be exchanged; None if none."""
    for mine, destination in enumerate(dialer):
        for theirs, source in enumerate(listener):
            if not find_differences(source, destination):
                return ViewPair(mine, theirs)
    return None


def negotiate(dialer: Hello, listener: Hello) -> ViewPair:
    """The KV views through which two workers exchange KV.

    Raises:
        LayoutMismatchError: they cannot; with the reason, and each trait in which they differ.
    """
    names = f"on {dialer.worker}", f"on {listener.worker}"
    if dialer.version != listener.version:
        versions = f"{dialer.version} {names[0]}, {listener.version} {names[1]}"
        raise LayoutMismatchError((f"handoff protocol: {versions}",))
    traits = _explain_traits(dialer, listener)
    if dialer.fingerprint != listener.fingerprint:
        prints = f"{dialer.fingerprint[:16]}… {names[0]}, {listener.fingerprint[:16]}… {names[1]}"
        raise _refusal([f"another model: fingerprint {prints}", *traits])
    layouts = [[view.layout for view in hello.views] for hello in (dialer, listener)]
    pair = choose_views(*layouts)
    if pair is None:
        raise _refusal([*_explain_views(*layouts), *traits])
    return pair


def _refusal(reasons: Iterable[str]) -> LayoutMismatchError:
    lines = [reason[:MAX_REASON_CHARS] for reason in reasons]
    return LayoutMismatchError(tuple(lines[:MAX_REASONS]))


def _explain_views(dialer: Sequence[KVLayout], listener: Sequence[KVLayout]) -> Iterator[str]:
    """What keeps each pair apart; "source" is the listener."""
    is_one_pair = len(dialer) == len(listener) == 1
    for mine, destination in enumerate(dialer):
        for theirs, source in enumerate(listener):
            pair = "" if is_one_pair else f"view {theirs} into view {mine}: "
            for difference in find_differences(source, destination):
                yield pair + difference


def _explain_traits(dialer: Hello, listener: Hello) -> list[str]:
    ours, theirs = dialer.traits, listener.traits
    return [
        f"{name}: {ours.get(name, 'not given')} on {dialer.worker}, "
        f"{theirs.get(name, 'not given')} on {listener.worker}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
