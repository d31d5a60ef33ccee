"""The table of faults of a fleet on three hosts. A new one is a line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.ray.chaos_fleet import NUM_CLIENTS
from tests.ray.chaos_head import gcs_restarted, head_lost, head_restarted
from tests.ray.chaos_injections import (
    VICTIM,
    clock_ahead,
    disk_full,
    host_killed,
    key_wrong,
    killed,
    partition,
    same_name,
    slow_links,
    stopped,
    supervisor_killed,
    upgraded,
    version_differs,
)

if TYPE_CHECKING:
    from tests.ray.chaos_injections import Inject

STOPPED_S = 8.0
A_MINUTE_S = 60.0


@dataclass(frozen=True)
class Fault:
    """One row of the table. `lasts_s`: at least, from when it happened.

    `whole`: whether all processes serve again while it lasts, or once it is over. `may_break`: how
    many answers may end early. `spends_hosts`: the hosts cannot be used for another one.
    """

    name: str
    what: str
    inject: Inject
    lasts_s: float = 0.0
    whole: Literal["meanwhile", "after"] = "meanwhile"
    may_break: int = 0
    spends_hosts: bool = False


FAULTS = (
    Fault("worker-killed", "a decode worker is killed", killed(VICTIM)),
    Fault("prefill-killed", "the prefill worker is killed", killed("prefill-0")),
    Fault(
        "worker-stopped",
        "a decode worker is stopped for 8 s",
        stopped(VICTIM),
        STOPPED_S,
        whole="after",
    ),
    Fault("supervisor-killed", "the supervisor of a decode worker is killed", supervisor_killed),
    Fault("gateway-killed", "the gateway is killed", killed("gateway-0"), may_break=NUM_CLIENTS),
    Fault(
        "gateway-stopped",
        "the gateway is stopped for 8 s",
        stopped("gateway-0"),
        STOPPED_S,
        whole="after",
    ),
    Fault("slow-links", "two hosts send at 1 Mbit/s for 10 s", slow_links, 10.0),
    Fault(
        "disk-full",
        "the disk of a host is full for 15 s, and a supervisor there is killed",
        disk_full,
        15.0,
        whole="after",
    ),
    Fault(
        "clock-ahead",
        "a host's clock is an hour ahead, and its worker is killed",
        clock_ahead,
        10.0,
    ),
    Fault("key-wrong", "a worker starts with another key", key_wrong, 10.0, whole="after"),
    Fault(
        "version-differs",
        "a worker starts with another version of the handoff protocol",
        version_differs,
        25.0,
    ),
    Fault(
        "same-name", "fleets of one name are started, one after the other and at once", same_name
    ),
    Fault("upgrade", "`baton upgrade` of four processes, one after the other", upgraded),
    Fault(
        "one-way",
        "a host is cut off in one direction for a minute",
        partition(both_ways=False),
        A_MINUTE_S,
        spends_hosts=True,
    ),
    Fault(
        "two-way",
        "a host is cut off in both directions for a minute",
        partition(both_ways=True),
        A_MINUTE_S,
        spends_hosts=True,
    ),
    Fault("host-killed", "a host loses power", host_killed, spends_hosts=True),
    Fault(
        "gcs-restarted",
        "Ray's GCS (state in Redis) is away for 20 s; then a supervisor is killed",
        gcs_restarted,
    ),
    Fault(
        "head-restarted",
        "the same, with all of Ray on the head's host, and `ray start --head` again",
        head_restarted,
    ),
    Fault("head-lost", "Ray's head is lost, for the rest", head_lost, 10.0),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
