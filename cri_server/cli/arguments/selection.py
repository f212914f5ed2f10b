"""Which pods and containers a verb is about: filters as crictl has them, docker's --filter, and
kubectl's label selectors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.output.show import PAUSED, POD_STATES, STATES
from pyrunc.errors import InvalidArgument

Item = TypeVar("Item", api.Container, api.PodSandbox)
Test = Callable[[Mapping[str, str]], bool]
FILTERS = {"name": "name", "label": "labels", "status": "state", "state": "state", "pod": "pod", "ancestor": "image", "image": "image", "id": "id", "namespace": "namespace"}  # fmt: skip


@functools.cache
def _grammar() -> tuple[re.Pattern[str], ...]:
    """What a part of a selector may be: in a set, equal, there; compiled for those who select."""
    return (
        re.compile(r"([^\s!=,()]+)\s+(in|notin)\s*\(([^()]*)\)"),
        re.compile(r"([^\s!=,()]+)\s*(==|=|!=)\s*([^\s!=,()]*)"),
        re.compile(r"(!?)\s*([^\s!=,()]+)"),
    )


def selector(text: str) -> Test:
    """A test of labels: `a=b,c!=d,e in (x, y),f notin (z),g,!h`. Raises InvalidArgument."""
    tests: list[Test] = []
    at, text = 0, text.strip()
    while at < len(text):
        found = next((match for part in _grammar() if (match := part.match(text, at))), None)
        if found is None:
            raise InvalidArgument(f"selector {text!r}: {text[at:]!r} cannot be read")
        tests.append(_test(found))
        at = found.end() + len(text[found.end() :]) - len(text[found.end() :].lstrip())
        if at < len(text) and text[at] != ",":
            raise InvalidArgument(f"selector {text!r}: {text[at:]!r} cannot be read")
        at += 1 + len(text[at + 1 :]) - len(text[at + 1 :].lstrip())
    return lambda labels: all(test(labels) for test in tests)


def _test(found: re.Match[str]) -> Test:
    _, equality, exists = _grammar()
    if found.re is exists:
        wanted, name = not found[1], found[2]
        return lambda labels: (name in labels) == wanted
    name, operator = found[1], found[2]
    if found.re is equality:
        if operator == "!=":
            return lambda labels: labels.get(name) != found[3]
        return lambda labels: labels.get(name) == found[3]
    values = {value.strip() for value in found[3].split(",")}
    return lambda labels: (labels.get(name) in values) == (operator == "in")


@dataclass(slots=True)
class Selection:
    """The filters of one call; empty ones select everything."""

    name: str = ""
    namespace: str = ""
    id: str = ""
    pod: str = ""
    image: str = ""
    state: str = ""
    labels: Sequence[str] = ()
    last: int = 0

    def check(self, states: Mapping[Any, str]) -> None:
        """Raises InvalidArgument for a value that cannot be right, before a server is asked."""
        for text in self.labels:
            selector(text)
        for text in (self.name, self.namespace):
            _pattern(text)
        if self.state:
            _state(self.state, states)

    def containers(self, client: Client, *, everything: bool = True) -> list[api.Container]:
        """Those that match, newest first; without `everything` and a state only the running ones.
        Raises InvalidArgument."""
        found = client.containers()
        if self.state:
            found = _in_state(client, found, self.state)
        elif not everything and not self.last:
            found = [c for c in found if c.state == api.CONTAINER_RUNNING]
        found = self._common(found)
        if self.pod or self.namespace:
            pods = {p.id: p for p in client.pods()}
            found = [
                c for c in found if c.pod_sandbox_id in pods and self.in_pod(pods[c.pod_sandbox_id])
            ]
        if self.image:
            wanted = _image(client, self.image)
            found = [
                c
                for c in found
                if wanted & {c.image_id, c.image_ref, c.image.image, c.image.user_specified_image}
            ]
        return self._newest(found)

    def pods(self, client: Client) -> list[api.PodSandbox]:
        """Those that match, newest first. Raises InvalidArgument."""
        found = client.pods()
        if self.state:
            found = [p for p in found if p.state == _state(self.state, POD_STATES)]
        if self.namespace:
            found = [p for p in found if _pattern(self.namespace).search(p.metadata.namespace)]
        return self._newest(self._common(found))

    def _common(self, found: list[Item]) -> list[Item]:
        tests = [selector(text) for text in self.labels]
        pattern = _pattern(self.name)
        return [
            each
            for each in found
            if pattern.search(each.metadata.name)
            and each.id.startswith(self.id)
            and all(test(each.labels) for test in tests)
        ]

    def in_pod(self, pod: api.PodSandbox | api.PodSandboxStatus) -> bool:
        """Whether this is the pod, or one of the namespace, that is asked for."""
        if self.namespace and not _pattern(self.namespace).search(pod.metadata.namespace):
            return False
        names = (pod.metadata.name, f"{pod.metadata.namespace}/{pod.metadata.name}")
        return not self.pod or pod.id.startswith(self.pod) or self.pod in names

    def _newest(self, found: list[Item]) -> list[Item]:
        ordered = sorted(found, key=lambda each: -each.created_at)
        return ordered[: self.last] if self.last > 0 else ordered


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"{text!r} is not a regular expression: {error}") from None


def _in_state(client: Client, found: list[api.Container], text: str) -> list[api.Container]:
    """`paused` is our server's word; to CRI these run."""
    state = _state(text, {**STATES, PAUSED: PAUSED})
    if state == PAUSED:
        paused = client.paused()
        return [c for c in found if c.id in paused]
    return [c for c in found if c.state == state]


