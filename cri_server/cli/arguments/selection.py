"""Filters that select pods and containers: crictl's options, docker's --filter, and kubectl's label
selectors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.arguments.options import add
from cri_server.cli.arguments.options import labels as labels_option
from cri_server.cli.connection.client import Client
from cri_server.cli.output.show import PAUSED, POD_STATES, STATES
from pyrunc.errors import InvalidArgument

Item = TypeVar("Item", api.Container, api.PodSandbox)
Test = Callable[[Mapping[str, str]], bool]
# key of --filter -> field of Selection; docker's names first
FILTERS = {
    "name": "name",
    "id": "id",
    "label": "labels",
    "status": "state",
    "ancestor": "image",
    "pod": "pod",
    "state": "state",
    "image": "image",
    "namespace": "namespace",
}


@functools.cache
def _grammar() -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a requirement in a label selector: set, equality, existence. Compiled
    on first use, because most commands have no selector."""
    return (
        re.compile(r"([^\s!=,()]+)\s+(in|notin)\s*\(([^()]*)\)"),
        re.compile(r"([^\s!=,()]+)\s*(==|=|!=)\s*([^\s!=,()]*)"),
        re.compile(r"(!?)\s*([^\s!=,()]+)"),
    )


def selector(text: str) -> Test:
    """Parse a label selector such as `a=b,c!=d,e in (x, y),f notin (z),g,!h`. Returns a function
    that takes an object's labels and returns whether they match. Raises InvalidArgument."""
    tests: list[Test] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = next(filter(None, (form.match(text, at) for form in _grammar())), None)
        if match is None:
            raise InvalidArgument(f"selector {text!r}: syntax error at {text[at:]!r}")
        tests.append(_test(match))
        at = _skip_spaces(text, match.end())
        if at < len(text) and text[at] != ",":
            raise InvalidArgument(f"selector {text!r}: syntax error at {text[at:]!r}")
        at = _skip_spaces(text, at + 1)
    return lambda labels: all(test(labels) for test in tests)


def _skip_spaces(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip())


def _test(match: re.Match[str]) -> Test:
    _, equality, exists = _grammar()
    if match.re is exists:
        expected, name = not match[1], match[2]
        return lambda labels: (name in labels) == expected
    name, operator = match[1], match[2]
    if match.re is equality:
        if operator == "!=":
            return lambda labels: labels.get(name) != match[3]
        return lambda labels: labels.get(name) == match[3]
    values = {value.strip() for value in match[3].split(",")}
    return lambda labels: (labels.get(name) in values) == (operator == "in")


@dataclass(slots=True)
class Selection:
    """The filters on a command line. An empty filter selects everything."""

    name: str = ""
    namespace: str = ""
    id: str = ""
    pod: str = ""
    image: str = ""
    state: str = ""
    labels: Sequence[str] = ()
    last: int = 0

    def check(self, states: Mapping[Any, str]) -> None:
        """Check the syntax of the filters, before the server is called. `states`: the states that
        --state may name. Raises InvalidArgument."""
        for text in self.labels:
            selector(text)
        for text in (self.name, self.namespace):
            _pattern(text)
        if self.state:
            _state(self.state, states)

    def containers(self, client: Client, *, all_states: bool = True) -> list[api.Container]:
        """List the matching containers, newest first. Lists only running ones, unless `all_states`,
        --state or --last is set. Raises InvalidArgument."""
        containers = client.containers()
        if self.state:
            containers = _in_state(client, containers, self.state)
        elif not all_states and not self.last:
            containers = [c for c in containers if c.state == api.CONTAINER_RUNNING]
        containers = self._common(containers)
        if self.pod or self.namespace:
            pods = {p.id: p for p in client.pods()}
            containers = [
                c
                for c in containers
                if c.pod_sandbox_id in pods and self.in_pod(pods[c.pod_sandbox_id])
            ]
        if self.image:
            images = _image(client, self.image)
            containers = [
                c
                for c in containers
                if images & {c.image_id, c.image_ref, c.image.image, c.image.user_specified_image}
            ]
        return self._newest(containers)

    def pods(self, client: Client) -> list[api.PodSandbox]:
        """List the matching pods, newest first. Raises InvalidArgument."""
        pods = client.pods()
        if self.state:
            pods = [p for p in pods if p.state == _state(self.state, POD_STATES)]
        if self.namespace:
            pods = [p for p in pods if _pattern(self.namespace).search(p.metadata.namespace)]
        return self._newest(self._common(pods))

    def _common(self, items: list[Item]) -> list[Item]:
        tests = [selector(text) for text in self.labels]
        pattern = _pattern(self.name)
        return [
            each
            for each in items
            if pattern.search(each.metadata.name)
            and each.id.startswith(self.id)
            and all(test(each.labels) for test in tests)
        ]

    def in_pod(self, pod: api.PodSandbox | api.PodSandboxStatus) -> bool:
        """Return whether this pod matches the filters for pod and namespace."""
        if self.namespace and not _pattern(self.namespace).search(pod.metadata.namespace):
            return False
        names = (pod.metadata.name, f"{pod.metadata.namespace}/{pod.metadata.name}")
        return not self.pod or pod.id.startswith(self.pod) or self.pod in names

    def _newest(self, items: list[Item]) -> list[Item]:
        ordered = sorted(items, key=lambda each: -each.created_at)
        return ordered[: self.last] if self.last > 0 else ordered


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"{text!r} is not a regular expression: {error}") from None


