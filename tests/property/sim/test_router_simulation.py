"""Placement in virtual time: every request is answered, blocks are counted, prefixes help."""

from __future__ import annotations

from random import Random
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.replay.plan import make_workers
from baton.events.blocks import BlockRemoved, BlockStored
from baton.router.cost import CostOptions, CostPolicy
from baton.router.placement import find_first_share
from baton.router.prefix import PrefixOptions, PrefixPolicy
from baton.router.simple import LeastLoaded, RandomChoice, RoundRobin
from baton.sim.router.cache import SimulatedCache
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.outcomes import summarize
from baton.sim.router.sessions import Session, TokenRun, TokenWriter, Turn
from baton.sim.router.simulation import NoRoomError, Simulation
from tests.examples import examples

POLICIES = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "prefix": lambda: PrefixPolicy(PrefixOptions()),
    "cost": lambda: CostPolicy(CostOptions()),
}

turns = st.builds(
    Turn,
    st.lists(
        st.builds(TokenRun, st.sampled_from("abcdef"), st.integers(1, 200)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.integers(1, 60),
    st.sampled_from([None, "a", "g"]),
)
sessions = st.lists(
    st.builds(
        Session,
        st.lists(turns, min_size=1, max_size=3).map(tuple),
        st.floats(0, 5),
        st.sampled_from([0.0, 0.5]),
    ),
    min_size=1,
    max_size=25,
)


def outcomes_of(policy, asked, costs=None, *, roles="both", seed=0, num_clients=None):
    simulation = Simulation([policy], make_workers(roles, None), costs or SimulatedCosts(), seed)
    if num_clients is None:
        simulation.replay(iter(sorted(asked, key=lambda each: each.arrival_s)))
    else:
        simulation.add_clients(iter(asked), num_clients)
    simulation.run()
    simulation.check_invariants()
    return simulation.outcomes


@pytest.mark.parametrize("roles", ["both", "1p2d"])
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@settings(max_examples=examples(15))
@given(asked=sessions, num_blocks=st.integers(60, 200), num_clients=st.sampled_from([None, 3]))
def test_every_request_is_answered_also_where_blocks_are_short(
    make, roles, asked, num_blocks, num_clients
):
    costs = SimulatedCosts(kv_tokens=16 * num_blocks, chunk_tokens=64)
    outcomes = outcomes_of(make(), asked, costs, roles=roles, num_clients=num_clients)
    assert len(outcomes) == sum(len(each.turns) for each in asked)
    for each in outcomes:
        assert 0 <= each.num_saved < each.num_tokens
        computed_s = costs.prefill_token_s * (each.num_tokens - each.num_saved)
        assert each.ttft_s >= computed_s - 1e-6
        assert each.tpot_s == 0 or each.tpot_s >= costs.step_s
        if roles == "1p2d" and make is RoundRobin:
            assert each.prefill is not None


@settings(max_examples=examples(25))
@given(asked=sessions)
def test_events_name_what_a_worker_holds(asked):
    """What was stored and not removed, by the events alone, is what its cache finds."""
    policy = PrefixPolicy(PrefixOptions())
    costs = SimulatedCosts(kv_tokens=16 * 90, event_delay_s=0.0)
    simulation = Simulation([policy], make_workers("both", 2), costs)
    held = {name: set() for name in simulation._workers}
    for name, worker in simulation._workers.items():

        def publish(event, name=name, before=worker._publish):
            before(event)
            if isinstance(event, BlockStored):
                held[name] |= set(event.hashes)
                assert len(event.packed_ids) == len(event.hashes) * event.block_size * 4
            elif isinstance(event, BlockRemoved):
                assert held[name] >= set(event.hashes), "what is removed was stored before"
                held[name] -= set(event.hashes)

        worker._publish = publish
    simulation.replay(iter(sorted(asked, key=lambda each: each.arrival_s)))
    simulation.run()
    for name, worker in simulation._workers.items():
        assert held[name] == {*worker.cache._idle, *worker.cache._held}
        assert simulation.gateways[0].followed[name].reported == held[name]
        assert simulation.gateways[0].followed[name].num_ignored == 0


def shared_prefixes(num):
    """Prompts of 25 beginnings, in an order in which they meet every worker."""
    for number in range(num):
        parts = (TokenRun(f"prefix/{number % 25}", 1024), TokenRun(f"own/{number}", 128))
        yield Session((Turn(parts, 32),), arrival_s=0.1 * number)


def conversations(num):
    for number in range(num):
        parts, asked = [TokenRun(f"{number}/first", 512)], []
        for turn in range(4):
            parts.append(TokenRun(f"{number}/question/{turn}", 64))
            asked.append(Turn(tuple(parts), 48, f"{number}/answer/{turn}"))
            parts.append(TokenRun(f"{number}/answer/{turn}", 48))
        yield Session(tuple(asked), arrival_s=0.3 * number)


@pytest.mark.parametrize("asked", [shared_prefixes(120), conversations(30)], ids=["shared", "talk"])
def test_policies_that_look_at_prefixes_save_more_than_turns(asked):
    asked = list(asked)
    saved, ttft_s = {}, {}
    for name in ("round_robin", "prefix", "cost"):
        found = summarize(outcomes_of(POLICIES[name](), asked), 2.0, 0.1)
        saved[name] = found.saved_tokens / found.prompt_tokens
        ttft_s[name] = found.ttft_s.p50
    for name in ("prefix", "cost"):
        assert saved[name] > 1.1 * saved["round_robin"]
        assert ttft_s[name] < ttft_s["round_robin"]


def talks(num):
    """Conversations of five turns, as benchmarks/bench_prefixes.py has them."""
    for number in range(num):
        parts, asked = [TokenRun(f"{number}/first", 256)], []
        for turn in range(5):
            parts.append(TokenRun(f"{number}/question/{turn}", 96))
            asked.append(Turn(tuple(parts), 24, f"{number}/answer/{turn}"))
            parts.append(TokenRun(f"{number}/answer/{turn}", 24))
        yield Session(tuple(asked))


def beginnings(num_prefixes):
    def generate(num):
        for number in range(num):
            parts = (TokenRun(f"{number % num_prefixes}", 1024), TokenRun(f"own/{number}", 64))
            yield Session((Turn(parts, 16),))

    return generate


SMALL = SimulatedCosts(kv_tokens=7680)
NOISY = msgspec.structs.replace(SMALL, jitter=1.0)
SHARED = msgspec.structs.replace(SMALL, jitter=0.7, num_processors=2)


TRAFFIC = {  # how much of it in `make test`, and in `make chaos`
    "talks": (talks, 50, 150),
    "8 beginnings": (beginnings(8), 200, 700),
    "20 beginnings": (beginnings(20), 250, 700),
}
LOADS = {  # costs, runs, and what may be lost of the requests a second and of TTFT
    "exact": (SMALL, 1, 0.98, 1.02),  # without noise each seed gives the same
    "shared processors": (SHARED, 1, 0.98, 1.1),
    "shared processors thrice": (SHARED, 3, 0.98, 1.1),
    "noise": (NOISY, 3, 0.96, 1.35),  # what is learned is noisy
}
IN_TESTS = {
    ("talks", "shared processors"),
    ("8 beginnings", "exact"),
    ("20 beginnings", "shared processors"),
}


def make_cells():
    for traffic, (asked, num_in_tests, num_in_chaos) in TRAFFIC.items():
        for load, costs in LOADS.items():
            name = f"{traffic}-{load}"
            if (traffic, load) in IN_TESTS:
                yield pytest.param(asked, num_in_tests, *costs, id=name)
            else:
                yield pytest.param(asked, num_in_chaos, *costs, id=name, marks=pytest.mark.every)


@pytest.mark.parametrize(
    ("asked", "num", "costs", "num_seeds", "least_rate", "most_ttft"), [*make_cells()]
)
def test_costs_are_no_worse_than_prefixes_where_caches_decide(
    asked, num, costs, num_seeds, least_rate, most_ttft
):
    """Closed loops, in which a worker that is slow by chance, or a trial, must not cost caches."""
    found = []
    for name in ("prefix", "cost"):
        runs = [
            outcomes_of(POLICIES[name](), asked(num), costs, seed=n, num_clients=8)
            for n in range(num_seeds)
        ]
        found.append([summarize(run, 2.0, 0.1) for run in runs])
    prefix, cost = (
        (
            median(each.requests_per_s for each in runs),
            median(each.ttft_s.p50 for each in runs),
            median(each.ttft_s.p99 for each in runs),
            median(each.saved_tokens for each in runs),
        )
        for runs in found
    )
    assert cost[0] >= least_rate * prefix[0]
    assert cost[1] <= most_ttft * prefix[1]
    assert cost[2] <= most_ttft * prefix[2]
    assert cost[3] >= 0.98 * prefix[3]


def shuffled_beginnings(num, seed):
    """Of 8 beginnings, each once before one comes again, in random order."""
    rng, order = Random(seed), []
    for number in range(num):
        if not order:
            order = [str(each) for each in range(8)]
            rng.shuffle(order)
        yield Session((Turn((TokenRun(order.pop(), 1024), TokenRun(f"own/{number}", 64)), 16),))


def num_computed(make, num_gateways, *, reports_queued):
    """How often 8 beginnings are computed in all, in six runs with so many gateways."""
    costs = msgspec.structs.replace(
        SHARED, reports_queued=reports_queued, event_delay_s=0.3, chunk_tokens=512
    )
    num_tokens = 0
    for seed in range(6):
        policies = [make() for _ in range(num_gateways)]
        simulation = Simulation(policies, make_workers("both", 4), costs, seed)
        simulation.add_clients(shuffled_beginnings(64, seed), 8)
        simulation.run()
        simulation.check_invariants()
        num_tokens += sum(each.num_tokens - each.num_saved - 64 for each in simulation.outcomes)
    return num_tokens / 1024


# `prefix` with two real gateways: tests/e2e/test_prefix_routing.py.
@pytest.mark.parametrize("name", [pytest.param("prefix", marks=pytest.mark.every), "cost"])
def test_two_gateways_compute_a_new_beginning_once(name):
    """They agree because workers report prompts that are queued."""
    make, each_once = POLICIES[name], 6 * 8
    agreed = num_computed(make, 2, reports_queued=True)
    assert agreed <= 1.1 * each_once
    assert num_computed(make, 2, reports_queued=False) > 1.1 * agreed, "what this test is worth"


@pytest.mark.parametrize("num_gateways", [pytest.param(2, marks=pytest.mark.every), 4])
def test_gateways_that_begin_together_use_different_workers(num_gateways):
    """Each knows only what it has placed itself, and that all workers are idle."""
    found = {}
    for num in (1, num_gateways):
        policies = [POLICIES["cost"]() for _ in range(num)]
        shares = [find_first_share("cost", index, num) for index in range(num)]
        workers = make_workers("both", 4)
        simulation = Simulation(policies, workers, SimulatedCosts(), first_shares=shares)
        simulation.add_clients(shuffled_beginnings(96, 1), 8)
        simulation.run()
        found[num] = 96 / simulation.now
    assert found[num_gateways] >= 0.97 * found[1]


def long_prompts(num, seed):
    """Nearly all that eight workers can do, lengths as in Mooncake's trace of conversations."""
    rng, at = Random(seed), 0.0
    for number in range(num):
        at += rng.expovariate(5.5)
        tokens = min(90_000, 1 + int(rng.lognormvariate(8.9, 1.0)))
        turn = Turn((TokenRun(str(number), tokens),), 1 + int(rng.expovariate(1 / 340)))
        yield Session((turn,), arrival_s=at)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.every)])
