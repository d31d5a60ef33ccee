"""Digests in arrays, and the order of their rows, against a dict."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kv.digest_table import NO_ROW, DigestTable
from baton.kv.row_order import RowOrder
from tests.examples import examples

MANY = 1000


def digest_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


numbers = st.integers(0, 400)


class TableMachine(RuleBasedStateMachine):
    """`rows`: of each digest that is there, the least recently used first."""

    @initialize(factor=st.sampled_from([None, 1]))
    def begin(self, factor):
        self.table, self.order = DigestTable(), RowOrder()
        if factor is not None:  # all digests below are at one place then, or at its neighbours
            self.table._factor = factor
        self.is_crowded = factor is not None
        self.rows: dict[bytes, int] = {}

    def digest(self, number):
        digest = digest_of(number)
        return bytes(8) + digest[8:] if self.is_crowded else digest

    @rule(wanted=st.lists(numbers, max_size=40))
    def add(self, wanted):
        for digest in map(self.digest, wanted):
            if digest in self.rows:
                self.rows[digest] = self.rows.pop(digest)
                self.order.move_to_end(self.rows[digest])
            else:
                row = self.rows[digest] = self.table.add(digest)
                self.order.append(row)

    @rule(wanted=st.lists(numbers, max_size=40))
    def remove(self, wanted):
        for digest in map(self.digest, wanted):
            row = self.rows.pop(digest, NO_ROW)
            assert self.table.remove(digest) == row
            if row != NO_ROW:
                self.order.remove(row)

    @precondition(lambda self: self.rows)
    @rule()
    def remove_first(self):
        digest = next(iter(self.rows))
        assert self.order.first == self.rows[digest]
        self.order.remove(self.rows.pop(digest))
        self.table.remove(digest)

    @rule(wanted=st.lists(numbers, max_size=60))
    def find(self, wanted):
        digests = [self.digest(number) for number in wanted]
        expected = [self.rows.get(digest, NO_ROW) for digest in digests]
        assert [self.table.find(digest) for digest in digests] == expected
        assert self.table.find_each(digests).tolist() == expected
        leading = expected.index(NO_ROW) if NO_ROW in expected else len(expected)
        assert self.table.count_leading(digests) == leading

    @invariant()
    def is_consistent(self):
        if hasattr(self, "table"):
            self.table.check_invariants()
            assert len(self.table) == len(self.rows)
            assert [*self.order] == [*self.rows.values()]
            assert len(set(self.rows.values())) == len(self.rows)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=examples(15), stateful_step_count=15, deadline=None)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, MANY), st.randoms(use_true_random=False))
def test_it_grows_and_rows_are_used_again(num_gone, random):
    table = DigestTable()
    digests = [digest_of(number) for number in range(MANY)]
    rows = {digest: table.add(digest) for digest in digests}
    assert sorted(rows.values()) == list(range(MANY))
    gone = random.sample(digests, num_gone)
    for digest in gone:
        assert table.remove(digest) == rows.pop(digest)
    for number in range(num_gone):
        assert table.add(digest_of(MANY + number)) < MANY, "a free row was not used again"
    table.check_invariants()
    found = table.find_each(digests)
    assert found.tolist() == [rows.get(digest, NO_ROW) for digest in digests]
    assert len(table) == MANY


def test_where_digests_are_follows_from_a_random_factor():
    """Who chooses digests cannot choose them to be at one place."""
    tables = [DigestTable() for _ in range(8)]
    assert len({table._place_of(digest_of(1)) for table in tables}) > 1


@pytest.mark.parametrize("num_names", [1, 24, 25, 1000])
def test_a_miss_among_many_ends_the_leading_ones(num_names):
    table = DigestTable()
    digests = [digest_of(number) for number in range(num_names)]
    for digest in digests:
        table.add(digest)
    for at in {0, num_names // 2, num_names - 1}:
        table.remove(digests[at])
        assert table.count_leading(digests) == at
        table.add(digests[at])
    assert table.count_leading(digests) == num_names
    assert np.array_equal(np.sort(table.find_each(digests)), np.arange(num_names))
