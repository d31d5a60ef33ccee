from __future__ import annotations

import pytest

from baton.engines.vllm.identity import Identity, compute_epoch, default_name, rank_epoch
from baton.engines.vllm.options import ConnectorOptions, read_options, read_role
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId


def test_nothing_set_is_fine() -> None:
    assert read_options({}) == ConnectorOptions()


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"transport.*known are name, .*key_file"):
        read_options({"transport": ["tcp"], "name": "v0"})


@pytest.mark.parametrize(
    "extra",
    [
        {"preferred_op": "NONE"},
        {"handoff_port": 70_000},
        {"handoff_timeout_s": 0},
        {"transports": []},
        {"name": ""},
        {"staging_bytes": -1},
        {"poll_interval_ms": "10"},
    ],
)
def test_a_value_that_makes_no_sense_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra))):
        read_options(extra)


def test_the_role_is_vllms() -> None:
    assert [read_role(r) for r in ("kv_producer", "kv_consumer", "kv_both")] == [
        "prefill",
        "decode",
        "both",
    ]
    with pytest.raises(ConfigError, match="kv_role"):
        read_role(None)


def test_a_start_has_an_epoch_and_a_name_of_its_own() -> None:
    epoch = compute_epoch("engine", "1")
    assert epoch == compute_epoch("engine", "1")
    assert len({epoch, compute_epoch("engine", "2"), compute_epoch("other", "1")}) == 3
    assert len(epoch) == 32
    assert default_name(epoch) == f"vllm-{epoch[:8]}"


def test_a_rank_has_a_name_and_an_epoch_of_its_own_only_beside_others() -> None:
    epoch = Epoch("0" * 32)
    assert Identity(WorkerId("v"), epoch, "both", 1).of_rank(0) == ("v", epoch)
    two = Identity(WorkerId("v"), epoch, "both", 2)
    assert two.of_rank(1) == ("v/1", rank_epoch(epoch, 1, 2))
    assert len({epoch, two.of_rank(0)[1], two.of_rank(1)[1]}) == 3