def test_near_saturation_costs_leave_no_prompt_waiting(seed):
    """Of the decode workers of a division, few would have room for the KV of such prompts."""
    costs = SimulatedCosts(prefill_token_s=5e-5, block_size=512, kv_tokens=300_000)
    found = {}
    for name in ("prefix", "cost"):
        simulation = Simulation([POLICIES[name]()], make_workers("both", 8), costs)
        simulation.replay(long_prompts(150, seed))
        simulation.run()
        found[name] = summarize(simulation.outcomes, 2.0, 0.1)
    assert found["prefix"].ttft_s.p99 > 4.5, "workers are busy"
    assert found["cost"].ttft_s.p99 <= 1.3 * found["prefix"].ttft_s.p99
    assert found["cost"].ttft_s.p50 <= 1.15 * found["prefix"].ttft_s.p50
    assert found["cost"].num_good >= 0.95 * found["prefix"].num_good


def test_the_same_seed_gives_the_same_noise_and_shared_processors_are_slower():
    ended = []
    for costs in (
        SimulatedCosts(jitter=0.5),
        SimulatedCosts(jitter=0.5),
        SimulatedCosts(jitter=0.5, num_processors=1),
        SimulatedCosts(),
    ):
        outcomes = outcomes_of(RoundRobin(), talks(8), costs, num_clients=8)
        ended.append(outcomes[-1].ended_at)
    assert ended[0] == ended[1] != ended[3]
    assert ended[2] > 2 * ended[0]


