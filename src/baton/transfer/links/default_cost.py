"""What a link is taken to cost before anything was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.transfer.links.model import LinkModel

if TYPE_CHECKING:
    from baton.transfer.interface import Capabilities

SAME_HOST: Final = LinkModel(latency_s=30e-6, descriptor_s=0.3e-6, byte_s=1 / 8e9)
NETWORK: Final = LinkModel(latency_s=150e-6, descriptor_s=0.6e-6, byte_s=1 / 2e9)


def default_link_model(capabilities: Capabilities) -> LinkModel:
    """By what the transport says of itself; equal guesses leave the choice to the listed order."""
    return SAME_HOST if capabilities.same_host_only else NETWORK
