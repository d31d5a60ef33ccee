"""Real vLLM servers that die, stop, run short of memory or are lied to, and clients that leave."""

from __future__ import annotations

import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import seal, write_unsigned
from baton.ids import new_epoch, new_ticket_id
from tests.chaos.clients import check_error
from tests.chaos.vllm_pair import LONG, NUM_SEQS, Pair, fill
from tests.e2e_vllm.ahead import start_small_decode
from tests.e2e_vllm.client import (
    ask_all,
    ask_one,
    check_same,
    is_idle,
    make_body,
    post,
    read_answer,
    read_metric,
    read_request,
    read_summary,
    wait_idle,
    wait_until,
)
from tests.e2e_vllm.cluster import KEY, KV_BYTES_PER_TOKEN, LEASE_S, PREFILL_POOL_TOKENS
from tests.e2e_vllm.process_stats import SharedMemoryFiles, frozen_engine
from tests.e2e_vllm.tickets import Handoff, Server, make_ticket, read_prefill_result, read_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

PATIENCE_S = 60.0
NOTICED_WITHIN_S = 50.0
"""A peer's silence is noticed after 6 s; then a long prompt is computed, on a busy machine. Where
nobody notices, a handoff ends after 60 s."""


@pytest.fixture(scope="module")
def standing_pair(
    vllm_cluster_factory: ClusterFactory, vllm_cluster: VllmCluster
) -> Iterator[Pair]:
    pair = Pair(vllm_cluster_factory, vllm_cluster)
    pair.open()
    yield pair
    if not pair.prefill.is_alive:  # its folder awaits another server at its port
        port = pair.prefill.url.rpartition(":")[2]
        (left,) = vllm_cluster_factory.run_directory.rglob(f"worker-{port}")
        shutil.rmtree(left)
    vllm_cluster_factory.end(pair.gateway, pair.prefill)


@pytest.fixture
def pair(standing_pair: Pair) -> Iterator[Pair]:
    """A pair that is well, whatever the test before has done to it."""
    standing_pair.prefill.send(signal.SIGCONT)
    if not standing_pair.prefill.is_alive:
        standing_pair.restart_prefill()
    yield standing_pair
    standing_pair.disconnect()


def test_prefill_dies_in_mid_prefill_and_comes_back_at_its_address(pair: Pair) -> None:
    prompt = pair.prompts.make(LONG)
    client = pair.connect(prompt)
    pair.wait_prefilling(client.id)
    pair.prefill.kill()
    begun = time.monotonic()
    answer = client.read_answer()
    assert time.monotonic() - begun < NOTICED_WITHIN_S
    check_same([answer], [pair.expect(prompt)])
    summary = read_summary(pair.gateway, client.id)
    assert summary["num_received_tokens"] == 0
    assert any("computed locally" in fallback for fallback in summary["fallbacks"])
    pair.wait_settled(pair.decode)
    # Without a prefill server, requests are answered all the same.
    prompts = [pair.prompts.make(100) for _ in range(3)]
    check_same(ask_all(pair.gateway, prompts), ask_all(pair.cluster.oracle, prompts))
    pair.restart_prefill()
    pair.check_handoff()
    pair.wait_settled()


def test_prefill_stops_in_mid_prefill(pair: Pair) -> None:
    prompt = pair.prompts.make(LONG)
    client = pair.connect(prompt)
    pair.wait_prefilling(client.id)
    pair.prefill.send(signal.SIGSTOP)
    begun = time.monotonic()
    answer = client.read_answer()
    assert time.monotonic() - begun < NOTICED_WITHIN_S
    check_same([answer], [pair.expect(prompt)])
    pair.wait_settled(pair.decode)
    pair.prefill.send(signal.SIGCONT)
    assert any("computed locally" in f for f in read_summary(pair.gateway, client.id)["fallbacks"])
    pair.check_handoff()
    pair.wait_settled()


