"""How workers of a role are divided between StatefulSets."""

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.kubernetes.sizes import divide


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1),
    st.integers(0, 100),
)
def test_all_are_placed_and_sets_become_more_even(present, total):
    sizes = divide(present, total)
    assert sum(sizes.values()) == total
    assert sizes.keys() == present.keys()
    grows = total >= sum(present.values())
    assert all(
        (sizes[name] >= num) if grows else (sizes[name] <= num) for name, num in present.items()
    )
    spread = max(sizes.values()) - min(sizes.values())
    assert spread <= max(1, max(present.values()) - min(present.values()))
    assert min(sizes.values()) >= 0
    assert divide(sizes, total) == sizes
