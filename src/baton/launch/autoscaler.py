"""Reads what gateways are asked for, and has the fleet resized.

    gateways' `/debug/demand` ─► `baton.router.scaling.Scaler` ─► `FleetControl.scale`

Nothing depends on it: without it, or where no gateway answers, the fleet stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, BatonError, ConfigError
from baton.launch.fleet import FleetSize
from baton.ops.gateway_pages import OK, PageError, read_refusal
from baton.protocol.demand import DemandReport
from baton.router.demand import Limits
from baton.router.scaling import RoleBounds, Scaler, ScalingOptions, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.clock import Clock
    from baton.config.sections import ScalingSection
    from baton.launch.fleet import FleetControl, FleetStatus
    from baton.ops.gateway_pages import Gateway
    from baton.router.scaling import Resize

DEMAND_PATH: Final = "/debug/demand"
RETRY_AFTER_S: Final = 60.0
"""After the fleet refused a size."""

log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(DemandReport)


def make_options(settings: ScalingSection) -> ScalingOptions:
    """From the configuration.

    Raises:
        ConfigError: the bounds contradict each other.
    """
    for role in Size._fields:
        least, most = getattr(settings, f"min_{role}"), getattr(settings, f"max_{role}")
        if least > most and not (settings.max_both and role != "both"):
            raise ConfigError(f"scaling.min_{role} is {least}, and scaling.max_{role} {most}")
    pools, none = not settings.max_both, RoleBounds(0, 0)
    prefill = RoleBounds(settings.min_prefill, settings.max_prefill, settings.price_prefill)
    decode = RoleBounds(settings.min_decode, settings.max_decode, settings.price_decode)
    return ScalingOptions(
        Limits(settings.ttft_s, settings.tpot_s),
        prefill if pools else none,
        decode if pools else none,
        RoleBounds(settings.min_both, settings.max_both, settings.price_both),
        good_share=settings.good_share,
        headroom=settings.headroom,
        most_price=inf if settings.max_price is None else settings.max_price,
        grow_every_s=settings.grow_every_s,
        shrink_after_s=settings.shrink_after_s,
    )


class Autoscaler:
    """One fleet's. Owner: one event loop. `on_decision` is called before a decision is applied.

    `model` None: the one that the gateways report; where they report several, nothing is decided.
    `applies` False: decisions are announced alone.
    """

    def __init__(
        self,
        control: FleetControl,
        gateways: Sequence[Gateway],
        options: ScalingOptions,
        clock: Clock,
        *,
        model: str | None,
        on_decision: Callable[[Size, Resize], None],
        on_line: Callable[[str], None],
        applies: bool = True,
    ) -> None:
        self._control, self._gateways, self._options = control, gateways, options
        self._scaler = None if model is None else Scaler(model, options)
        self._applies = applies
        self._clock, self._on_decision, self._on_line = clock, on_decision, on_line
        self._failing: dict[str, str] = {}
        self._held_until = clock.now()

    async def run(self, interval_s: float) -> None:
        """Look every `interval_s`, until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(interval_s)

    async def step(self) -> Resize | None:
        """Look once, and resize if that is due: what was decided."""
        reports = await self._read_reports()
        status = await self._read_status()
        now = self._clock.now()
        scaler = self._find_scaler(reports)
        if status is None or scaler is None:
            return None
        present, num_starting = count_members(status)
        decision = scaler.decide(reports, present, num_starting, now)
        if decision is None or now < self._held_until:
            return None
        self._on_decision(present, decision)
        if self._applies:
            await self._resize(present, decision.size)
        return decision

    def _find_scaler(self, reports: Mapping[str, DemandReport]) -> Scaler | None:
        """Of the fleet's model, as soon as one is known."""
        if self._scaler is None:
            models = sorted({each.model for report in reports.values() for each in report.models})
            if len(models) > 1:
                self._note("the gateways", f"they serve {', '.join(models)}: set scaling.model")
            elif models:
                self._scaler = Scaler(models[0], self._options)
        return self._scaler if reports else None

    async def _read_reports(self) -> dict[str, DemandReport]:
        reports = await asyncio.gather(
            *(asyncio.to_thread(self._read_report, each) for each in self._gateways)
        )
        urls = (each.url for each in self._gateways)
        return {url: each for url, each in zip(urls, reports, strict=True) if each is not None}

    def _read_report(self, gateway: Gateway) -> DemandReport | None:
        try:
            status, body = gateway.get(DEMAND_PATH)
            if status != OK:
                raise PageError(f"{gateway.url}{DEMAND_PATH}: {status} {read_refusal(body)}")
            report = _decoder.decode(body)
        except PageError as exc:
            self._note(gateway.url, str(exc))
        except UNDECODABLE as exc:
            self._note(gateway.url, f"its report does not decode: {exc}")
        else:
            self._note(gateway.url, None)
            return report
        return None

    async def _read_status(self) -> FleetStatus | None:
        try:
            status = await self._control.status()
        except BatonError as exc:
            self._note("fleet", str(exc))
            return None
        self._note("fleet", None)
        return status

    def _note(self, source: str, problem: str | None) -> None:
        """Log what changed."""
        before = self._failing.get(source)
        if problem is None:
            self._failing.pop(source, None)
            if before is not None:
                log.info("%s answers again", source)
        elif problem != before:
            self._failing[source] = problem
            log.warning("%s: %s; nothing is changed without it", source, problem)

    async def _resize(self, present: Size, wanted: Size) -> None:
        changed = FleetSize(**{
            role: wanted_num
            for role, num, wanted_num in zip(Size._fields, present, wanted, strict=True)
            if num != wanted_num
        })
        try:
            async for line in self._control.scale(changed):
                self._on_line(line)
        except BatonError as exc:
            log.warning("the fleet stays as it is: %s; next try in %.0f s", exc, RETRY_AFTER_S)
            self._held_until = self._clock.now() + RETRY_AFTER_S


def count_members(status: FleetStatus) -> tuple[Size, int]:
    """Workers by role that serve or start, and how many of them start."""
    states = Counter(
        (each.role, each.state) for each in status.members if each.state in {"starting", "ready"}
    )
    size = Size(
        *(
            states[role, "starting"] + states[role, "ready"]
            for role in ("prefill", "decode", "both")
        )
    )
    num_starting = sum(
        num for (role, state), num in states.items() if state == "starting" and role != "gateway"
    )
    return size, num_starting