def test_a_bit_that_flips_on_the_way_is_found(pair: Pair) -> None:
    """Damaged after it was announced with its digest, and before it is read."""
    cluster = pair.cluster  # its prefill server's patience is longer than what is done here
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    check_same([ask_one(cluster.gateway, [300] * 50)], [pair.expect([300] * 50)])
    handoff = Handoff.make(prefill, decode, pair.prompts.make(200))
    pool = SharedMemoryFiles(cluster.prefill, PREFILL_POOL_TOKENS * KV_BYTES_PER_TOKEN)
    answering = handoff.ask_decode()
    wait_until(lambda: not is_idle(cluster.decode), PATIENCE_S)
    time.sleep(0.2)  # its grant is on its way
    with frozen_engine(cluster.decode):
        assert read_prefill_result(handoff.ask_prefill().result()) == {"status": "offered"}
        number, place = pool.flip_a_bit_of_what_is_new()
    answer = read_tokens(answering.result())
    pool.flip(number, place)
    pool.close()
    check_same([answer], [pair.expect(handoff.prompt)])
    (fallback,) = handoff.read_decode_trace().fallbacks
    assert "digest" in fallback
    wait_idle(cluster.prefill, cluster.decode)


# Clients that leave ------------------------------------------------------------------------------


def test_a_client_leaves_while_its_request_is_queued(pair: Pair) -> None:
    for _ in range(5):  # on a busy machine, those before it may have ended too soon
        if leaves_while_queued(pair):
            break
    else:
        raise AssertionError("it was never queued to the end")
    pair.check_handoff()


def leaves_while_queued(pair: Pair) -> bool:
    """Whether a client left while its request was queued: none of those before it had ended."""
    running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
    with ThreadPoolExecutor(NUM_SEQS) as pool:
        # As many as the pool holds: none of them is preempted, and queued again.
        filling = fill(pair.prefill, pair.prompts, pool, NUM_SEQS, max_tokens=300)

        def until_prefill_has(name: str, num: int) -> bool:
            """Whether it came to that before one of the requests ended."""
            url = pair.prefill.url
            wait_until(lambda: read_metric(url, name) == num or has_ended(filling), PATIENCE_S)
            return not has_ended(filling)

        if until_prefill_has(running, NUM_SEQS):
            client = pair.connect(pair.prompts.make(500))
            if until_prefill_has(waiting, 1):
                wait_until(lambda: not is_idle(pair.decode), PATIENCE_S)
            client.leave()
            was_queued = until_prefill_has(waiting, 0)
            pair.wait_settled(pair.decode)
        else:
            was_queued = False
        assert [one.result()[0] for one in filling] == [200] * NUM_SEQS
    pair.wait_settled()
    return was_queued


def has_ended(filling: list[Future]) -> bool:
    return any(one.done() for one in filling)


def test_a_client_leaves_while_its_prompt_is_prefilled(pair: Pair) -> None:
    before = count_refused(pair.decode, "replayed_ticket")
    client = pair.connect(pair.prompts.make(LONG))
    pair.wait_prefilling(client.id)
    wait_until(lambda: not is_idle(pair.prefill), PATIENCE_S)  # it tells after a step
    client.leave()
    pair.wait_settled()
    # Who hears of it first says so to the other.
    assert read_request(pair.gateway, client.id)["prefill"]["outcome"] in {"cancelled", "failed"}
    pair.check_handoff()
    assert count_refused(pair.decode, "replayed_ticket") == before


def test_a_client_leaves_while_its_kv_is_loaded(pair: Pair) -> None:
    client = pair.connect(pair.prompts.make(LONG))
    pair.wait_prefilling(client.id)
    with frozen_engine(pair.prefill):
        wait_until(lambda: not is_idle(pair.decode), PATIENCE_S)
        client.leave()
        wait_until(lambda: is_idle(pair.decode), PATIENCE_S)
    pair.wait_settled()
    pair.check_handoff()


def test_a_client_leaves_in_the_middle_of_its_answer(pair: Pair) -> None:
    client = pair.connect(pair.prompts.make(300), max_tokens=1000, stream=True)
    client.read_lines(5)
    assert not is_idle(pair.decode)
    client.leave()
    pair.wait_settled()
    assert read_summary(pair.gateway, client.id)["num_received_tokens"] == 300
    pair.check_handoff()


# Tickets that are not good -----------------------------------------------------------------------


