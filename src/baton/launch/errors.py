"""The error of a fleet that cannot be reached, or refuses."""

from baton.errors import BatonError


class FleetError(BatonError):
    """A fleet cannot be reached, or refuses; the message has the cause and what to do."""
