import pytest

pytest.register_assert_rewrite(
    "baton.testing.transport_contract",
    "baton.testing.transport_pair",
    "baton.testing.store_contract",
    "baton.testing.store_faults",
)
