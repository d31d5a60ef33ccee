"""Reads what gateways are asked for, and has the fleet resized.

    gateways' `/debug/demand` ─► `baton.router.scaling.Scaler` ─► `RoleChanges`

Nothing depends on it: without it, or where no gateway answers, the fleet stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, BatonError, ConfigError
from baton.launch.role_changes import RoleChanges, count_members
from baton.ops.gateway_pages import OK, Gateway, PageError, read_refusal
from baton.protocol.demand import DemandReport
from baton.protocol.gateway_http import DEMAND_PATH
from baton.router.demand import Limits
from baton.router.scaling import Resize, RoleBounds, Scaler, ScalingOptions, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.clock import Clock
    from baton.config.sections import ScalingSection
    from baton.launch.fleet import FleetControl, FleetStatus

DNS_PREFIX: Final = "dns:"
"""Of a gateway's URL: each address of its host is a gateway."""

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
        interval_s=settings.interval_s,
    )


class DemandReader:
    """Reads gateways' reports. `model` None: the only one that they report. Owner: one event loop.

    `urls`: see `scaling.gateways`. Each problem is logged when it comes, and when it is over.
    """

    def __init__(self, urls: Sequence[str], model: str | None) -> None:
        self._model = model
        self._found: str | None = None
        self._gateways: list[Gateway] = []
        self._names: list[Gateway] = []
        for url in urls:
            kind = self._names if url.startswith(DNS_PREFIX) else self._gateways
            kind.append(Gateway.at(url.removeprefix(DNS_PREFIX), "--gateway"))
        self._problems = Problems()

    async def read(self) -> dict[str, DemandReport]:
        """Of the gateways that answer, by URL."""
        named = await asyncio.gather(*(asyncio.to_thread(self._resolve, n) for n in self._names))
        gateways = [*self._gateways, *(each for found in named for each in found)]
        reports = await asyncio.gather(
            *(asyncio.to_thread(self._read_one, each) for each in gateways)
        )
        urls = (each.url for each in gateways)
        return {url: each for url, each in zip(urls, reports, strict=True) if each is not None}

    def find_model(self, reports: Mapping[str, DemandReport]) -> str | None:
        """The model that the fleet serves, while none is reported the last one; None: unknown."""
        models = sorted({each.model for report in reports.values() for each in report.models})
        problem = None
        if self._model is not None and models and self._model not in models:
            problem = f"they serve {', '.join(models)}: scaling.model is {self._model}"
        elif self._model is None and len(models) > 1:
            problem = f"they serve {', '.join(models)}: set scaling.model"
        self._problems.note("the gateways", problem)
        if models:
            self._found = models[0] if len(models) == 1 else None
        return self._model or self._found

    def _resolve(self, name: Gateway) -> tuple[Gateway, ...]:
        try:
            found = name.list_addresses()
        except PageError as exc:
            self._problems.note(name.host, str(exc))
            return ()
        self._problems.note(name.host, None)
        return found

    def _read_one(self, gateway: Gateway) -> DemandReport | None:
        try:
            status, body = gateway.get(DEMAND_PATH)
            report = _decoder.decode(body) if status == OK else None
        except PageError as exc:
            self._problems.note(gateway.url, str(exc))
        except UNDECODABLE as exc:
            self._problems.note(gateway.url, f"its report does not decode: {exc}")
        else:
            refusal = f"{DEMAND_PATH} answered {status}: {read_refusal(body)}"
            self._problems.note(gateway.url, None if report is not None else refusal)
            return report
        return None


class Problems:
    """What does not work at present, logged as it changes."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    def note(self, source: str, problem: str | None) -> None:
        """None: it works."""
        before = self._present.get(source)
        if problem is None:
            self._present.pop(source, None)
            if before is not None:
                log.info("%s: well again", source)
        elif problem != before:
            self._present[source] = problem
            log.warning("%s: %s; nothing is changed by it meanwhile", source, problem)


class Autoscaler:
    """One fleet's. Owner: one event loop. `on_line` gets decisions, and how they are carried out.

    `applies` False: decisions are not carried out.
    """

    def __init__(
        self,
        control: FleetControl,
        demand: DemandReader,
        options: ScalingOptions,
        clock: Clock,
        *,
        on_line: Callable[[str], None],
        applies: bool = True,
    ) -> None:
        self._control, self._demand, self._options = control, demand, options
        self._clock, self._on_line, self._applies = clock, on_line, applies
        self._scaler: Scaler | None = None
        self._problems = Problems()
        self.changes = RoleChanges(control, clock, on_line)

    async def run(self, interval_s: float) -> None:
        """Look every `interval_s`, until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(interval_s)

    async def step(self) -> Resize | None:
        """Look once, and begin what is due: what was decided. Changes go on in the background."""
        reports = await self._demand.read()
        ended = self.changes.list_ended()  # before the status is read, which shows their effect
        status = await self._read_status()
        model = self._demand.find_model(reports)
        if status is None:
            return None
        self.changes.note(status, ended)
        present, starting = count_members(status)
        if model is None or not reports:
            return None
        if self._scaler is None or self._scaler.model != model:
            self._scaler = Scaler(model, self._options)
        decision = self._scaler.decide(reports, present, starting, self._clock.now())
        if decision is not None and self._applies:
            self.changes.begin(present, decision.size, decision.reason)
        elif decision is not None:
            self._on_line(f"{present} → {decision.size}: {decision.reason}")
        return decision

    async def _read_status(self) -> FleetStatus | None:
        try:
            status = await self._control.status()
        except BatonError as exc:
            self._problems.note("the fleet", str(exc))
            return None
        self._problems.note("the fleet", None)
        return status
