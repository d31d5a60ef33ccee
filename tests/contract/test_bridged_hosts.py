"""Hosts on a switch hear each other, but for the direction that is cut."""

import pytest

from baton.testing.network_namespaces import (
    NoNamespaceError,
    bridged_hosts,
    dropping_packets_from,
    run,
)


def test_one_direction_is_cut_and_heals():
    try:
        with bridged_hosts(3) as (one, other, third):
            assert other.receives_from(one)
            assert one.receives_from(other)
            with dropping_packets_from(other, one):
                assert not other.receives_from(one)
                assert one.receives_from(other)
                assert third.receives_from(one)
            assert other.receives_from(one)
            names = {host.namespace for host in (one, other, third)}
    except NoNamespaceError as exc:
        pytest.skip(str(exc))
    assert not names & set(run("ip", "netns", "list").decode().split())
