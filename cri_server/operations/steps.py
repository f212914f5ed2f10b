"""Runs verbs as steps. A step is a named effect, in most cases with an undo. Steps run in order;
when one fails, those that have begun are undone.

The import of a verb's module registers the verb (`Steps`). So tests can enumerate all steps, and
inject an error, a delay or SIGKILL at each step (`PYRUNC_FAILPOINT`). An undo must be idempotent,
because it also runs for the step that failed. Independent steps run at the same time (`Parallel`).
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

Context = TypeVar("Context")
Effect = Callable[[Context], Awaitable[None]]

FAILPOINT = "PYRUNC_FAILPOINT"
_ENTRY = re.compile(
    r"(?P<point>[\w.]+)=(?:(?P<times>\d+)\*)?(?P<action>kill|error|delay\((?P<ms>\d+)\))"
)


class InjectedError(Error):
    """The error that a failpoint raises."""


@dataclass(slots=True)
class _Failpoint:
    action: str
    delay_s: float
    left: int | None


@dataclass(slots=True)
class Failpoints:
    """Injects faults into the steps of verbs. The variable PYRUNC_FAILPOINT lists the faults as
    VERB.STEP=ACTION, such as `run_sandbox.network=1*error,stop_container.signal=kill`.

    The action follows the step's effect, so that there is something to undo: `kill` sends SIGKILL
    to the server, `error` fails the step, `delay(MS)` waits. `N*` limits the action to the first N
    times.
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
        """Perform the action of the failpoint `point`; does nothing if none is set there."""
        failpoint = self.points.get(point)
        if failpoint is None or failpoint.left == 0:
            return
        if failpoint.left is not None:
            failpoint.left -= 1
        if failpoint.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif failpoint.action == "delay":
            await asyncio.sleep(failpoint.delay_s)
        else:
            raise InjectedError(f"failpoint {point}")


failpoints = Failpoints.parse(os.environ.get(FAILPOINT, ""))


@dataclass(frozen=True, slots=True)
class Step(Generic[Context]):
    """One effect of a verb. `undo` reverts it; None if there is nothing to revert."""

    name: str
    do: Effect[Context]
    undo: Effect[Context] | None = None


@dataclass(frozen=True, slots=True)
class Parallel(Generic[Context]):
    """Steps that run at the same time. When one fails, the others are cancelled, and all are undone
    in reverse order.

    `order(context)`: returns an empty tuple if the steps may run at the same time. If the request
    needs them one after the other, it returns the names of all steps, the first to run first.
    """

    steps: tuple[Step[Context], ...]
    order: Callable[[Context], tuple[str, ...]] = lambda context: ()

    def groups(self, context: Context) -> list[tuple[Step[Context], ...]]:
        """Return the steps in groups, which run in order; the steps of a group run at the same
        time."""
        named = {step.name: step for step in self.steps}
        order = self.order(context)
        return [(named[name],) for name in order] if order else [self.steps]


class Steps(Generic[Context]):
    """The steps of `verb`, in order. `run` performs all of them; when one fails, it undoes those
    that have begun."""

    registered: ClassVar[dict[str, Steps[Any]]] = {}

    def __init__(
        self,
        verb: str,
        steps: Sequence[Step[Context] | Parallel[Context]],
        *,
        stuck: Effect[Context] | None = None,
    ) -> None:
        """`stuck`: called after an undo has failed. It must list the unfinished object (such as a
        sandbox), so that the client can remove it later."""
        self._stages = [step if isinstance(step, Parallel) else Parallel((step,)) for step in steps]
        self.steps = tuple(step for stage in self._stages for step in stage.steps)
        names = [step.name for step in self.steps]
        if verb in self.registered or len(set(names)) != len(names):
            raise ValueError(f"the steps of {verb}, or the verb itself, are defined twice")
        self.verb, self._stuck = verb, stuck
        self.registered[verb] = self

    @classmethod
    def points(cls) -> list[str]:
        """Return the names of all failpoints: `verb.step`."""
        return [
            f"{verb}.{step.name}" for verb, steps in cls.registered.items() for step in steps.steps
        ]

    async def run(self, context: Context) -> None:
        """Run the steps. When a step fails, undo all begun steps in reverse order, and raise the
        error. The error has a note for each failed undo, and the step's name as `failed_step`.
        """
        begun: list[Step[Context]] = []
        times: list[tuple[str, float]] = []
        try:
            for stage in self._stages:
                for group in stage.groups(context):
                    # Noted before it runs, because a step that fails may have done a part of its
                    # effect.
                    begun += group
                    await self._do(group, context, times)
        # At the end of the server the running operation is cancelled: CancelledError, too, must not
        # leave a half-made object. A caller that hangs up cancels nothing (`SingleFlight`).
        except BaseException as error:
            failed = await self._undo(begun, context)
            for line in failed:
                error.add_note(line)
            if failed and self._stuck is not None:
                await self._stuck(context)
            raise
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s", self.verb, ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in times)
            )

    async def undo(self, context: Context) -> None:
        """Undo all steps in reverse order; an undo that fails is logged."""
        await self._undo(self.steps, context)

    async def _do(
        self, group: tuple[Step[Context], ...], context: Context, times: list[tuple[str, float]]
    ) -> None:
        """Run the steps of `group` at the same time, and append the name and duration of each to
        `times`. Raises the first failure, after all steps have ended."""
        if len(group) == 1:
            await self._do_one(group[0], context, times)
            return
        await gather(*(self._do_one(step, context, times) for step in group))

    async def _do_one(
        self, step: Step[Context], context: Context, times: list[tuple[str, float]]
    ) -> None:
        started_s = time.perf_counter()
        try:
            with span(step.name):
                await step.do(context)
                took_s = time.perf_counter() - started_s
                times.append((step.name, took_s))
                STEPS.add(self.verb, step.name, took_s)
                await failpoints.reached(f"{self.verb}.{step.name}")
        except BaseException as error:
            error.failed_step = step.name  # type: ignore[attr-defined]
            log.debug("%s failed at step %s: %s", self.verb, step.name, error)
            raise

    async def _undo(self, begun: Sequence[Step[Context]], context: Context) -> list[str]:
        failed = []
        for step in reversed(begun):
            if step.undo is None:
                continue
            try:
                await step.undo(context)
            except Exception as error:
                # The other undos run all the same, so that only the effect of this step stays.
                log.warning("%s: undo of %s failed: %s", self.verb, step.name, error)
                failed.append(f"undo of {step.name} failed: {error}")
        return failed