def test_a_follow_up_turn_finds_prompt_and_answer():
    costs = SimulatedCosts(block_size=16)
    (asked,) = conversations(1)
    outcomes = outcomes_of(PrefixPolicy(PrefixOptions()), [asked], costs)
    for turn, before, each in zip(asked.turns[1:], asked.turns, outcomes[1:], strict=False):
        assert each.num_tokens == turn.num_prompt_tokens
        assert each.num_saved == (before.num_tokens - 1) // 16 * 16


def test_the_decode_worker_of_a_handoff_has_the_prompt_afterwards():
    asked = [Session((Turn((TokenRun("a", 320),), 8),), float(at)) for at in range(2)]
    costs = SimulatedCosts(handoff_s=0.0, handoff_token_s=1e-3)
    first, second = outcomes_of(RoundRobin(), asked, costs, roles="1p1d")
    assert first.ttft_s == pytest.approx(320 * costs.prefill_token_s + 0.320)
    assert second.num_saved == 304, "the last token is computed in any case"
    assert second.ttft_s == pytest.approx(16 * costs.prefill_token_s + 0.016)


def test_a_prompt_is_computed_in_pieces_between_the_steps_of_answers():
    """Also where none of its time depends on its length: a line through prompts of one length."""
    costs = SimulatedCosts(prefill_s=0.3, prefill_token_s=1e-9, step_s=0.05, step_answer_s=0.0)
    asked = [
        Session((Turn((TokenRun("a", 100),), 50),), 0.0),
        Session((Turn((TokenRun("b", 960),), 2),), 1.0),
    ]
    answering, waiting = outcomes_of(RoundRobin(), asked, costs, roles="1p1d")
    assert answering.tpot_s == pytest.approx(0.05)
    simulation = Simulation([RoundRobin()], make_workers("both", 1), costs)
    simulation.replay(iter(asked))
    simulation.run()
    second, first = simulation.outcomes
    assert waiting.ttft_s == pytest.approx(0.31, abs=0.002)
    assert second.ttft_s == pytest.approx(0.3 + 3 * 0.05, abs=0.051), "three pieces, three steps"
    assert first.tpot_s * 49 == pytest.approx(49 * 0.05 + 0.3)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_the_same_seed_gives_the_same_outcomes(make):
    asked = [*shared_prefixes(30), *conversations(4)]
    assert outcomes_of(make(), asked, seed=3) == outcomes_of(make(), asked, seed=3)


