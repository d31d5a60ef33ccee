"""What workers have measured of transfers, as the gateway shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.ids import Epoch
from baton.telemetry.transfers import HandoffLabels, LandedHandoff, TransferTable
from baton.testing.clocks import ManualClock
from tests.integration.gateway_cluster import run, until_true
from tests.integration.scripted_vllm import ScriptedVllm, say_abc_as_vllm
from tests.integration.scripted_worker import ScriptedWorker, say_abc
from tests.unit.telemetry.test_transfers import landed_trace

if TYPE_CHECKING:
    from tests.integration.gateway_cluster import Cluster


def report(epoch: str = "1") -> bytes:
    table, trace = TransferTable(Epoch(epoch * 32), ManualClock()), landed_trace("prefill-0")
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


def test_every_rank_of_a_vllm_server_is_read_and_one_that_is_silent_hides_no_other() -> None:
    servers = [
        ScriptedVllm(f"decode-{n}", "decode", say_abc_as_vllm, num_ranks=2) for n in range(2)
    ]
    both, second_alone = servers
    for epoch, control in enumerate((*both.controls, second_alone.controls[1]), 1):
        control.transfers = report(str(epoch))

    async def scenario(cluster: Cluster) -> None:
        async def is_read() -> bool:
            _, page = await cluster.get_json("/debug/transfers")
            return len(page["handoffs"]) == 2

        await until_true(is_read)
        _, page = await cluster.get_json("/debug/transfers")
        found = {pair["decode"]: pair["total"] for pair in page["handoffs"]}
        # A handoff is one of all ranks, with the bytes of all.
        assert {name: total["num"] for name, total in found.items()} == {
            "decode-0": 1, "decode-1": 1,
        }  # fmt: skip
        assert found["decode-0"]["num_bytes"] == 2 * found["decode-1"]["num_bytes"]

    run(scenario, decodes=servers)
