"""How many workers an operator may ask for."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.sections import Role
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetSize
from baton.launch.operations import decide_size
from baton.launch.plan import WorkerPlan, another_worker

COUNTS = st.integers(0, 5)


@given(
    st.dictionaries(st.sampled_from(get_args(Role)), COUNTS, min_size=1),
    st.builds(FleetSize, prefill=COUNTS | st.none(), decode=COUNTS | st.none(),
              both=COUNTS | st.none()),
)  # fmt: skip
def test_a_fleet_keeps_its_roles_and_can_always_answer(counts, size):
    wanted = {"prefill": size.prefill, "decode": size.decode, "both": size.both}
    try:
        decided = decide_size(counts, size)
    except FleetError:
        asked = {role for role, count in wanted.items() if count is not None}
        left = {role: wanted[role] if role in asked else counts[role] for role in counts}
        assert not asked or asked - set(counts) or not left.get("decode", 0) + left.get("both", 0)
        return
    assert set(decided) == set(counts)
    assert decided.get("decode", 0) + decided.get("both", 0) > 0
    for role, count in decided.items():
        assert count == (counts[role] if wanted[role] is None else wanted[role])


def test_another_worker_is_like_the_first_but_for_its_name():
    like = WorkerPlan("decode-0", "decode", {"engine.num_threads": 2})
    assert another_worker(like, 7) == WorkerPlan("decode-7", "decode", {"engine.num_threads": 2})


def test_another_worker_reads_the_memory_of_those_before_it():
    listen, urls = "store.options.host.listen", "store.options.peer.urls"
    like = WorkerPlan("decode-0", "decode", {listen: "127.0.0.1:1", urls: ["tcp://127.0.0.1:2"]})
    settings = another_worker(like, 2, peer_port=3).settings
    assert settings[listen] == "127.0.0.1:3"
    assert settings[urls] == ["tcp://127.0.0.1:2", "tcp://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("counts", "size", "message"),
    [
        ({"both": 2}, FleetSize(decode=4), "--decode does not fit this fleet.*--workers"),
        ({"prefill": 1, "decode": 1}, FleetSize(), "takes --prefill and --decode"),
        ({"prefill": 1, "decode": 1}, FleetSize(decode=0), "baton down"),
    ],
)
def test_what_cannot_be_says_what_can(counts, size, message):
    with pytest.raises(FleetError, match=message):
        decide_size(counts, size)
