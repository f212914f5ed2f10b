"""Tests tokens of streaming URLs: each works once, for a minute and for one kind of session, and
their number is limited."""

from __future__ import annotations

import base64

import pytest

from cri_server.streaming.tokens import Tickets
from pyrunc.errors import ResourceExhausted


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.requirement("9.1")
def test_a_token_works_once() -> None:
    tickets = Tickets()
    token = tickets.issue("exec", "request")
    assert tickets.take("exec", token) == "request"
    assert tickets.take("exec", token) is None


def test_a_token_is_bound_to_its_kind() -> None:
    tickets = Tickets()
    token = tickets.issue("exec", "request")
    assert tickets.take("attach", token) is None
    assert tickets.take("exec", token) == "request"


@pytest.mark.requirement("9.1")
def test_tokens_have_256_bits() -> None:
    tickets = Tickets()
    tokens = {tickets.issue("exec", n) for n in range(1000)}
    assert len(tokens) == 1000
    assert {len(base64.urlsafe_b64decode(token + "=")) for token in tokens} == {32}


@pytest.mark.requirement("9.1")
def test_a_token_expires() -> None:
    clock = Clock()
    tickets = Tickets(clock=clock)
    early, late = tickets.issue("exec", 1), tickets.issue("exec", 2)
    clock.now += 59.9
    assert tickets.take("exec", early) == 1
    clock.now += 0.1
    assert tickets.take("exec", late) is None


@pytest.mark.requirement("9.1")
def test_outstanding_tokens_are_limited() -> None:
    clock = Clock()
    tickets = Tickets(clock=clock)
    tokens = [tickets.issue("exec", n) for n in range(1000)]
    with pytest.raises(ResourceExhausted):
        tickets.issue("exec", "one more")
    assert tickets.take("exec", tokens[500]) == 500
    tickets.issue("exec", "in its place")
    clock.now += 61
    for n in range(1000):
        tickets.issue("exec", n)


@pytest.mark.parametrize("token", ["", "x", "ü" * 40, "\udcff", "a" * 100_000])
def test_an_unknown_token_of_any_text_is_refused(token: str) -> None:
    assert Tickets().take("exec", token) is None
