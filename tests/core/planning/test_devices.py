"""The ``devices=`` grammar: each row of its table; any other value is a UsageError."""

import enum

import pytest
from hypothesis import example, given, settings, strategies as st

from geartrain import UsageError
from geartrain.planning.devices import parse_devices

ACCEPTED = ("a number", "[0, 2]", '"2,"', '"auto"')

#: Value -> indices with four visible devices, or words of the error; the same on the cpu (``None``:
#: no row).
INDEXED = {
    "count": [(3, [0, 1, 2]), ("3", [0, 1, 2]), (1, [0]), (4, [0, 1, 2, 3])],
    "all": [
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ("auto", [0, 1, 2, 3]),
        (" auto ", [0, 1, 2, 3]),
    ],
    "one index": [([0], [0]), ((0,), [0]), ("2,", [2]), (" 2 , ", [2])],
    "indices": [
        ([1, 3], [1, 3]),
        ((1, 3), [1, 3]),
        ("1, 3", [1, 3]),
        ("1,3", [1, 3]),
        ("1,3,", [1, 3]),
        ([3, 1], [3, 1]),
    ],
    "range": [(range(2), [0, 1]), (range(3, 0, -2), [3, 1])],
    "zero": [(value, ("zero devices",)) for value in (0, "0", [], (), "", range(0), "  ")],
    "twice": [
        (value, ("1 is given 2 times", "Fix: name each device once"))
        for value in ([1, 1], (0, 1, 1), "1,1", "1,1,0")
    ],
    "absent": [
        (value, ("asked for 9", "[0, 1, 2, 3]", "visible"))
        for value in ([9], 9, "9,", "9", [0, 9], "0,9")
    ],
    "just absent": [
        (value, (f"asked for {asked}", "[0, 1, 2, 3]")) for value, asked in ((5, 5), ([4], 4))
    ],
    "rubbish": [
        (value, ACCEPTED)
        for value in (
            -2,
            "-2",
            True,
            False,
            None,
            1.5,
            "1.5",
            ["0"],
            [-1],
            [True],
            [None],
            "cuda:0",
            "abc",
            "1,,2",
            ",",
            {0},
            {0: 1},
        )
    ],
    "more than any machine has": [
        (value, ("asked for", "[0, 1, 2, 3]")) for value in (65_537, "65537", "1" * 12)
    ],
    "no number": [("1" * 400, ACCEPTED)],
    "device's name": [("cuda:0", ('"0,"',)), ("mps:3", ('"3,"',))],
}
CPU = {
    "count": [
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (1, [0]),
        (9, list(range(9))),
        (64, list(range(64))),
    ],
    "auto": [("auto", [0])],
    "all": [(value, ("all of them", "cpu", "number of processes")) for value in (-1, "-1")],
    "indices": [
        (value, ("list of indices", "cpu", "number of processes"))
        for value in (
            [0],
            (0,),
            [1, 3],
            (1, 3),
            "1, 3",
            "1,3",
            "2,",
            range(2),
            [1, 1],
            [9],
            "9,",
            ["0"],
            [-1],
        )
    ],
    "zero": [(0, ("zero devices",)), ("0", ("zero devices",)), ([], ()), ("", ())],
    "rubbish": [
        (value, ("number of processes", '"auto"'))
        for value in (-2, "-2", True, False, None, 1.5, "1.5", "cuda:0", "abc", "1,,2", {0})
    ],
    "far more than cores": [
        (value, ("processes on a machine of", "core(s)", "Fix: devices="))
        for value in (65, 500, "100000", "1" * 12)
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


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
@pytest.mark.parametrize(("value", "means"), rows(INDEXED))
def test_with_four_devices(value, means, accelerator):
    check(value, means, accelerator=accelerator, available=4)


@pytest.mark.parametrize(("value", "means"), rows(CPU))
@pytest.mark.parametrize("cores", [1, 4])
def test_on_the_cpu(value, means, cores):
    check(value, means, accelerator="cpu", available=cores, indexed=False)


def test_one_mps_device():
    assert parse_devices("auto", accelerator="mps", available=1) == [0]
    check(2, ("asked for 2", "only [0]", "mps"), accelerator="mps", available=1)


@pytest.mark.parametrize("value", ["auto", -1, 1])
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


class Index(enum.IntEnum):
    ONE = 1


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


@settings(max_examples=500, deadline=None)
@given(anything, st.integers(0, 8))
@example(NoTruth(), 4)
@example([NoTruth()], 4)
@example("1" * 5000, 4)
@example("1" * 5000 + ",", 4)
@example("٣", 4)
@example("²", 4)
@example(Index.ONE, 4)
@example(b"\x01", 4)
def test_any_value_gives_distinct_visible_indices_or_a_usage_error(value, available):
    indices = outcome(value, accelerator="cuda", available=available)
    if indices is not None:
        assert indices
        assert len(set(indices)) == len(indices)
        assert all(
            isinstance(index, int) and not isinstance(index, bool) and 0 <= index < available
            for index in indices
        )


@settings(max_examples=300, deadline=None)
@given(anything, st.integers(1, 8))
@example(NoTruth(), 4)
@example("1" * 5000, 4)
def test_any_value_gives_processes_counted_from_zero_or_a_usage_error_on_the_cpu(value, cores):
    indices = outcome(value, accelerator="cpu", available=cores, indexed=False)
    if indices is not None:
        assert indices == list(range(len(indices)))
        assert len(indices) == (1 if str(value).strip() == "auto" else int(value))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    st.sampled_from([", ", ",", " , "]),
    st.sampled_from(["", ","]),
)
def test_a_string_means_the_same_as_its_list(indices, comma, end):
    text = comma.join(map(str, indices)) + (end if len(indices) > 1 else ",")
    assert parse_devices(text, accelerator="cuda", available=8) == indices
    assert parse_devices(indices, accelerator="cuda", available=8) == indices
    assert parse_devices(tuple(indices), accelerator="cuda", available=8) == indices


@given(st.integers(1, 8))
def test_a_number_means_that_many_from_the_first(count):
    for value in (count, str(count), range(count)):
        assert parse_devices(value, accelerator="cuda", available=8) == list(range(count))


def test_bytes_are_no_list_of_indices():
    check(b"\x01", ACCEPTED, accelerator="cuda", available=4)


def test_the_given_list_is_not_handed_out():
    given_list = [0, 1]
    parse_devices(given_list, accelerator="cuda", available=4).append(3)
    assert given_list == [0, 1]
