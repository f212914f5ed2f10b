"""Tests the records that our processes exchange: fields that are written or ignored, and errors
that name a wrong field."""

from __future__ import annotations

import pytest

from pyrunc.errors import InvalidArgument, PeerError
from pyrunc.records import Record, Request
from pyrunc.shim import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath, Id


class Inner(Record):
    number: int


class Outer(Record):
    name: Id
    inner: Inner | None
    many: Sequence[Inner] = ()
    by_name: dict[str, int] | None = None
    ratio: float = 0.5
    path: AbsolutePath = "/"
    free: Message | None = None
    rest: Sequence[Any] = ()


class Broken(Record):
    what: set[int]


def test_a_written_record_is_read_unchanged() -> None:
    one = Outer(
        "a", Inner(1), [Inner(2), Inner(3)], {"x": 4}, 1, "/p", {"deep": [{}]}, [("t", 1.5)]
    )
    fields = one.to_fields()
    assert fields["inner"] == {"number": 1} and fields["many"] == [{"number": 2}, {"number": 3}]
    assert Outer.of(fields) == one


def test_a_field_with_default_none_is_not_written() -> None:
    assert Outer("a", None).to_fields() == {
        "name": "a",
        "inner": None,
        "many": [],
        "ratio": 0.5,
        "path": "/",
        "rest": (),
    }


def test_unknown_fields_are_ignored_and_missing_fields_have_their_default() -> None:
    assert Outer.of({"name": "a", "inner": None, "new": 1}) == Outer("a", None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inner": None}, "Outer: name is missing"),
        ({"name": "a/b", "inner": None}, "Outer: name is 'a/b', not a name"),
        ({"name": "", "inner": None}, "Outer: name is '', not a name"),
        ({"name": "a", "inner": 1}, "Outer: inner is 1, not an object of its fields"),
        (
            {"name": "a", "inner": {"number": True}},
            "Outer: inner.number is True, not a whole number",
        ),
        ({"name": "a", "inner": {"number": 1.0}}, "Outer: inner.number is 1.0, not a whole number"),
        (
            {"name": "a", "inner": None, "many": {}},
            "Outer: many is {}, not a list of which each is an object",
        ),
        (
            {"name": "a", "inner": None, "by_name": {"x": "y"}},
            r"Outer: by_name\['x'\] is 'y', not a whole number",
        ),
        (
            {"name": "a", "inner": None, "many": [{"number": 1}, {"number": "2"}]},
            r"Outer: many\[1\].number is '2', not a whole number",
        ),
        ({"name": "a", "inner": None, "many": [{}, 1]}, r"Outer: many\[0\].number is missing"),
        ({"name": "a", "inner": None, "many": [1]}, r"Outer: many\[0\] is 1, not an object of"),
        ({"name": "a", "inner": None, "ratio": "1"}, "Outer: ratio is '1', not a number"),
        ({"name": "a", "inner": None, "path": "p"}, "Outer: path is 'p', not an absolute path"),
        ({"name": "a", "inner": None, "free": []}, r"Outer: free is \[\], not an object"),
    ],
)
def test_the_error_names_the_wrong_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Outer.of(fields)
    with pytest.raises(PeerError, match=words):
        Outer.of(fields, PeerError)


def test_an_annotation_that_cannot_be_read_is_refused_at_the_first_use() -> None:
    with pytest.raises(TypeError, match=r"set\[int\] is no type"):
        Broken.of({})


def test_a_request_message_names_its_call() -> None:
    stop = messages.Stop("c", 15, 2.5)
    assert stop.to_message() == {"call": "stop", "container": "c", "signal": 15, "timeout_s": 2.5}
    with pytest.raises(InvalidArgument, match="stop: signal is 'TERM', not a whole number"):
        messages.Stop.of({"container": "c", "signal": "TERM", "timeout_s": 1})


@pytest.mark.parametrize(
    "event",
    [
        messages.Exit(137, 9, 5, True, "OOMKilled", "killed", "c"),
        messages.ExecExited("e", "c", 3),
        messages.PauseExited(0),
        messages.PauseExited(),
    ],
)
def test_events_are_written_and_read_back(event: messages.Event) -> None:
    assert messages.event_of(messages.message_of(event)) == event


def test_an_unknown_event_is_ignored() -> None:
    assert messages.event_of({"event": "thawed"}) is None


def test_every_record_has_fields_that_can_be_read() -> None:
    from pyrunc.shim import files, starter

    kinds = [
        kind
        for module in (messages, files, starter)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Record) and kind not in (Record, Request)
    ]
    assert len(kinds) > 40
    for kind in kinds:
        with_nothing = not kind.__slots__  # type: ignore[attr-defined]
        try:
            kind.of({})
        except InvalidArgument:
            continue
        assert with_nothing or all(name in kind._defaults for name in kind.__slots__)  # type: ignore[attr-defined]