def test_a_request_that_fits_nowhere_is_an_error():
    asked = [Session((Turn((TokenRun("a", 5000),), 8),), 0.0)]
    with pytest.raises(NoRoomError, match="5008 tokens does not fit"):
        outcomes_of(RoundRobin(), asked, SimulatedCosts(kv_tokens=4096))


def test_equal_keys_begin_with_equal_tokens_and_seeds_differ():
    one, other = TokenWriter(1), TokenWriter(2)
    short, long = (one.write([TokenRun("a", num)]).tolist() for num in (50, 80))
    assert long[:50] == short
    assert one.write([TokenRun("b", 50)]).tolist() != short
    assert other.write([TokenRun("a", 50)]).tolist() != short
    assert min(long) >= 0


@given(
    needs=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 12), st.booleans()), min_size=1, max_size=60
    ),
    num_blocks=st.integers(1, 40),
)
def test_a_cache_holds_no_more_than_it_has(needs, num_blocks):
    cache, running = SimulatedCache(num_blocks), []
    for root, num, releases_first in needs:
        if releases_first and running:
            cache.release(running.pop(0))
        names = [100 * root + at for at in range(num)]
        held = cache.reserve(names, max(0, num - 1), num + 1)
        cache.check_invariants()
        if held is None:
            continue
        assert held.num_cached <= max(0, num - 1)
        cache.name(held, names[held.num_cached :])
        running.append(held)
        cache.check_invariants()
        assert cache.count_cached(names) == num
    for held in running:
        cache.release(held)
    cache.check_invariants()
    assert not cache._held
    assert cache._num_unnamed == 0
    if num_blocks > 13:
        assert cache.reserve([], 0, num_blocks) is not None, "all of it can be had again"


