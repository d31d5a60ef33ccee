"""What was learned of workers' speed outlives the gateway that learned it."""

import asyncio
import errno
import json
import os
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from baton.auth.ticket import WorkerRef
from baton.errors import ConfigError
from baton.gateway import learned_costs
from baton.gateway.learned_costs import KeptCosts, KeptFile, keep_costs
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.fleet import WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import Placement
from baton.router.topology import Distance

WORKER = WorkerView(
    WorkerRef(WorkerId("w"), Epoch("0" * 32), "127.0.0.1:1"),
    Role.BOTH,
    "demo",
    "f",
    frozenset({"tcp"}),
    available=True,
)


def teach(load, num, each_s=1e-3, since=0.0):
    """Prompts of several lengths, and answers of eight tokens."""
    for at in range(num):
        num_tokens, now = 100 * (1 + at % 5), since + 100.0 * at
        running = load.begin(Placement(None, WORKER), num_tokens, now)
        running.first_token(now + 0.01 + each_s * num_tokens)
        running.end(now + 0.01 + each_s * num_tokens + 0.7, num_streamed=8)


def keep(path, load, work=lambda: None):
    async def main():
        async with keep_costs(path, load):
            work()

    asyncio.run(main())


def located(name, topology):
    return replace(
        WORKER,
        ref=WorkerRef(WorkerId(name), WORKER.ref.epoch, WORKER.ref.address),
        topology=topology,
    )


def predict(load):
    activity = load.of(WORKER.id, "demo")
    return activity.prefill_cost.predict(400), activity.step_cost.predict(1)


def test_the_next_gateway_begins_with_what_the_last_one_learned(tmp_path):
    path, first, second, third = tmp_path / "costs.json", FleetLoad(), FleetLoad(), FleetLoad()
    keep(path, first, lambda: teach(first, 40))
    assert predict(first) == pytest.approx((0.41, 0.1), rel=0.1)
    keep(path, second)
    assert predict(second) == pytest.approx(predict(first))
    assert predict(second) != pytest.approx(predict(FleetLoad()))
    keep(path, third, lambda: teach(third, 60, each_s=3e-3))
    assert predict(third)[0] == pytest.approx(1.21, rel=0.05), "it is a first guess"
    assert {each.name for each in tmp_path.iterdir()} == {"costs.json"}


def test_what_tokens_before_it_add_to_a_token_is_kept(tmp_path):
    path, first, second = tmp_path / "costs.json", FleetLoad(), FleetLoad()

    def teach_bent():
        for at in range(40):
            num_tokens, now = 1000 * (1 + at % 5), 100.0 * at
            running = first.begin(Placement(None, WORKER), num_tokens, now)
            running.first_token(now + 1e-4 * num_tokens * (1 + 5e-5 * num_tokens))
            running.end(now + 90.0)

    keep(path, first, teach_bent)
    keep(path, second)
    assert json.loads(path.read_text())["models"]["demo"]["prefill"]["bend"] == pytest.approx(1e-4)
    activity = second.of(WORKER.id, "demo")
    assert activity.prefill_cost.predict(10_000) == pytest.approx(1.5, rel=0.05)
    assert activity.prefill_cost.predict(1_000, 9_000) == pytest.approx(0.195, rel=0.05)