def count_refused(server: FleetProcess, code: str) -> float:
    return read_metric(server.url, "vllm:baton_refused_tickets_total", code=code)


def until_counted(server: FleetProcess, num: float, code: str) -> None:
    """vLLM shows what its engine has counted some time after an answer."""
    wait_until(lambda: count_refused(server, code) >= num, PATIENCE_S)
    assert count_refused(server, code) == num, code


def test_bad_tickets_cost_time_only_and_are_counted(pair: Pair) -> None:
    prefill, decode = Server.of(pair.prefill), Server.of(pair.decode)
    prompt = pair.prompts.make(150)
    expected = pair.expect(prompt)
    sealed = seal(make_ticket(prefill.ref, decode.ref), Credentials.of(ClusterKey.from_hex(KEY)))
    past = msgspec.structs.replace(decode.ref, epoch=new_epoch())
    bad = {
        "garbage": ("?", "invalid_ticket"),
        "cut off": (sealed[:-40], "invalid_ticket"),
        # Over TLS whoever asks is a gateway: a signature is not checked, a ticket's ends are.
        "of a past life": (write_unsigned(make_ticket(past, past)), "stale_ticket"),
    }
    for what, (text, code) in bad.items():
        for server, part in ((prefill, "do_remote_decode"), (decode, "do_remote_prefill")):
            before = count_refused(server.process, code)
            answered = server.complete(
                prompt, {"baton_ticket": text, part: True}, cache_salt=f"{what} {part}"
            )
            check_same([read_tokens(answered)], [expected])
            if server is prefill:
                assert read_prefill_result(answered)["code"] == code, what
            until_counted(server.process, before + 1, code)
    pair.wait_settled()


def test_a_ticket_is_good_once(pair: Pair) -> None:
    prefill, decode = Server.of(pair.prefill), Server.of(pair.decode)
    handoff = Handoff.make(prefill, decode, pair.prompts.make(150))
    expected = pair.expect(handoff.prompt)
    sent, received = handoff.ask_prefill(), handoff.ask_decode()
    assert read_prefill_result(sent.result()) == {"status": "offered"}
    check_same([read_tokens(received.result())], [expected])
    assert handoff.read_decode_trace().num_received_tokens == 150
    assert read_prefill_result(handoff.ask_prefill().result())["code"] == "replayed_ticket"
    before = count_refused(pair.decode, "replayed_ticket")
    again = read_tokens(handoff.ask_decode(cache_salt="again").result())
    check_same([again], [expected])
    until_counted(pair.decode, before + 1, "replayed_ticket")
    # One that was issued longer ago than it lives, by the clock of its gateway.
    used = handoff.ticket
    late = msgspec.structs.replace(used.issue, number=used.issue.number + 1, at=used.issue.at - 61)
    expired = msgspec.structs.replace(used, id=new_ticket_id(), issue=late)
    before = count_refused(pair.decode, "stale_ticket")
    answered = decode.complete(
        handoff.prompt,
        {
            "baton_ticket": seal(expired, Credentials.of(ClusterKey.from_hex(KEY))),
            "do_remote_prefill": True,
        },
        cache_salt="expired",
    )
    check_same([read_tokens(answered)], [expected])
    until_counted(pair.decode, before + 1, "stale_ticket")
    pair.wait_settled()


# Too little memory -------------------------------------------------------------------------------