@settings(max_examples=examples(15))
@given(asked=sessions, num_blocks=st.integers(60, 200), num_stored=st.integers(1, 300))
def test_what_stores_hold_is_known_in_the_end(asked, num_blocks, num_stored):
    """Two stores, each of two workers, that may be far too small."""
    costs = SimulatedCosts(
        kv_tokens=16 * num_blocks,
        store_tokens=16 * num_stored,
        workers_per_store=2,
        load_s=1e-4,
        load_token_s=1e-5,
    )
    simulation = Simulation([POLICIES["cost"]()], make_workers("both", 4), costs)
    simulation.replay(iter(sorted(asked, key=lambda each: each.arrival_s)))
    simulation.run()
    simulation.check_invariants()
    assert len(simulation.outcomes) == sum(len(each.turns) for each in asked)
    for each in simulation.outcomes:
        assert 0 <= each.num_loaded <= each.num_saved < each.num_tokens
    stored_by = {}
    for entries in simulation.gateways[0].prefixes._stored.values():
        stored_by |= entries.holdings()
    for store, held in simulation._stores.items():
        assert len(held._names) <= num_stored
        sharing = [w for w, own in simulation._store_of.items() if own == store]
        known = [stored_by.get((worker, store), set()) for worker in sharing]
        assert set().union(*known) <= set(held._names), "what is gone counts as gone"
        for worker, names in zip(sharing, known, strict=True):
            assert simulation.gateways[0].followed[worker].tiers == (store,)
            assert names == simulation._reporters[worker]._reported


def pausing_conversations(num):
    for number in range(num):
        parts, asked = [TokenRun(f"{number}/first", 2048)], []
        for turn in range(4):
            parts.append(TokenRun(f"{number}/question/{turn}", 128))
            asked.append(Turn(tuple(parts), 64, f"{number}/answer/{turn}"))
            parts.append(TokenRun(f"{number}/answer/{turn}", 64))
        yield Session(tuple(asked), arrival_s=number / 3.2, pause_s=4.0)


