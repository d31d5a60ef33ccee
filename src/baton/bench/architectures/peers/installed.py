"""Whether a peer's packages are there, and how to get them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.architectures.arms import Peer

MODULES: Final[Mapping[Peer, tuple[str, ...]]] = {
    "nixl": ("vllm", "nixl"),
    "vllm-router": ("vllm", "vllm_router"),
}
HINTS: Final[Mapping[str, str]] = {
    "vllm": "make install ENGINE=vllm",
    "nixl": "pip install --no-deps nixl==1.5.1 nixl_cu12==1.5.1",
    "vllm_router": "pip install --no-deps vllm-router==0.1.17 orjson setproctitle",
}


def find_missing(peer: Peer) -> str | None:
    """What is not installed, and how to install it; None: nothing."""
    missing = [name for name in MODULES[peer] if find_spec(name) is None]
    if not missing:
        return None
    return "; ".join(f"{name} is not installed: {HINTS[name]}" for name in missing)
