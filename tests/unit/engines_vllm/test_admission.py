"""The scheduler's hooks over stand-ins for vLLM's requests and steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import HandoffMode, Ticket, WorkerRef, hash_tenant, seal
from baton.engines.stall_detector import STALL_TIMEOUT_S
from baton.engines.vllm.admission import Admission, HeldPrompts
from baton.engines.vllm.identity import Identity, ModelFacts, RankFacts
from baton.engines.vllm.step_orders import Occupancy, StepReport
from baton.engines.vllm.tickets import TicketReader
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.kv.identity import compute_prompt_hash
from baton.kv.layout import KVLayout, LayerLayout
from baton.protocol.worker_http import KVEventsSource
from baton.testing.clocks import ManualClock
from tests.tickets import issue

KEY = Credentials.of(ClusterKey(b"k" * 32))
ME = WorkerRef(WorkerId("v0"), Epoch("0" * 32), "127.0.0.1:1")
PEER = WorkerRef(WorkerId("v1"), Epoch("a" * 32), "127.0.0.1:2")
IDENTITY = Identity(ME.worker, ME.epoch, "both", 1)
EVENTS = KVEventsSource("ipc:///tmp/kv.ipc", None, "kv")
MODEL = ModelFacts("/models/m", "m", 4096, ("shared", "tcp"), EVENTS)
FACTS = RankFacts(
    "127.0.0.1:9",
    "http://127.0.0.1:10",
    "f" * 64,
    KVLayout.gqa(2, 4, 32, block_size=4, dtype="float32"),
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make_admission(clock: ManualClock, *, may_unmap_kv: bool = False) -> Admission:
    made = Admission(
        IDENTITY,
        replace(MODEL, may_unmap_kv=may_unmap_kv),
        block_size=4,
        held=HeldPrompts(max_blocks=5),
        reader=TicketReader(IDENTITY, KEY, clients_are_gateways=False),
        clock=clock,
    )
    made.set_ranks({0: FACTS})
    return made


@pytest.fixture
def admission(clock: ManualClock) -> Admission:
    return make_admission(clock)


def sealed(
    prefill: WorkerRef, decode: WorkerRef, mode: HandoffMode = "push", salt: str = "salt"
) -> str:
    return seal(Ticket(new_ticket_id(), "req-1", prefill, decode, mode, issue(60), salt), KEY)


def make_lora(folder: object, name: str = "sql", **changes: object) -> Any:
    fields = {"lora_name": name, "lora_path": str(folder)}
    defaults = {"is_3d_lora_weight": False, "load_inplace": False}
    return SimpleNamespace(**{**fields, **defaults, **changes})


def request(params: dict[str, object] | None, name: str = "r", **changes: object) -> Any:
    fields: dict[str, object] = {
        "request_id": name,
        "kv_transfer_params": params,
        "prompt_token_ids": list(range(9)),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "resumable": False,
        "num_prompt_tokens": 9,
        "num_output_tokens": 1,
        "status": SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    }
    return SimpleNamespace(**(fields | changes))


def sending(mode: HandoffMode = "push") -> dict[str, object]:
    return {"baton_ticket": sealed(ME, PEER, mode), "do_remote_decode": True}


def receiving() -> dict[str, object]:
    return {"baton_ticket": sealed(PEER, ME), "do_remote_prefill": True}


def step(
    new: tuple[Any, ...] = (), cached: tuple[Any, ...] = (), preempted: set[str] | None = None
) -> Any:
    """`(request, blocks, num_computed, num_scheduled)` for each."""
    return SimpleNamespace(
        num_scheduled_tokens={r: n for r, _, _, n in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c) for r, b, c, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _, _, _ in cached],
            new_block_ids=[None if b is None else (b,) for _, b, _, _ in cached],
            num_computed_tokens=[c for _, _, c, _ in cached],
        ),
        preempted_req_ids=preempted,
        finished_req_ids=set(),
    )


def test_a_request_without_parameters_costs_nothing(admission: Admission) -> None:
    plain = request(None)
    admission.add(plain)
    assert admission.count_missing(plain, 0) == 0
    admission.allocated(plain, ([1, 2],), 0)
    assert admission.step(step(new=(("r", [1, 2, 3], 0, 9),))).offers == ()
    assert admission.finish(plain) == (False, None)


def test_the_probe_is_answered_with_all_that_a_gateway_needs(admission: Admission) -> None:
    probe = request({"baton_info": True})
    assert admission.count_missing(probe, 0) == 0
    held, said = admission.finish(probe)
    assert not held
    assert said is not None
    info: Any = said["baton_info"]
    assert (info["worker"], info["epoch"], info["protocol"]) == ("v0", "0" * 32, "vllm")
    assert info["handoff_address"] == "127.0.0.1:9"
    assert info["control_urls"] == ("http://127.0.0.1:10",)
    assert info["kv_events"]["endpoint"] == "ipc:///tmp/kv.ipc"
    assert info["layout"]["block_size"] == 4


def test_both_sides_name_the_prompt_alike(admission: Admission) -> None:
    prefill = request(sending(), "p")
    decode = request(receiving(), "d")
    expected = compute_prompt_hash("f" * 64, "salt", np.arange(9, dtype=np.int32))
    admission.add(prefill)
    (offer,) = admission.step(step(new=(("p", [1, 2, 3], 0, 9),))).offers
    assert admission.count_missing(decode, 0) == 9
    admission.allocated(decode, ([4, 5, 6],), 9)
    (expect,) = admission.step(step()).expected
    assert offer.prompt.prompt_hash == expect.prompt.prompt_hash == expected


def test_a_prefill_legs_answer_says_what_became_of_it(admission: Admission) -> None:
    good, bad = request(sending(), "good"), request(sending(), "bad")
    for one in (good, bad):
        admission.add(one)
    admission.step(step(new=(("good", [1, 2], 0, 5), ("bad", [3, 4, 5], 0, 9))))
    admission.step(step(cached=(("good", [6], 5, 4), ("bad", None, 9, 1))))
    admission.update_from_workers(None, None, StepReport((("bad", "the peer is gone"),)))
    assert admission.finish(good) == (True, {"baton": {"status": "offered"}})
    refused = {"status": "refused", "code": "handoff_failed", "reason": "the peer is gone"}
    assert admission.finish(bad) == (True, {"baton": refused})


def test_a_preempted_prefill_gives_its_blocks_back_at_once(admission: Admission) -> None:
    one = request(sending())
    admission.add(one)
    admission.step(step(new=(("r", [1], 0, 4),)))
    assert admission.step(step(preempted={"r"})).preempted == ("r",)
    held, said = admission.finish(one)
    assert not held
    assert said is not None


def test_the_first_of_several_children_takes_the_ticket(admission: Admission) -> None:
    params = receiving()
    first, second = request(params, "0_r"), request(params, "1_r")
    assert admission.count_missing(first, 0) == 9
    assert admission.count_missing(second, 0) == 0
    assert admission.count_missing(first, 4) == 5
    assert admission.take_refused() == {"replayed_ticket": 1}
    assert admission.take_refused() == {}
    assert admission.finish(second) == (False, None)


def test_what_vllm_sends_after_a_cancelled_request_is_no_second_use(admission: Admission) -> None:
    """With the same parameters and another prompt, for what never came to the engine."""
    params, after = receiving(), {"prompt_token_ids": [0], "abort_immediately": True}
    decode, cleanup = request(params, "d"), request(params, "after", **after)
    admission.arrived(decode)
    admission.finish(decode)
    admission.arrived(cleanup)
    assert admission.finish(cleanup) == (False, None)
    assert admission.take_refused() == {}
    unread = request(receiving(), "unread", num_prompt_tokens=1, **after)
    admission.arrived(unread)
    admission.finish(unread)
    assert len(admission.step(step()).declined) == 2, "its prefill worker is told"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"mm_features": ["an image"]},
        {"lora_request": make_lora("/nowhere")},
        {"resumable": True},
    ],
)
def test_kv_that_depends_on_more_than_tokens_is_not_handed_over(
    admission: Admission, changes: dict[str, object]
) -> None:
    one = request(sending(), **changes)
    admission.add(one)
    assert admission.step(step(new=(("r", [1, 2, 3], 0, 9),))).offers == ()
    held, said = admission.finish(one)
    assert not held
    assert said is not None
    report: Any = said["baton"]
    assert report["code"] == "unsupported_request"


def test_what_a_decode_server_refuses_is_not_kept_for_it(admission: Admission) -> None:
    """Else the prefill server would hold the prompt's blocks until its lease is over."""
    decode = request(receiving(), lora_request=make_lora("/nowhere"))
    assert admission.count_missing(decode, 0) == 0
    (declined,) = admission.step(step()).declined
    assert declined.prompt.ticket.decode == ME
    assert "/nowhere" in declined.reason
    assert admission.take_refused() == {"unsupported_request": 1}
    admission.finish(decode)
    assert admission.step(step()).declined == ()


