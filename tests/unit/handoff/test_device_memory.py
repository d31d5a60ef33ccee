"""What cannot be configured where KV is in a GPU's memory."""

import pytest

from baton.errors import ConfigError
from baton.handoff.options import check_device_memory


def test_a_worker_that_only_hands_off_is_accepted() -> None:
    check_device_memory((), "raw")


@pytest.mark.parametrize(
    ("tiers", "encoding", "error_budget", "name"),
    [
        (("host",), "raw", None, "store.tiers"),
        ((), "int8", None, "handoff.encoding"),
        ((), "raw", 0.1, "handoff.error_budget"),
    ],
)
def test_what_reads_kv_from_the_hosts_memory_is_refused(
    tiers: tuple[str, ...], encoding: str, error_budget: float | None, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs KV in the host's memory"):
        check_device_memory(tiers, encoding, error_budget)
