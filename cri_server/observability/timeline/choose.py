"""Which entries are asked for: a pod's, the last, the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from cri_server.observability.timeline.ring import Entry


def choose(entries: Sequence[Entry], pod: str = "", last: int = 0, slowest: int = 0) -> list[Entry]:
    """Those of `pod` (id or its prefix, NAME or NAMESPACE/NAME; empty: all), of these the `last` or
    the `slowest` so many; 0: all.

    Of several pods of one name all are meant: kubelet makes a pod again under its name.
    """
    found = [entry for entry in entries if not pod or _is_of(entry, pod)]
    if slowest:
        return sorted(found, key=lambda entry: -float(entry.get("duration_ms", 0)))[:slowest]
    return found[-last:] if last else found


def _is_of(entry: Entry, pod: str) -> bool:
    name = str(entry.get("pod", ""))
    return pod in (name, name.rpartition("/")[2]) or str(entry.get("pod_id", "")).startswith(pod)