def test_a_prompt_beyond_the_window_is_not_handed_over(admission: Admission) -> None:
    """Its first blocks are another's while the rest is computed, and decode has none for them."""
    layers = (LayerLayout.gqa(4, 32), LayerLayout.gqa(4, 32, window_tokens=9))
    admission.set_ranks({0: replace(FACTS, layout=KVLayout(layers, 4, "float32"))})
    for num_tokens, is_handed_over in ((8, True), (9, False)):
        ids = {"prompt_token_ids": list(range(num_tokens)), "num_prompt_tokens": num_tokens}
        decode = request(receiving(), f"d{num_tokens}", **ids)
        assert admission.count_missing(decode, 0) == (num_tokens if is_handed_over else 0)
        prefill = request(sending(), f"p{num_tokens}", **ids)
        admission.add(prefill)
        orders = admission.step(step(new=((prefill.request_id, [1, 2, 3], 0, num_tokens),)))
        assert bool(orders.offers) is is_handed_over
    assert admission.take_refused() == {"unsupported_request": 2}


def test_a_request_that_was_rejected_before_it_was_added_is_declined(
    admission: Admission,
) -> None:
    """vLLM's own way to say that a request will never run: it is finished, and nothing else."""
    assert admission.finish(request(receiving())) == (False, None)
    assert len(admission.step(step()).declined) == 1