def test_handoffs_are_kept_by_distance(tmp_path):
    path, first, second, third = tmp_path / "costs.json", FleetLoad(), FleetLoad(), FleetLoad()
    near, far, here = WORKER, located("far", "elsewhere"), located("here", "here")

    def hand_over():
        for at in range(12):
            now, num_tokens = 100.0 * at, 100 * (1 + at % 4)
            for decode, each_s in ((near, 1e-4), (far, 1e-2)):
                running = first.begin(Placement(here, decode), num_tokens, now)
                running.prefilled(now + 1.0)
                running.first_token(now + 1.0 + each_s * num_tokens)
                running.end(now + 5.0)

    keep(path, first, hand_over)
    handoffs = first.costs("demo").handoffs
    assert set(json.loads(path.read_text())["models"]["demo"]["handoff"]) == {
        "same_zone",
        "cross_zone",
    }
    keep(path, second)
    again = second.costs("demo").handoffs
    for distance in (Distance.SAME_ZONE, Distance.CROSS_ZONE):
        line = handoffs.lines[distance]
        assert again.lines[distance].guess == (line.fixed, line.each)
        assert again.source(distance) == "kept"
    again.note_links([], None)
    assert again.lines[Distance.SAME_ZONE].guess[1] == handoffs.lines[Distance.SAME_ZONE].each
    assert again.lines[Distance.SAME_RACK].each <= again.lines[Distance.SAME_ZONE].each

    def see_a_slower_one():
        third.costs("demo").handoffs.observe(
            third.costs("demo").handoffs.cost_of(here, far), 400, 40.0
        )

    keep(path, third, see_a_slower_one)
    assert third.costs("demo").handoffs.source(Distance.CROSS_ZONE) == "learned"
    assert third.costs("demo").handoffs.lines[Distance.CROSS_ZONE].predict(400) == pytest.approx(40)


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    path, load = tmp_path / "costs.json", FleetLoad()
    path.write_text('{"models": {"demo": {"prefill": {"fixed_s": 1, "each_s": 0.5}}}}')
    keep(path, load)
    assert predict(load)[0] == 201


def test_a_model_that_this_gateway_saw_little_of_keeps_what_is_known(tmp_path):
    path, first, second = tmp_path / "costs.json", FleetLoad(), FleetLoad()
    keep(path, first, lambda: teach(first, 40))
    before = json.loads(path.read_text())
    keep(path, second, lambda: teach(second, 3, each_s=1.0))
    assert json.loads(path.read_text()) == before


async def until_no_round_runs():
    num_quiet = 0
    while num_quiet < 3:  # a round has several threads, one after the other
        await asyncio.sleep(0.01)
        is_quiet = all(thread.name != "learned-costs" for thread in threading.enumerate())
        num_quiet = num_quiet + 1 if is_quiet else 0


def test_a_gateway_that_replaces_another_takes_over_what_that_one_writes_at_its_end(
    tmp_path, monkeypatch
):
    """As at `baton upgrade`: the new one starts first, and then the old one drains and ends."""
    monkeypatch.setattr(learned_costs, "INTERVAL_S", 0.02)
    path, old, new = tmp_path / "costs.json", FleetLoad(), FleetLoad()

    async def main():
        async with AsyncExitStack() as life_of_old:
            await life_of_old.enter_async_context(keep_costs(path, old))
            async with keep_costs(path, new):
                teach(old, 40, each_s=1e-3)
                async with asyncio.timeout(60):
                    while predict(new) != pytest.approx(predict(old)):
                        await asyncio.sleep(0.01)
                # No round of the new one reads before, and writes after, what the old one writes.
                monkeypatch.setattr(learned_costs, "INTERVAL_S", 3600.0)
                await asyncio.sleep(0.2)
                await until_no_round_runs()
                teach(new, 3, each_s=2e-3)
                teach(old, 60, each_s=3e-3, since=4000.0)
                await life_of_old.aclose()

    asyncio.run(main())
    kept = json.loads(path.read_text())["models"]["demo"]["prefill"]
    assert kept["fixed_s"] + 400 * kept["each_s"] == pytest.approx(predict(old)[0])
    assert predict(new)[0] < 0.9 * predict(old)[0], "it has seen as much"


def test_it_is_written_while_the_gateway_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_costs, "INTERVAL_S", 0.01)
    path, load = tmp_path / "costs.json", FleetLoad()
    teach(load, 20)

    async def main():
        async with keep_costs(path, load):
            for _ in range(500):
                await asyncio.sleep(0.01)
                if path.exists():
                    return True
        return False

    assert asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not json", "no learned costs"),
        ('{"models": {"demo": {"prefill": {"fixed_s": -1, "each_s": 0}}}}', "no learned costs"),
        ('{"models": {"demo": {"handoff": {"far": {"fixed_s": 1, "each_s": 0}}}}}', "no learned"),
        ('{"models": {"d": {"handoff": {"same_host": {"fixed_s": -1, "each_s": 0}}}}}', "no learn"),
        ('{"models": [], "more": 1}', "no learned costs"),
        ("x" * (1 << 20) + "x", "more than 1048576 bytes"),
    ],
)
def test_another_file_is_refused_and_stays(tmp_path, text, complaint):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        keep(path, FleetLoad())
    assert path.read_text() == text


