"""Parses a manifest in YAML or JSON to one Pod and its ConfigMaps and Secrets, as plain Python
values."""

from __future__ import annotations

from typing import Any

import yaml

from pyrunc.errors import InvalidSpec

WITH_A_TEMPLATE = "Deployment ReplicaSet StatefulSet DaemonSet Job CronJob ReplicationController"
RUN = ("Pod", "ConfigMap", "Secret")
TIMESTAMP = "tag:yaml.org,2002:timestamp"


class ManifestLoader(yaml.SafeLoader):
    """A YAML loader that behaves like kubectl's: a duplicate key is an error, and a date stays a
    string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in keys:
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r} in line {line}"
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 2026-11-22 as a date; kubectl's parser leaves a text, which labels may contain.
ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the only Pod in a manifest, and all its ConfigMaps and Secrets. Objects may be
    separate documents or items of a List. Removes keys whose value is null, since null means the
    same as a missing key. Raises InvalidSpec."""
    try:
        documents = [d for d in yaml.load_all(text, ManifestLoader) if d is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidSpec("", f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InvalidSpec("", "not YAML: nested too deeply") from None
    try:
        objects = [_object(_without_nulls(d, "")) for d in _unlisted(documents)]
    except RecursionError:
        raise InvalidSpec("", "an alias contains itself") from None
    pods = [d for d in objects if d["kind"] == "Pod"]
    if len(pods) != 1:
        raise InvalidSpec("", f"expected one Pod, found {len(pods)}")
    return pods[0], [d for d in objects if d["kind"] != "Pod"]


def _unlisted(documents: list[Any]) -> list[Any]:
    """Return the documents with each List replaced by its items."""
    result: list[Any] = []
    for document in documents:
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        items = document.get("items") if is_list else [document]
        result += items if isinstance(items, list) else []
    return result


def _object(document: Any) -> dict[str, Any]:
    """Return the document after checking that it is a Pod, a ConfigMap or a Secret. Raises
    InvalidSpec."""
    if not isinstance(document, dict):
        raise InvalidSpec(
            "", f"expected one Pod, found {'a list' if isinstance(document, list) else 'a scalar'}"
        )
    kind = document.get("kind")
    if kind is None:
        raise InvalidSpec("kind", "is required")
    if kind in WITH_A_TEMPLATE.split():
        raise InvalidSpec(
            "kind",
            f"run supports only Pod, not {kind}; make a Pod from its template and give it a name",
        )
    if kind not in RUN:
        raise InvalidSpec(
            "kind",
            f"run supports only {', '.join(RUN[:-1])} and {RUN[-1]}, not {kind!r}",
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
    """Check that a string can be encoded as UTF-8; YAML can express lone surrogates. Raises
    InvalidSpec."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidSpec(path, f"{text!r} has a character that UTF-8 cannot encode") from None