def compute(admission: Admission, name: str, mode: HandoffMode) -> dict[str, object]:
    """A prefill leg of nine tokens (three blocks) from its arrival to its answer."""
    leg = request(sending(mode), name)
    admission.add(leg)
    admission.step(step(new=((name, [1, 2, 3], 0, 9),)))
    _, said = admission.finish(leg)
    assert said is not None
    return said["baton"]  # type: ignore[return-value]


def test_prompts_that_wait_to_be_pulled_hold_so_many_blocks_at_most(admission: Admission) -> None:
    assert compute(admission, "first", "pull") == {"status": "offered"}
    second = compute(admission, "second", "pull")
    assert (second["status"], second["code"]) == ("refused", "overloaded")
    assert compute(admission, "pushed", "push") == {"status": "offered"}
    admission.update_from_workers(None, {"first"}, None)
    assert compute(admission, "third", "pull") == {"status": "offered"}


def test_a_pull_that_is_cancelled_in_the_queue_holds_nothing(admission: Admission) -> None:
    leg = request(sending("pull"), status=SimpleNamespace(name="FINISHED_ABORTED"))
    admission.add(leg)
    admission.finish(leg)
    assert compute(admission, "next", "pull") == {"status": "offered"}


def test_what_waits_in_vllms_queue_is_told_once(admission: Admission) -> None:
    leg = request(receiving())
    admission.add(leg)
    (queued,) = admission.step(step()).queued
    assert queued.num_tokens == 9
    assert admission.step(step()).queued == ()


def test_in_mode_pool_workers_are_told_the_tokens(admission: Admission) -> None:
    for mode in ("push", "pool"):
        name = f"r-{mode}"
        params = {"baton_ticket": sealed(PEER, ME, mode), "do_remote_prefill": True}
        asked = request(params, name)
        assert admission.count_missing(asked, 0) == 9
        admission.allocated(asked, ([1, 2, 3],), 9)
        (expect,) = admission.step(step()).expected
        token_ids = expect.prompt.token_ids
        told = None if token_ids is None else token_ids.tolist()
        assert told == (list(range(9)) if mode == "pool" else None)