def _state(text: str, names: Mapping[Any, str]) -> Any:
    """`running`, `Running`, `CONTAINER_RUNNING`, `not-ready`."""
    wanted = re.sub(r"[^a-z]", "", text.lower().removeprefix("container_").removeprefix("sandbox_"))
    for value, name in names.items():
        if name.replace(" ", "") == wanted:
            return value
    raise InvalidArgument(f"--state {text}: expected one of {', '.join(names.values())}")


def _image(client: Client, reference: str) -> set[str]:
    """All that a container may call this image."""
    request = api.ImageStatusRequest(image=api.ImageSpec(image=reference))
    response = client.image("ImageStatus", request)
    if not response.HasField("image"):
        return {reference}
    return {reference, response.image.id, *response.image.repo_tags, *response.image.repo_digests}


# -- options


def options(*kinds: str) -> Callable[[Any], Any]:
    """The filters of a verb, handed to it as `selection`. `kinds` may hold `container` and `pod`
    for what only these have."""
    own = [
        click.option("--name", default="", metavar="REGEX", help="Those whose name matches."),
        click.option("--id", "identifier", default="", metavar="PREFIX", help="Those whose id begins so."),
        click.option("--namespace", default="", metavar="REGEX", help="Those of pods in a namespace that matches."),
        click.option("-s", "--state", default="", metavar="STATE", help="Those in this state.", shell_complete=completion.states(*kinds)),
        click.option("--label", "--selector", "labels", multiple=True, metavar="SELECTOR", help="Labels as kubectl selects: k=v,k!=v,'k in (a,b)',k,!k; may be repeated."),
        click.option("--filter", "filters", multiple=True, metavar="KEY=VALUE", help="As docker has it: name, id, label, status, pod, ancestor."),
        click.option("-l", "--latest", is_flag=True, help="The newest, in any state."),
        click.option("-n", "--last", type=click.IntRange(0), default=0, metavar="N", help="The N newest, in any state."),
    ]  # fmt: skip
    if "container" in kinds:
        own += [
            click.option("-p", "--pod", default="", metavar="POD", help="Those of a pod (id, prefix, NAME or NAMESPACE/NAME).", shell_complete=completion.pods),
            click.option("--image", default="", metavar="IMAGE", help="Those of an image.", shell_complete=completion.images),
        ]  # fmt: skip

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(*arguments: Any, filters: Sequence[str], latest: bool, last: int, labels: Sequence[str], identifier: str, **rest: Any) -> Any:  # fmt: skip
            names = ("name", "namespace", "state", "pod", "image")
            found = Selection(
                **{name: rest.pop(name, "") for name in names}, id=identifier, labels=list(labels)
            )
            found.last = 1 if latest else last
            for each in filters:
                _apply(found, each)
            found.check(POD_STATES if kinds == ("pod",) else {**STATES, PAUSED: PAUSED})
            return command(*arguments, selection=found, **rest)

        for option in reversed(own):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _apply(selection: Selection, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or key not in FILTERS:
        raise InvalidArgument(
            f"--filter {text}: expected KEY=VALUE with one of {', '.join(FILTERS)}"
        )
    if key == "label":
        selection.labels = [*selection.labels, value]
    else:
        setattr(selection, FILTERS[key], value)
