"""Hosts on a switch hear each other, but for the direction that is cut."""

import pytest

from baton.testing.far_network import NoNamespaceError, run
from baton.testing.neighbours import deaf_to, neighbours


def test_one_direction_is_cut_and_heals():
    try:
        with neighbours(3) as (one, other, third):
            assert other.hears(one)
            assert one.hears(other)
            with deaf_to(other, one):
                assert not other.hears(one)
                assert one.hears(other)
                assert third.hears(one)
            assert other.hears(one)
            names = {host.namespace for host in (one, other, third)}
    except NoNamespaceError as exc:
        pytest.skip(str(exc))
    assert not names & set(run("ip", "netns", "list").decode().split())
