"""What tenants hold of a folder that two users change: counts against what is there."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.clock import MachineClock
from baton.errors import StoreFullError
from baton.store.capacity import TenantCount, choose_place
from baton.store.folder.bodies import compute_cost
from baton.store.folder.directory import Folder
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.folder.tier import FolderTier, FolderTierOptions
from baton.store.interface import NO_TENANT, PutResult, TenantLabel, TierContext
from baton.testing.store_contract import CONTRACT_KEY, body_of, name_of
from tests.examples import examples

CAPACITY = 40 * 4096
SHARE = 0.3
TENANTS = [NO_TENANT, *(TenantLabel(bytes([i]) * 8) for i in range(1, 5))]
tenants = st.sampled_from(TENANTS)
numbers = st.integers(0, 30)
sizes = st.integers(1, 5).map(lambda pages: pages * 4096 - 100)


class Users(RuleBasedStateMachine):
    """Two processes that share a folder; each has its own view of it, as processes have."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.folders = [Folder(self.place / "kv") for _ in range(2)]
        self.users = [self.open(folder) for folder in self.folders]
        self.is_exact = True

    def open(self, folder: Folder) -> FolderTier:
        options = FolderTierOptions(capacity_bytes=CAPACITY, tenant_share=SHARE)
        return FolderTier(folder, options, TierContext("test", CONTRACT_KEY, MachineClock()))

    @rule(user=st.integers(0, 1), tenant=tenants, number=numbers, num_bytes=sizes)
    def put(self, user: int, tenant: TenantLabel, number: int, num_bytes: int) -> None:
        content = f"{tenant.hex()} {number}"
        before = self.held()
        try:
            result = self.users[user].put(name_of(content), body_of(content, num_bytes), tenant)
        except StoreFullError:
            assert compute_cost(num_bytes) > int(SHARE * CAPACITY)
            assert tenant != NO_TENANT
            return
        assert self.users[1 - user].find([name_of(content)]) == 1
        is_over = before[tenant] + compute_cost(num_bytes) > int(SHARE * CAPACITY)
        if result is PutResult.STORED and tenant != NO_TENANT and is_over:
            after = self.held()
            total_before = sum(before.values()) - before[tenant]
            fits = total_before + after[tenant] <= CAPACITY
            others_stay = all(after[each] == before[each] for each in TENANTS if each != tenant)
            assert others_stay or not fits, "its own entries make room"

    @rule(user=st.integers(0, 1), tenant=tenants, number=numbers)
    def discard(self, user: int, tenant: TenantLabel, number: int) -> None:
        name = name_of(f"{tenant.hex()} {number}")
        self.users[user].discard(name)
        assert [each.find([name]) for each in self.users] == [0, 0]

    @rule(
        user=st.integers(0, 1), tenant=tenants, num_bytes=st.integers(CAPACITY // 8, CAPACITY // 4)
    )
    def die_before_the_entry_has_its_name(
        self, user: int, tenant: TenantLabel, num_bytes: int
    ) -> None:
        """Counted, and not linked: too much is counted until it is needed."""
        counts = SharedCapacity(self.folders[user].fd, CAPACITY, int(SHARE * CAPACITY))
        if tenant != NO_TENANT:
            self.is_exact = False
            counted = counts.peek_held(tenant) + num_bytes
            counts._tenants.write(counts._tenants.find(tenant)[0], tenant, counted)
        counts.close()

    @rule(user=st.integers(0, 1))
    def recount(self, user: int) -> None:
        tier = self.users[user]
        tier._entries.recount()
        self.is_exact = True

    @invariant()
    def no_tenant_holds_more_than_its_share_and_none_is_counted_short(self) -> None:
        held = self.held()
        for tenant in TENANTS[1:]:
            assert held[tenant] <= int(SHARE * CAPACITY)
            counted = self.users[0]._capacity.peek_held(tenant)
            assert held[tenant] == counted if self.is_exact else held[tenant] <= counted
        assert sum(held.values()) == self.users[0].usage().used_bytes <= CAPACITY

    @invariant()
    def a_listing_shows_whose_each_entry_is(self) -> None:
        for entry in self.users[1].entries():
            lease = self.users[0].try_lease(entry.name)
            assert lease is not None
            with lease:
                assert lease.tenant == entry.tenant

    def held(self) -> Counter[TenantLabel]:
        """Bytes that entries take up, by the tenant in their headers."""
        held: Counter[TenantLabel] = Counter()
        for entry in self.users[0].entries():
            held[entry.tenant] += entry.num_bytes
        return held

    def teardown(self) -> None:
        for user, folder in zip(self.users, self.folders, strict=True):
            user.close()
            folder.close()
        shutil.rmtree(self.place)


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=examples(15), stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(tenants, st.integers(0, 2)), max_size=6), tenants)
def test_a_tenant_has_one_place(counts: list[tuple[TenantLabel, int]], tenant: TenantLabel) -> None:
    window = [TenantCount(*count) for count in counts]
    at = choose_place(window, tenant)
    own = [count.tenant for count in window].count(tenant)
    if at is None:
        assert own == 0
        assert all(count.num_bytes for count in window)
    else:
        assert window[at].tenant == tenant or (own == 0 and window[at].num_bytes == 0)