@pytest.mark.parametrize("ticket_salt", ["", hash_tenant("another")])
def test_in_mode_pool_a_request_of_another_tenant_than_its_ticket_is_refused(
    admission: Admission, ticket_salt: str
) -> None:
    params = {"baton_ticket": sealed(PEER, ME, "pool", ticket_salt), "do_remote_prefill": True}
    asked = request(params, cache_salt="a tenant")
    assert admission.count_missing(asked, 0) == 0
    assert admission.take_refused() == {"unsupported_request": 1}
    mine = sealed(PEER, ME, "pool", hash_tenant("a tenant"))
    asked = request({"baton_ticket": mine, "do_remote_prefill": True}, "r2", cache_salt="a tenant")
    assert admission.count_missing(asked, 0) == 9


class Blocks:
    """As vLLM's pool: one block is its own."""

    num_gpu_blocks = 11
    num_free = 10

    def get_num_free_blocks(self) -> int:
        return self.num_free


def test_workers_are_told_of_the_queue_and_of_free_blocks_when_they_change(
    admission: Admission,
) -> None:
    assert admission.step(step()).occupancy is None
    blocks = Blocks()
    admission.bind(blocks)
    plain = request(None)
    admission.arrived(plain)
    assert admission.step(step()).occupancy == Occupancy(1, 10, 10, 4)
    admission.count_missing(plain, 0)
    admission.allocated(plain, ([1, 2, 3],), 0)
    blocks.num_free = 7
    assert admission.needs_step
    orders = admission.step(step(new=(("r", [1, 2, 3], 0, 9),)))
    assert orders.occupancy == Occupancy(0, 10, 7, 4)
    assert not admission.needs_step
    assert admission.step(step()).occupancy is None, "it was told"
    admission.finish(plain)
    blocks.num_free = 10
    assert admission.needs_step
    assert admission.step(step()).occupancy == Occupancy(0, 10, 10, 4)
    assert not admission.needs_step


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_kv_that_nobody_takes_gives_way_to_who_waits_for_its_room(
    admission: Admission, clock: ManualClock, mode: HandoffMode
) -> None:
    compute(admission, "held", mode)
    late = request(None, "late")
    admission.arrived(late)

    def plan(after_s: float, **planned: Any) -> bool:
        clock.advance(after_s)
        admission.count_missing(late, 0)
        return admission.step(step(**planned)).is_stalled

    assert not plan(0)
    assert not plan(STALL_TIMEOUT_S / 2)
    assert plan(STALL_TIMEOUT_S / 2)
    busy = {"cached": (("another", None, 9, 1),)}
    assert not plan(STALL_TIMEOUT_S, **busy)
    assert not plan(0)
    assert plan(STALL_TIMEOUT_S)
    admission.update_from_workers(None, {"held"}, None)  # its blocks are vLLM's again
    assert not plan(STALL_TIMEOUT_S)
    assert not plan(STALL_TIMEOUT_S)


def test_a_request_that_ends_after_a_reset_preempted_it_waits_no_more(admission: Admission) -> None:
    """vLLM's reset preempts between two steps; the next one reports it, and that it has ended."""
    admission.bind(Blocks())
    running = request(None)
    admission.arrived(running)
    admission.count_missing(running, 0)
    admission.allocated(running, ([1, 2, 3],), 0)
    assert admission.step(step(new=(("r", [1, 2, 3], 0, 9),))).occupancy == Occupancy(0, 10, 10, 4)
    admission.finish(running)
    after = step(preempted={"r"})
    after.finished_req_ids.add("r")
    assert admission.step(after).occupancy is None, "none waits, as before"


def test_a_request_that_runs_again_after_a_reset_preempted_it_waits_no_more(
    admission: Admission,
) -> None:
    """vLLM's reset preempts between two steps; the next one reports it, and runs it again."""
    admission.bind(Blocks())
    running = request(None)
    admission.arrived(running)
    planned: dict[str, Any] = {"new": (("r", [1, 2, 3], 0, 9),)}
    for preempted in (set(), {"r"}):
        admission.count_missing(running, 0)
        admission.allocated(running, ([1, 2, 3],), 0)
        told = admission.step(step(**planned, preempted=preempted)).occupancy
        assert told == (None if preempted else Occupancy(0, 10, 10, 4))
