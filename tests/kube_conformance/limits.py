"""Lists specs of the conformance suite that this machine cannot run with any runtime, each with the
reason. They are not started, and the summary counts them separately."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_V1 = (
    "reads cpu.weight and memory.max in the container's cgroup v2, but this machine keeps the"
    " controllers on v1"
)

WITHOUT_CONTROLLERS: Mapping[str, str] = {"Pod InPlace Resize Container": _V1}
"""Part of a spec's name -> why it cannot pass where cgroup v2 has no controllers."""


def of_this_machine() -> Mapping[str, str]:
    """Return a dict: part of a spec's name -> reason why the spec cannot pass on this machine."""
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    has_them = controllers.exists() and {"cpu", "memory"} <= {*controllers.read_text().split()}
    return {} if has_them else WITHOUT_CONTROLLERS


def reason(name: str, limits: Mapping[str, str]) -> str:
    """Return the reason why the spec of this name cannot run; empty if it can."""
    return next((why for part, why in limits.items() if part in name), "")


def skip_expression(limits: Mapping[str, str]) -> str:
    """Return a regular expression for ginkgo's --skip that finds the specs of `limits`; empty
    without limits."""
    return "|".join(re.escape(part) for part in limits)
