"""From a file's text to one Pod as plain values: YAML or JSON, with a clear word about anything that is not one Pod."""

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


def parse(text: str) -> dict[str, Any]:
    """The one Pod of a text, without the keys whose value is null: they say nothing. Raises InvalidSpec."""
    try:
        documents = [d for d in yaml.load_all(text, Loader) if d is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidSpec("", f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InvalidSpec("", "not YAML: nested too deeply") from None
    if len(documents) != 1:
        raise InvalidSpec("", f"expected one Pod, found {len(documents)} documents")
    document = documents[0]
    if not isinstance(document, dict):
        raise InvalidSpec(
            "", f"expected one Pod, found {'a list' if isinstance(document, list) else 'no object'}"
        )
    _check_kind(document)
    try:
        found: dict[str, Any] = _without_nulls(document, "")
    except RecursionError:
        raise InvalidSpec("", "an alias holds itself") from None
    return found


def _check_kind(document: dict[str, Any]) -> None:
    kind, items = document.get("kind"), document.get("items")
    if kind is None:
        raise InvalidSpec("kind", "is required")
    if kind in WITH_A_TEMPLATE:
        raise InvalidSpec("kind", f"{kind} makes pods; one Pod is run, such as its template with a name")
    if isinstance(kind, str) and kind.endswith("List"):
        count = len(items) if isinstance(items, list) else 0
        raise InvalidSpec("kind", f"{kind} holds {count} objects; one Pod is run")
    if kind != "Pod":
        raise InvalidSpec("kind", f"{kind!r} cannot be run; one Pod is")
    if document.get("apiVersion") != "v1":
        raise InvalidSpec("apiVersion", f"{document.get('apiVersion')!r} is not 'v1'")


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
