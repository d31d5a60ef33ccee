"""What workers have measured of transfers, as the gateway shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.ids import Epoch
from baton.telemetry.transfers import HandoffLabels, LandedHandoff, TransferTable
from baton.testing.clocks import ManualClock
from tests.integration.gateway_cluster import run, until_true
from tests.integration.scripted_worker import ScriptedWorker, say_abc
from tests.unit.telemetry.test_transfers import landed_trace

if TYPE_CHECKING:
    from tests.integration.gateway_cluster import Cluster


def report() -> bytes:
    table, trace = TransferTable(Epoch("1" * 32), ManualClock()), landed_trace("prefill-0")
    landed = LandedHandoff.of(trace)
    assert landed is not None
    table.handoff(trace, HandoffLabels("same_host", "tcp", "push", "WRITE"), landed)
    return msgspec.json.encode(table.report())


def test_the_gateway_reads_every_worker_and_a_report_that_is_none_is_left_out() -> None:
    good, old, bad = (ScriptedWorker(f"decode-{n}", "decode", say_abc) for n in range(3))
    good.transfers = report()
    bad.transfers = good.transfers.replace(b'"num":1,', b'"num":-1,')

    async def scenario(cluster: Cluster) -> None:
        async def is_read() -> bool:
            status, page = await cluster.get_json("/debug/transfers")
            assert status == 200
            return bool(page["handoffs"])

        await until_true(is_read)
        _, page = await cluster.get_json("/debug/transfers")
        (pair,) = page["handoffs"]
        assert (pair["prefill"], pair["decode"]) == ("prefill-0", "decode-0")
        assert pair["total"]["num"] == 1
        assert page["num_workers"] == 1

    run(scenario, decodes=[good, old, bad])
