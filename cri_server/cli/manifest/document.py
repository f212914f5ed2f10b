"""From a file's text to one Pod, and what it uses, as plain values: YAML or JSON, with a clear word
about anything else."""

from __future__ import annotations

from typing import Any

import yaml

from pyrunc.errors import InvalidSpec

WITH_A_TEMPLATE = {
    "Deployment",
    "ReplicaSet",
    "StatefulSet",
    "DaemonSet",
    "Job",
    "CronJob",
    "ReplicationController",
}
RUN = ("Pod", "ConfigMap", "Secret")
TIMESTAMP = "tag:yaml.org,2002:timestamp"


class Loader(yaml.SafeLoader):
    """Like kubectl's: a key that comes twice is an error, and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} comes twice, in line {line}"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != TIMESTAMP]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one Pod of a text, and the ConfigMaps and Secrets beside it, in documents or in a List;
    without the keys whose value is null: they say nothing. Raises InvalidSpec."""
    try:
        documents = [d for d in yaml.load_all(text, Loader) if d is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidSpec("", f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InvalidSpec("", "not YAML: nested too deeply") from None
    try:
        found = [_object(_without_nulls(d, "")) for d in _unlisted(documents)]
    except RecursionError:
        raise InvalidSpec("", "an alias holds itself") from None
    pods = [d for d in found if d["kind"] == "Pod"]
    if len(pods) != 1:
        raise InvalidSpec("", f"expected one Pod, found {len(pods)}")
    return pods[0], [d for d in found if d["kind"] != "Pod"]


def _unlisted(documents: list[Any]) -> list[Any]:
    """The items of each List in place of it."""
    found: list[Any] = []
    for document in documents:
        if isinstance(document, dict) and document.get("kind") == "List":
            items = document.get("items")
            found += items if isinstance(items, list) else []
        else:
            found.append(document)
    return found


def _object(document: Any) -> dict[str, Any]:
    """An object of a kind that can be run or used. Raises InvalidSpec."""
    if not isinstance(document, dict):
        raise InvalidSpec(
            "", f"expected one Pod, found {'a list' if isinstance(document, list) else 'no object'}"
        )
    kind = document.get("kind")
    if kind is None:
        raise InvalidSpec("kind", "is required")
    if kind in WITH_A_TEMPLATE:
        raise InvalidSpec(
            "kind",
            f"only Pod is run; {kind} makes pods: make a Pod of its template, with a name, or give it to a cluster",
        )
    if kind not in RUN:
        raise InvalidSpec(
            "kind",
            f"only Pod is run, with {', '.join(RUN[1:])} beside it; {kind!r} is for a cluster",
        )
    if document.get("apiVersion") != "v1":
        raise InvalidSpec("apiVersion", f"{document.get('apiVersion')!r} is not 'v1'")
    return document


def _without_nulls(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    if not isinstance(value, dict):
        return value
    for key in value:
        if not isinstance(key, str):
            raise InvalidSpec(f"{path}.{key}".lstrip("."), "the key is not a string")
        _check_text(key, path)
    return {
        key: _without_nulls(item, f"{path}.{key}".lstrip("."))
        for key, item in value.items()
        if item is not None
    }


def _check_text(text: str, path: str) -> None:
    """YAML can write half of a character that takes two in UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidSpec(path, f"{text!r} is not text") from None
