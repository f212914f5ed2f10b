"""Reads attacks.tsv, the table of all attacks with their outcome.

A line has five columns, separated by tabs: the attacker, one of ATTACKERS; the attack: a CVE of
another runtime with its subject, or a few words; the outcome, one of OUTCOMES; the defence: the
part of the program that causes the outcome; the test, as PATH::FUNCTION from the root of the
repository. An `open` attack has, instead of a test, a sentence that says why there is no defence
yet.

Lines are grouped by attacker, in the order of ATTACKERS. A new line goes to the end of its group.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("attacks.tsv")

ATTACKERS = {
    "image": "the author of an image that a pod runs: layers, configuration, manifest, signatures",
    "registry": "a registry, or a network between it and the node",
    "decoder": "a process that unpacks or indexes layers, after its library was exploited",
    "container": "a process in a container, root there unless a test says otherwise",
    "pod": "the author of a pod, as far as kubelet passes it on in requests",
    "bundle": "the author of config.json, or the caller of the command `pyrunc`",
    "checkpoint": "the author of a checkpoint archive or of CRIU's images",
    "plugin": "a CNI or NRI plugin, or the answer that it gives",
    "local user": "a user of the node who is not root",
    "network": "a machine in the networks that the node or its pods reach",
}

OUTCOMES = {
    "refused": "an error that names the cause; nothing was changed",
    "contained": "it runs, and reaches only the attacker's own objects",
    "bounded": "it costs a limited amount of time, memory, disk or descriptors",
    "allowed": "the legitimate use beside an attack works",
    "open": "it succeeds; the line has the reason in place of a test",
}


@dataclass(frozen=True, slots=True)
class Attack:
    """A row of the table of attacks."""

    attacker: str
    summary: str
    outcome: str
    defence: str
    test: str


def attacks() -> list[Attack]:
    """Return all lines, in their order. Raises TypeError for a line without exactly five
    columns."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Attack(*line) for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
