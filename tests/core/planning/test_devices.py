"""The ``devices=`` grammar: each row of its table; any other value is a UsageError."""

import pytest
from hypothesis import example, given, strategies as st

from geartrain import UsageError
from geartrain.planning.devices import parse_devices

ACCEPTED = ("a number", "[0, 2]", '"2,"', '"auto"')

#: Value -> indices with four visible devices, or words of the error.
INDEXED = {
    "count": [(3, [0, 1, 2]), ("3", [0, 1, 2])],
    "all": [(-1, [0, 1, 2, 3]), ("-1", [0, 1, 2, 3]), (" auto ", [0, 1, 2, 3])],
    "one index": [([0], [0]), ("2,", [2]), (" 2 , ", [2])],
    "indices": [((1, 3), [1, 3]), ("1, 3", [1, 3]), ("1,3,", [1, 3]), ([3, 1], [3, 1])],
    "range": [(range(3, 0, -2), [3, 1])],
    "zero": [(value, ("zero devices",)) for value in (0, "0", [], "", range(0), "  ")],
    "twice": [
        (value, ("1 is given 2 times", "Fix: name each device once")) for value in ([1, 1], "1,1,0")
    ],
    "absent": [(value, ("asked for 9", "[0, 1, 2, 3]", "visible")) for value in (9, "9,", [0, 9])],
    "just absent": [([4], ("asked for 4", "[0, 1, 2, 3]"))],
    "rubbish": [
        (value, ACCEPTED)
        for value in (-2, True, None, "1.5", ["0"], [-1], [True], "abc", "1,,2", ",", {0}, b"\x01")
    ],
    "more than any machine has": [("1" * 12, ("asked for", "[0, 1, 2, 3]"))],
    "no number": [("1" * 400, ACCEPTED)],
    "device's name": [("cuda:0", ('"0,"',)), ("mps:3", ('"3,"',))],
}
#: The same on the cpu with one core.
CPU = {
    "count": [(3, [0, 1, 2]), ("3", [0, 1, 2]), (64, list(range(64)))],
    "auto": [("auto", [0])],
    "all": [(-1, ("all of them", "cpu", "number of processes"))],
    "indices": [
        (value, ("list of indices", "cpu", "number of processes"))
        for value in ([0], "1,3", "2,", range(2), ["0"])
    ],
    "zero": [("0", ("zero devices",)), ([], ())],
    "rubbish": [
        (value, ("number of processes", '"auto"')) for value in (-2, True, None, "1.5", "abc", {0})
    ],
    "far more than cores": [
        (value, ("processes on a machine of", "core(s)", "Fix: devices="))
        for value in (65, "100000")
    ],
}


def rows(table):
    return [
        pytest.param(value, means, id=f"{name}: {value!r}")
        for name, pairs in table.items()
        for value, means in pairs
    ]


def check(value, means, **kind):
    if isinstance(means, list):
        assert parse_devices(value, **kind) == means
        return
    with pytest.raises(UsageError) as caught:
        parse_devices(value, **kind)
    for word in (f"devices={value!r}", *means):
        assert word in str(caught.value)


@pytest.mark.parametrize(("value", "means"), rows(INDEXED))
def test_with_four_devices(value, means):
    check(value, means, accelerator="cuda", available=4)


@pytest.mark.parametrize(("value", "means"), rows(CPU))
def test_on_the_cpu(value, means):
    check(value, means, accelerator="cpu", available=1, indexed=False)


def test_one_mps_device():
    check(2, ("asked for 2", "only [0]", "mps"), accelerator="mps", available=1)


@pytest.mark.parametrize("value", ["auto", 1])
def test_no_device_at_all(value):
    check(value, ("no cuda device is visible",), accelerator="cuda", available=0)


def test_indices_with_no_device_at_all():
    check([0], ("asked for 0", "only []"), accelerator="cuda", available=0)


class NoTruth:
    """Compares as NumPy's arrays: the result is neither true nor false."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("ambiguous")

    __hash__ = None


number = st.integers(-10, 200)
spelled = st.lists(number, max_size=5).flatmap(
    lambda xs: st.sampled_from(
        [str(xs), ",".join(map(str, xs)), ", ".join(map(str, xs)), ",".join(map(str, xs)) + ","]
    )
)
typed = st.one_of(st.text(max_size=8), st.text("0123456789,-+ .autocd:", max_size=8), spelled)
scalar = st.one_of(
    number,
    st.booleans(),
    st.none(),
    st.floats(),
    typed,
    st.binary(max_size=3),
    st.builds(object),
    st.builds(NoTruth),
)
anything = st.one_of(
    scalar,
    st.lists(scalar, max_size=5),
    st.lists(number, max_size=5).map(tuple),
    st.builds(range, number, number),
    st.sets(number, max_size=3),
)


def outcome(value, **kind):
    """Return indices, or ``None`` for a UsageError; any other exception fails the test."""
    try:
        return parse_devices(value, **kind)
    except UsageError:
        return None


@given(anything, st.integers(0, 8))
@example(NoTruth(), 4)
@example([NoTruth()], 4)
@example("1" * 5000, 4)
@example("1" * 5000 + ",", 4)
@example("٣", 4)
@example("²", 4)
def test_any_value_gives_distinct_visible_indices_or_a_usage_error(value, available):
    indices = outcome(value, accelerator="cuda", available=available)
    if indices is not None:
        assert indices
        assert len(set(indices)) == len(indices)
        assert all(
            isinstance(index, int) and not isinstance(index, bool) and 0 <= index < available
            for index in indices
        )


@given(anything, st.integers(1, 8))
@example(NoTruth(), 4)
@example("1" * 5000, 4)
def test_any_value_gives_processes_counted_from_zero_or_a_usage_error_on_the_cpu(value, cores):
    indices = outcome(value, accelerator="cpu", available=cores, indexed=False)
    if indices is not None:
        assert indices == list(range(len(indices)))
        assert len(indices) == (1 if str(value).strip() == "auto" else int(value))


def test_the_given_list_is_not_handed_out():
    given_list = [0, 1]
    parse_devices(given_list, accelerator="cuda", available=4).append(3)
    assert given_list == [0, 1]