def test_a_file_that_becomes_garbage_is_written_anew(tmp_path, caplog):
    path, load = tmp_path / "costs.json", FleetLoad()

    def break_it():
        teach(load, 20)
        path.write_text("not json")

    keep(path, load, break_it)
    assert "demo" in json.loads(path.read_text())["models"]
    assert "it is replaced by what this gateway has learned" in caplog.text


def test_two_gateways_of_the_same_process_id_may_write_it_at_once(tmp_path, monkeypatch, caplog):
    """As in containers, where each is process 1."""
    path, replace_file, num_writing = tmp_path / "costs.json", Path.replace, 0

    def write(model):
        learned_costs._write(path, KeptFile({model: KeptCosts()}))

    def replace_late(unfinished, target):
        nonlocal num_writing
        num_writing += 1
        if num_writing == 1:
            write("of another gateway")
        return replace_file(unfinished, target)

    monkeypatch.setattr(Path, "replace", replace_late)
    write("of this gateway")
    assert num_writing == 2
    assert list(json.loads(path.read_text())["models"]) == ["of this gateway"]
    assert not caplog.records
    assert {each.name for each in tmp_path.iterdir()} == {"costs.json"}


def test_of_a_write_that_fails_nothing_is_left(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    learned_costs._write(tmp_path / "costs.json", KeptFile({}))
    assert "no space left" in caplog.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [b"", bytes(300)])
def test_what_a_crash_leaves_of_the_file_is_no_costs(tmp_path, content):
    path, load = tmp_path / "costs.json", FleetLoad()
    path.write_bytes(content)
    keep(path, load, lambda: teach(load, 20))
    assert "demo" in json.loads(path.read_text())["models"]


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no directory"):
        keep(tmp_path / "nowhere" / "costs.json", FleetLoad())


def test_a_file_that_cannot_be_written_is_no_end(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    load = FleetLoad()

    def take_the_folder_away():
        teach(load, 20)
        folder.rmdir()

    keep(folder / "costs.json", load, take_the_folder_away)
    assert "cannot keep the learned costs" in caplog.text


def test_a_directory_that_cannot_be_looked_at_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        keep(tmp_path / ("x" * 300) / "costs.json", FleetLoad())


def test_a_file_system_that_hangs_stops_neither_the_event_loop_nor_what_ends_after_it(
    tmp_path, monkeypatch, caplog
):
    """A pipe in place of the file: to open it hangs until another process writes it."""
    monkeypatch.setattr(learned_costs, "INTERVAL_S", 0.01)
    monkeypatch.setattr(learned_costs, "END_TIMEOUT_S", 0.05)
    path, load, goes_on = tmp_path / "costs.json", FleetLoad(), threading.Event()

    def go_on():
        if not goes_on.is_set():
            goes_on.set()
            fd = os.open(path, os.O_RDWR)
            path.unlink()
            os.close(fd)

    async def main():
        async with keep_costs(path, load):
            os.mkfifo(path)
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert not goes_on.is_set(), "the event loop was not stopped"
        assert "no answer in 0.05 s" in caplog.text

    late = threading.Timer(5.0, go_on)
    late.start()
    try:
        asyncio.run(main())
        assert not goes_on.is_set(), "the end of the event loop did not wait for it"
    finally:
        late.cancel()
        go_on()


def test_what_is_learned_is_kept_again_once_there_are_threads(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(learned_costs, "INTERVAL_S", 0.01)
    begin, path = learned_costs.begin_call, tmp_path / "costs.json"

    def refuse(*_):
        raise OSError("can't start new thread")

    async def main():
        async with keep_costs(path, FleetLoad()):
            monkeypatch.setattr(learned_costs, "begin_call", refuse)
            while "can't start new thread" not in caplog.text:
                await asyncio.sleep(0.001)
            monkeypatch.setattr(learned_costs, "begin_call", begin)
            path.write_text("no costs")
            while "is replaced by what" not in caplog.text:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_without_a_path_nothing_is_kept(tmp_path):
    keep(None, FleetLoad())
    assert not [*tmp_path.iterdir()]
