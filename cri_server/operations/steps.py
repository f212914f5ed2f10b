"""Every verb is a list of named steps, each with what takes it back: the journal that tests
enumerate and break.

`Steps` registers its verb when its module is imported, so a test can walk all steps there are and
fail, delay or kill the server at each (`PYRUNC_FAILPOINT`); a new step cannot be left out of that
matrix. An undo is idempotent, because it also runs for the step that failed half-way. Effects that
need nothing of each other run side by side (`Beside`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from cri_server.observability.meters import STEPS
from cri_server.observability.timeline.trace import span
from cri_server.operations.tasks import gather
from pyrunc.errors import Error

log = logging.getLogger(__name__)

Work = TypeVar("Work")
Effect = Callable[[Work], Awaitable[None]]

FAILPOINT = "PYRUNC_FAILPOINT"
_ENTRY = re.compile(
    r"(?P<point>[\w.]+)=(?:(?P<times>\d+)\*)?(?P<action>kill|error|delay\((?P<ms>\d+)\))"
)


class InjectedError(Error):
    """A failpoint asked for this error."""


@dataclass(slots=True)
class _Failpoint:
    action: str
    delay_s: float
    left: int | None


@dataclass(slots=True)
class Failpoints:
    """Faults to inject, by `verb.step`:
    `PYRUNC_FAILPOINT=run_sandbox.network=1*error,stop_container.signal=kill`.

    The action happens after the step's effect, so that there is something to take back: `kill` ends
    the server as SIGKILL does, `error` fails the step, `delay(MS)` waits; `N*` limits how often.
    Raises ValueError for anything else.
    """

    points: dict[str, _Failpoint] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Failpoints:
        points = {}
        for entry in filter(None, text.split(",")):
            match = _ENTRY.fullmatch(entry.strip())
            if match is None:
                raise ValueError(
                    f"{FAILPOINT}: {entry!r} is not VERB.STEP=[N*]kill|error|delay(MS)"
                )
            times = match["times"]
            points[match["point"]] = _Failpoint(
                match["action"].partition("(")[0],
                int(match["ms"] or 0) / 1e3,
                int(times) if times else None,
            )
        return cls(points)

    async def reached(self, point: str) -> None:
        """Do what is asked for at `point`; usually nothing."""
        found = self.points.get(point)
        if found is None or found.left == 0:
            return
        if found.left is not None:
            found.left -= 1
        if found.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif found.action == "delay":
            await asyncio.sleep(found.delay_s)
        else:
            raise InjectedError(f"failpoint {point}")


failpoints = Failpoints.parse(os.environ.get(FAILPOINT, ""))


@dataclass(frozen=True, slots=True)
class Step(Generic[Work]):
    """One effect of a verb and what takes it back (None: nothing to take back)."""

    name: str
    do: Effect[Work]
    undo: Effect[Work] | None = None


@dataclass(frozen=True, slots=True)
class Beside(Generic[Work]):
    """Steps whose effects run at the same time; when one fails the others are cancelled, and all
    are undone, last first.

    `in_turn(work)` may say that for this piece of work one needs another: their names in the order
    to run in, else nothing.
    """

    steps: tuple[Step[Work], ...]
    in_turn: Callable[[Work], tuple[str, ...]] = lambda work: ()

    def groups(self, work: Work) -> list[tuple[Step[Work], ...]]:
        """The steps in their order for `work`; those of one group run at the same time."""
        named = {step.name: step for step in self.steps}
        order = self.in_turn(work)
        return [(named[name],) for name in order] if order else [self.steps]


class Steps(Generic[Work]):
    """The steps of `verb`, in order. `run` does all of them or takes back what was done."""

    registered: ClassVar[dict[str, Steps[Any]]] = {}

    def __init__(
        self,
        verb: str,
        steps: Sequence[Step[Work] | Beside[Work]],
        *,
        stuck: Effect[Work] | None = None,
    ) -> None:
        """`stuck` runs when some undo failed: the place to leave a thing that the caller can remove
        later."""
        self._stages = [step if isinstance(step, Beside) else Beside((step,)) for step in steps]
        self.steps = tuple(step for stage in self._stages for step in stage.steps)
        names = [step.name for step in self.steps]
        if verb in self.registered or len(set(names)) != len(names):
            raise ValueError(f"the steps of {verb} are named twice")
        self.verb, self._stuck = verb, stuck
        self.registered[verb] = self

    @classmethod
    def points(cls) -> list[str]:
        """All failpoints there are: `verb.step`."""
        return [
            f"{verb}.{step.name}" for verb, steps in cls.registered.items() for step in steps.steps
        ]

    async def run(self, work: Work) -> None:
        """Do the steps. On failure undo all that were begun, last first, and raise what happened,
        with a note for each undo that failed and the step's name as `failed_step`."""
        begun: list[Step[Work]] = []
        times: list[tuple[str, float]] = []
        try:
            for stage in self._stages:
                for group in stage.groups(work):
                    begun += group
                    await self._do(group, work, times)
        except BaseException as error:
            failed = await self._take_back(begun, work)
            for line in failed:
                error.add_note(line)
            if failed and self._stuck is not None:
                await self._stuck(work)
            raise
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s", self.verb, ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in times)
            )

    async def _do(
        self, group: tuple[Step[Work], ...], work: Work, times: list[tuple[str, float]]
    ) -> None:
        """The effects of `group`, all at once."""
        if len(group) == 1:
            await self._do_one(group[0], work, times)
            return
        await gather(*(self._do_one(step, work, times) for step in group))

    async def _do_one(self, step: Step[Work], work: Work, times: list[tuple[str, float]]) -> None:
        began = time.perf_counter()
        try:
            with span(step.name):
                await step.do(work)
                took_s = time.perf_counter() - began
                times.append((step.name, took_s))
                STEPS.add(self.verb, step.name, took_s)
                await failpoints.reached(f"{self.verb}.{step.name}")
        except BaseException as error:
            error.failed_step = step.name  # type: ignore[attr-defined]
            log.debug("%s failed at step %s: %s", self.verb, step.name, error)
            raise

    async def _take_back(self, begun: list[Step[Work]], work: Work) -> list[str]:
        failed = []
        for step in reversed(begun):
            if step.undo is None:
                continue
            try:
                await step.undo(work)
            except Exception as error:
                log.warning("%s: could not undo %s: %s", self.verb, step.name, error)
                failed.append(f"could not undo {step.name}: {error}")
        return failed
