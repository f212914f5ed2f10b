"""Tests that random layers change nothing outside their own folder when they are unpacked."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from cri_server.images.archives.build import LayerFile
from cri_server.images.layers.inflate import BadLayer
from pyrunc.errors import KernelError, ResourceExhausted
from tests.cri.images.chance import CHANGES, EXAMPLES, MEMBERS, RANDOM, WHOLE, changed
from tests.cri.images.test_hostile import Jail, nothing_was_left_on_the_host, shared_jail
from tests.cri.images.test_unpack import raw_tar

__all__ = ["nothing_was_left_on_the_host", "shared_jail"]


def attempt(jail: Jail, blob: bytes) -> None:
    """Unpack a layer. Assert that nothing outside its folder changes, whether this succeeds or
    raises one of the project's errors."""
    try:
        jail.unpack(blob)
    except (BadLayer, ResourceExhausted, KernelError):
        pass
    finally:
        jail.clean()


@RANDOM
@given(changes=CHANGES)
def test_changed_bytes_do_not_escape(shared_jail: Jail, changes: list[tuple[int, int]]) -> None:
    attempt(shared_jail, changed(changes))


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=some.integers(0, len(WHOLE) // 512),
    count=some.integers(1, 20),
    to=some.integers(0, len(WHOLE) // 512),
)
def test_moved_blocks_do_not_escape(shared_jail: Jail, start: int, count: int, to: int) -> None:
    cut = WHOLE[start * 512 : (start + count) * 512]
    rest = WHOLE[: start * 512] + WHOLE[(start + count) * 512 :]
    attempt(shared_jail, rest[: to * 512] + cut + rest[to * 512 :])


@RANDOM
@given(members=MEMBERS)
def test_no_sequence_of_members_escapes(
    shared_jail: Jail, members: list[tuple[str, LayerFile]]
) -> None:
    attempt(shared_jail, raw_tar(*members))
