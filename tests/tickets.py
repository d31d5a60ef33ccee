"""Tickets of a gateway that tests play: each with its number, and a lifetime in seconds."""

from __future__ import annotations

from typing import Final

from baton.auth.ticket import TicketIssuer
from baton.clock import MachineClock

issue: Final = TicketIssuer(MachineClock()).issue
