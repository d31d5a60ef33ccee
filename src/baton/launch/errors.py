"""Errors of a fleet that cannot be reached, or refuses."""

from baton.errors import BatonError


class FleetError(BatonError):
    """A fleet cannot be reached, or refuses; the message has the cause and what to do."""


class UnplacedError(FleetError):
    """No host has room for a process, or none has the labels that it needs."""