def test_a_policy_that_knows_the_store_has_the_first_token_earlier():
    """Turns whose worker is busy go elsewhere. The workers load in either case."""
    costs = SimulatedCosts(kv_tokens=65_536, store_tokens=4_000_000)
    found = {}
    for count_stored in (True, False):
        policy = CostPolicy(CostOptions(count_stored=count_stored))
        outcomes = outcomes_of(policy, list(pausing_conversations(40)), costs)
        assert sum(each.num_loaded > 0 for each in outcomes) > 10
        found[count_stored] = summarize(outcomes, 2.0, 0.1).ttft_s
    assert found[True].p50 < 0.8 * found[False].p50
    assert found[True].p99 <= 1.05 * found[False].p99, "first turns, of which no store has anything"


def alone(key, num_prompt, num_answer, arrival_s):
    return Session((Turn((TokenRun(key, num_prompt),), num_answer),), arrival_s)


def with_short_blocks(asked):
    """Outcomes at a worker of 100 blocks, and a store that has the prompt `stored`."""
    costs = SimulatedCosts(kv_tokens=1600, store_tokens=160_000)
    before = [alone("stored", 320, 1, 0.0), alone("another", 1500, 1, 0.5)]
    simulation = Simulation([RoundRobin()], make_workers("both", 1), costs)
    simulation.replay(iter([*before, *asked]))
    simulation.run()
    assert len(simulation.outcomes) == len(before) + len(asked)
    return simulation.outcomes[2:]


def test_a_prompt_that_waits_for_blocks_stops_none_that_was_loaded():
    """The younger one was loaded while a third was computed, into blocks that the older needs."""
    beginning = Session((Turn((TokenRun("stored", 320), TokenRun("own", 160)), 1),), 1.24)
    first, loaded, waited = with_short_blocks([
        alone("first", 640, 1, 1.2),
        alone("waiting", 1200, 1, 1.22),
        beginning,
    ])
    assert (loaded.num_tokens, loaded.num_loaded) == (480, 320)
    assert (first.num_tokens, waited.num_tokens) == (640, 1200)


def test_no_prompt_is_loaded_into_blocks_that_an_older_one_waits_for():
    later = [
        Session((Turn((TokenRun("stored", 320), TokenRun(f"{at}", 160)), 40),), 1.3 + 0.1 * at)
        for at in range(20)
    ]
    outcomes = with_short_blocks([
        alone("answering", 480, 100, 1.0),
        alone("waiting", 1200, 1, 1.2),
        *later,
    ])
    assert [each.num_tokens for each in outcomes] == [480, 1200, *([480] * 20)]
    assert sum(each.num_loaded == 320 for each in outcomes) >= 1


def test_a_store_that_has_less_than_the_cache_is_not_read():
    """Also where a token takes longer to load than to compute."""
    costs = SimulatedCosts(prefill_token_s=1e-5, load_token_s=2e-5, store_tokens=1600)
    asked = [alone("a", 3200, 2, 0.0), alone("a", 3200, 2, 1.0)]
    simulation = Simulation([RoundRobin()], make_workers("both", 1), costs)
    simulation.replay(iter(asked))
    simulation.run()
    again = simulation.outcomes[1]
    assert (again.num_saved, again.num_loaded) == (3184, 0)
    assert again.ttft_s == pytest.approx(16 * costs.prefill_token_s)
    assert again.ended_at > again.began_at + costs.step_s


def test_answers_of_one_token_have_no_time_per_token():
    asked = [alone("a", 100, 1, 0.0), alone("b", 100, 1, 1.0), alone("c", 100, 9, 2.0)]
    costs = SimulatedCosts()
    found = summarize(outcomes_of(RoundRobin(), asked, costs), 2.0, 0.1)
    assert found.tpot_s.p50 == pytest.approx(costs.step_takes_s(1))
    assert found.num_good == 3
    assert summarize(outcomes_of(RoundRobin(), asked[:1], costs), 2.0, 0.1).tpot_s.p99 == 0.0
