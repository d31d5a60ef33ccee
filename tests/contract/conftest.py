from collections.abc import Iterator

import pytest

from baton.testing.far_network import FarHost, NoNamespaceError, far_host

pytest.register_assert_rewrite(
    "baton.testing.transport_contract",
    "baton.testing.transport_pair",
    "baton.testing.store_contract",
    "baton.testing.store_faults",
)


@pytest.fixture(scope="session")
def far_cable() -> Iterator[FarHost]:
    """Another host at the end of a cable."""
    try:
        with far_host() as far:
            yield far
    except NoNamespaceError as exc:
        pytest.skip(str(exc))
