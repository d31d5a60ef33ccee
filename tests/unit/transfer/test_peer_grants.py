"""The grants of one peer at its writer, in the orders in which their messages may come."""

from types import SimpleNamespace

import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.ids import new_ticket_id
from baton.kv.copies import PageCopies
from baton.testing.transport_pair import whole_pages
from baton.transfer import peer_writes
from baton.transfer.grant_messages import CloseGrant, GrantOpened, pack_pages
from baton.transfer.peer_writes import PeerGrants

PAGES = np.array([0, 1])


@pytest.fixture
def grants():
    return PeerGrants(SimpleNamespace(report=lambda _: None), lambda *_: None)


def is_open(grants, grant):
    copies = PageCopies(0, (whole_pages([0], [1], 4096),))
    return grants.try_begin(1, SimpleNamespace(grant=grant, copies=copies), None)


def test_what_was_announced_too_early_is_opened_by_the_peer_alone(grants):
    grant = new_ticket_id()
    grants.note(grant)
    grants.admit(grant, PAGES)
    assert not is_open(grants, grant)
    grants.handle(GrantOpened(grant, pack_pages(PAGES), is_announced=True))
    assert is_open(grants, grant)
    assert grants.handle(CloseGrant(grant)) == grant
    grants.admit(grant, PAGES)
    assert not is_open(grants, grant)


@pytest.mark.parametrize("was_opened", [True, False])
def test_a_close_is_not_kept_for_an_announcement_that_came_before_it(grants, *, was_opened):
    grant = new_ticket_id()
    grants.note(grant)
    if was_opened:
        grants.handle(GrantOpened(grant, pack_pages(PAGES), is_announced=True))
    grants.handle(CloseGrant(grant))
    assert not grants._closed_early


def test_a_peer_that_announces_too_much_before_it_is_attached_is_refused(grants, monkeypatch):
    monkeypatch.setattr(peer_writes, "MAX_GRANTS", 2)
    for _ in range(2):
        grants.note(new_ticket_id())
    with pytest.raises(ProtocolError):
        grants.note(new_ticket_id())
