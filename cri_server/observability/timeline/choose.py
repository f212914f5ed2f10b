"""Selects calls from the timeline: those of a pod, the last ones, the slowest ones."""

from __future__ import annotations

from collections.abc import Sequence

from cri_server.observability.timeline.ring import Entry


def choose(entries: Sequence[Entry], pod: str = "", last: int = 0, slowest: int = 0) -> list[Entry]:
    """Return the calls in `entries`, or only those of one pod.

    - `pod`: the pod's id, a prefix of the id, NAME or NAMESPACE/NAME; "" for all pods. A name
      selects all pods that ever had it, because kubelet recreates a pod under the same name.
    - `last`: return only this number of the latest calls. 0: no limit.
    - `slowest`: return only this number of the slowest calls, slowest first, and ignore `last`.
    """
    chosen = [entry for entry in entries if not pod or _is_of(entry, pod)]
    if slowest:
        return sorted(chosen, key=lambda entry: -float(entry.get("duration_ms", 0)))[:slowest]
    return chosen[-last:] if last else chosen


def _is_of(entry: Entry, pod: str) -> bool:
    name = str(entry.get("pod", ""))
    return pod in (name, name.rpartition("/")[2]) or str(entry.get("pod_id", "")).startswith(pod)
