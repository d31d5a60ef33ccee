"""What goes wrong between an operator and a running fleet."""

from baton.errors import BatonError


class FleetError(BatonError):
    """A fleet cannot be reached, or refuses; the message has cause and remedy."""
