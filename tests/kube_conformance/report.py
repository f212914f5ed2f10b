"""Sums up ginkgo's report of a run: the specs that passed, failed, cannot run here, or were not
run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support import ginkgo

_NOT_RUN = ("skipped", "pending", "")


@dataclass(frozen=True)
class Result:
    """The outcome of the selected specs. `failed`: name of a spec -> its output; `limited`: name of
    a spec -> reason for not starting it."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    limited: dict[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the summary as text: the names of the specs that did not pass, and in the last
        line the counts."""
        lines = [
            *(
                f"FAILED   {name}\n         {reason}"
                for name, reason in sorted(self.failed.items())
            ),
            *(f"NOT RUN  {name}" for name in sorted(self.not_run)),
            *(f"LIMIT    {name}\n         {why}" for name, why in sorted(self.limited.items())),
            f"{self.total} specs: {len(self.passed)} passed, {len(self.failed)} failed, "
            f"{len(self.limited)} cannot run here, {len(self.not_run)} not run",
        ]
        return "\n".join(lines)

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.limited) + len(self.not_run)


def sum_up(
    selected: Iterable[str], ended: Iterable[Mapping[str, Any]], why: Callable[[str], str]
) -> Result:
    """Return the outcome of the `selected` specs from ginkgo's reports `ended`. `why` returns the
    reason for which a spec of this name was not started, or an empty string."""
    by_name = {ginkgo.name(spec): spec for spec in ended}
    result = Result()
    for name in selected:
        spec = by_name.get(name, {})
        state = spec.get("State", "")
        if state == ginkgo.PASSED:
            result.passed.append(name)
        elif state not in _NOT_RUN:
            result.failed[name] = _first_line(spec, state)
        elif reason := why(name) or skip_message(spec):
            result.limited[name] = reason
        else:
            result.not_run.append(name)
    return result


def skip_message(spec: Mapping[str, Any]) -> str:
    """Return the message with which a spec has skipped itself."""
    return " ".join(str(spec.get("Failure", {}).get("Message", "")).split())


def _first_line(spec: Mapping[str, Any], state: str) -> str:
    lines = skip_message(spec)
    return f"{state}: {lines[:300]}" if lines else state