def test_a_prefill_that_is_preempted_hands_nothing_over(pair: Pair) -> None:
    """Its blocks were given to others before decode asked for them."""
    prefill, decode = Server.of(pair.prefill), Server.of(pair.decode)
    handoff = Handoff.make(prefill, decode, pair.prompts.make(900))
    preemptions = "vllm:num_preemptions_total"
    before = read_metric(pair.prefill.url, preemptions)
    with ThreadPoolExecutor(NUM_SEQS) as pool:
        filling = fill(pair.prefill, pair.prompts, pool, NUM_SEQS - 1, max_tokens=440)
        wait_until(
            lambda: read_metric(pair.prefill.url, "vllm:num_requests_running") == NUM_SEQS - 1,
            PATIENCE_S,
        )
        # The gateway asks for one token: then nothing is preempted that has not been computed.
        begun = time.monotonic()
        sent = handoff.ask_prefill(num_tokens=350)
        wait_until(lambda: read_metric(pair.prefill.url, preemptions) > before, PATIENCE_S)
        waited_s = time.monotonic() - begun
        answer = read_tokens(handoff.ask_decode().result())
        check_same([answer], [pair.expect(handoff.prompt)])
        (fallback,) = handoff.read_decode_trace().fallbacks
        # Where that took longer than the lease, on a busy machine, it was given up before.
        is_late = waited_s > LEASE_S
        assert "preempted" in fallback or (is_late and "the lease ran out" in fallback)
        assert read_prefill_result(sent.result())["code"] == "handoff_failed"
        assert [one.result()[0] for one in filling] == [200] * (NUM_SEQS - 1)
    pair.wait_settled()
    pair.check_handoff()


@pytest.fixture(scope="module")
def small_decode(standing_pair: Pair) -> Iterator[FleetProcess]:
    """Has few blocks, and does not compute what it could not load."""
    cluster_factory = standing_pair.cluster_factory
    (server,) = cluster_factory.take("small_decode", start_small_decode)
    yield server
    cluster_factory.end(server)


def test_decode_preempts_and_computes_what_it_had_received(
    pair: Pair, small_decode: FleetProcess
) -> None:
    gateway = pair.cluster_factory.start_gateway([pair.cluster.prefill], [small_decode])
    num_tokens = 350  # four of them leave less than a block for each one's answer
    prompts = [pair.prompts.make(num_tokens) for _ in range(4)]
    expected = ask_all(pair.cluster.oracle, prompts, max_tokens=120)
    answers = ask_all(gateway, prompts, max_tokens=120)
    check_same(answers, expected)
    assert read_metric(small_decode.url, "vllm:num_preemptions_total") > 0
    for answer in answers:
        assert read_summary(gateway, answer.request_id)["num_received_tokens"] == num_tokens
    wait_until(lambda: is_idle(small_decode) and is_idle(pair.cluster.prefill), PATIENCE_S)
    pair.cluster_factory.end(gateway)


def test_a_load_that_fails_is_an_error_where_the_policy_says_so(
    pair: Pair, small_decode: FleetProcess
) -> None:
    """Asked without a gateway, which would ask again."""
    pair.check_handoff()
    prefill, decode = Server.of(pair.prefill), Server.of(small_decode)
    handoff = Handoff.make(prefill, decode, pair.prompts.make(900))
    answering = handoff.ask_decode()
    wait_until(lambda: not is_idle(small_decode), PATIENCE_S)
    decode.give_up(handoff.ticket, "the test wants it so")
    status, answer = answering.result()
    assert status == 500
    assert answer["error"]["message"]
    assert answer["error"]["type"]
    wait_until(lambda: is_idle(small_decode), PATIENCE_S)
    # The next one is well.
    handoff = Handoff.make(prefill, decode, handoff.prompt)
    received, sent = handoff.ask_decode(), handoff.ask_prefill()
    check_same([read_tokens(received.result())], [pair.expect(handoff.prompt)])
    assert read_prefill_result(sent.result()) == {"status": "offered"}
    assert handoff.read_decode_trace().num_received_tokens == 900


def test_a_load_that_fails_is_an_error_or_right_to_the_gateways_client(
    pair: Pair, small_decode: FleetProcess
) -> None:
    gateway = pair.cluster_factory.start_gateway([pair.prefill], [small_decode])
    prompt = pair.prompts.make(900)
    with ThreadPoolExecutor(1) as pool, frozen_engine(pair.prefill):
        answering = pool.submit(post, f"{gateway.url}/v1/completions", make_body(prompt))
        wait_until(lambda: not is_idle(small_decode), PATIENCE_S)
        pair.prefill.kill()
        status, answer = answering.result()
    if status == 200:
        check_same([read_answer(answer, None)], [pair.expect(prompt)])
    else:
        check_error(answer)
    wait_until(lambda: is_idle(small_decode), PATIENCE_S)
    pair.cluster_factory.end(gateway)
