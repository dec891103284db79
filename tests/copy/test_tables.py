"""How tables say by what is divided. What they mean to the kernel is tested with the kernel."""

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.copy import tables


@given(
    divisor=st.one_of(st.integers(1, 2**31 - 1), st.sampled_from([1, 2, 3, 7, 2**16, 2**30, 2**30 + 1, 2**31 - 1])),
    number=st.integers(0, 2**31 - 1),
    near=st.integers(-1, 1),
)
def test_division_by_multiplication_is_exact(divisor, number, near):
    multiplier, shift = tables.divisor(divisor)
    assert multiplier < 2**32
    assert shift < 32
    for x in (number, min(max(number // divisor * divisor + near, 0), 2**31 - 1)):
        high = x * multiplier >> 32
        assert high + x < 2**32
        assert (high + x) >> shift == x // divisor