def _in_state(client: Client, containers: list[api.Container], text: str) -> list[api.Container]:
    """Return those of `containers` that are in the state `text`. Asks the server for the paused
    containers with a private call, because CRI has no paused state."""
    state = _state(text, {**STATES, PAUSED: PAUSED})
    if state == PAUSED:
        paused = client.paused()
        return [c for c in containers if c.id in paused]
    return [c for c in containers if c.state == state]


def _state(text: str, names: Mapping[Any, str]) -> Any:
    """Return the key of `names` whose value is the state `text`. Accepts `running`, `Running`,
    `CONTAINER_RUNNING` or `not-ready`. Raises InvalidArgument."""
    normalized = re.sub(
        r"[^a-z]", "", text.lower().removeprefix("container_").removeprefix("sandbox_")
    )
    for value, name in names.items():
        if name.replace(" ", "") == normalized:
            return value
    raise InvalidArgument(f"--state {text}: expected one of {', '.join(names.values())}")


def _image(client: Client, reference: str) -> set[str]:
    """Return the strings by which a container may name the image `reference`: the reference, the
    image's id, its tags and its digests."""
    image = client.image_status(reference).image
    return {reference, image.id, *image.repo_tags, *image.repo_digests} - {""}


# -- options


def _filter(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(*names, default="", **attributes)


def options(*kinds: str) -> Callable[[Any], Any]:
    """Return a click decorator for the filter options; a verb's function gets them all as
    `selection`. `kinds`: `container` or `pod`; each kind adds further options."""
    own = [
        _filter("--name", metavar="REGEX", help="Select by name."),
        _filter("--id", "identifier", metavar="PREFIX", help="Select by the beginning of the id."),
        _filter("--namespace", metavar="REGEX", help="Select by the namespace of the pod."),
        _filter(
            *("-s", "--state"),
            metavar="STATE",
            help="Select by state.",
            shell_complete=completion.states(*kinds),
        ),
        labels_option(
            "Select by labels, as kubectl does: k=v,k!=v,'k in (a,b)',k,!k; may be repeated."
        ),
        click.option(
            *("--filter", "filters"),
            multiple=True,
            metavar="KEY=VALUE",
            help="Select as docker does, by name, id, label, status, pod or ancestor.",
        ),
        click.option("-l", "--latest", is_flag=True, help="Only the newest, in any state."),
        click.option(
            *("-n", "--last"),
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="Only the N newest, in any state.",
        ),
    ]
    if "container" in kinds:
        own += [
            _filter(
                *("-p", "--pod"),
                metavar="POD",
                help="Select by pod (id, prefix, NAME or NAMESPACE/NAME).",
                shell_complete=completion.pods,
            ),
            _filter(
                "--image",
                metavar="IMAGE",
                help="Select by image.",
                shell_complete=completion.images,
            ),
        ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(
            *arguments: Any,
            filters: Sequence[str],
            latest: bool,
            last: int,
            labels: Sequence[str],
            identifier: str,
            **rest: Any,
        ) -> Any:
            names = ("name", "namespace", "state", "pod", "image")
            selection = Selection(
                **{name: rest.pop(name, "") for name in names}, id=identifier, labels=list(labels)
            )
            selection.last = 1 if latest else last
            for each in filters:
                _apply(selection, each)
            selection.check(POD_STATES if kinds == ("pod",) else {**STATES, PAUSED: PAUSED})
            return command(*arguments, selection=selection, **rest)

        return add(*own)(wrapped)

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
