"""Replaces references to ConfigMaps and Secrets in a Pod's `env`, `envFrom` and volumes by the
values, as kubelet does. Also removes probes, with a message for each probe.

kubelet does not expand `$(NAME)` in values from ConfigMaps and Secrets. So this module writes each
`$` in these values as `$$`, which the later expansion turns into `$` again.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from cri_server.cli.manifest.check import VARIABLE
from cri_server.cli.manifest.pod_model import quantity
from pyrunc.errors import InvalidSpec

# the key with which a volume passes its files to `pod_model.Volume`; no field of Kubernetes begins
# with @
FILES = "@files"
# fields for variables only, because `run` writes volumes before the sandbox has addresses
STATUS = ("status.podIP", "status.podIPs")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
SIZE_LIMIT_BYTES = 1 << 20  # Kubernetes' limit for a ConfigMap or a Secret
Strict = TypeVar("Strict", bound=msgspec.Struct)


class _Object(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The base of the JSON objects in a Pod that refer to ConfigMaps, Secrets and fields of the
    pod. Rejects unknown keys."""


class SourceRef(_Object):
    name: str
    optional: bool = False


class KeyRef(SourceRef, kw_only=True):
    key: str


class FieldRef(_Object):
    field_path: str
    api_version: str = "v1"


class ConfigMapItem(_Object):
    key: str
    path: str
    mode: int | None = None


class ResourceRef(_Object):
    resource: str
    container_name: str = ""
    divisor: str | int = "1"


class MapVolume(_Object):
    name: str
    items: list[ConfigMapItem] | None = None
    default_mode: int = 0o644
    optional: bool = False


class SecretVolume(MapVolume):
    """The source `secret` of a volume. Its key `secretName` has the Secret's name; in a projected
    volume that key is `name`, as in `configMap`."""

    name: str = msgspec.field(name="secretName")


class DownwardItem(_Object):
    path: str
    field_ref: FieldRef | None = None
    resource_field_ref: ResourceRef | None = None
    mode: int | None = None


class DownwardVolume(_Object):
    items: list[DownwardItem] = []
    default_mode: int = 0o644


class ProjectedVolume(_Object):
    sources: list[dict[str, Any]] = []
    default_mode: int = 0o644


class Objects:
    """The ConfigMaps and Secrets of a manifest, found by kind and name."""

    def __init__(self, documents: list[dict[str, Any]], namespace: str) -> None:
        """Read ConfigMaps and Secrets, which must be in `namespace`. Raises InvalidSpec."""
        self._contents: dict[tuple[str, str], dict[str, bytes]] = {}
        for document in documents:
            kind, metadata = document["kind"], document.get("metadata") or {}
            name = metadata.get("name") if isinstance(metadata, dict) else None
            if not isinstance(name, str) or not name:
                raise InvalidSpec(f"{kind} metadata.name", "is required")
            own = metadata.get("namespace", namespace)
            if own != namespace:
                raise InvalidSpec(
                    f"{kind} {name} metadata.namespace",
                    f"{own!r} is not the namespace of the Pod, {namespace!r}",
                )
            if (kind, name) in self._contents:
                raise InvalidSpec(f"{kind} {name}", "occurs twice")
            self._contents[kind, name] = _content(document, f"{kind} {name}")

    def get(self, kind: str, name: str, path: str, *, optional: bool) -> dict[str, bytes] | None:
        """Return the content of a ConfigMap or Secret: {key: value}. If the object is missing,
        returns None with `optional`, else raises InvalidSpec; `path` is the field in the
        manifest."""
        content = self._contents.get((kind, name))
        if content is None and not optional:
            names = ", ".join(sorted(n for k, n in self._contents if k == kind)) or "none"
            raise InvalidSpec(path, f"no {kind} {name!r} in the manifest; its {kind}s are: {names}")
        return content


def _content(document: Mapping[str, Any], what: str) -> dict[str, bytes]:
    is_secret = document["kind"] == "Secret"
    plain, coded = ("stringData", "data") if is_secret else ("data", "binaryData")
    fields = {"apiVersion", "kind", "metadata", "immutable", plain, coded}
    fields |= {"type"} if is_secret else set()
    for key in document:
        if key not in fields:
            raise InvalidSpec(f"{what} {key}", "no such field")
    content: dict[str, bytes] = {}
    # The second one wins: stringData overrides data with the same key (Secret API).
    for group in (coded, plain):
        values = document.get(group) or {}
        if not isinstance(values, dict):
            raise InvalidSpec(f"{what} {group}", "expected an object")
        for key, value in values.items():
            if not isinstance(value, str):
                raise InvalidSpec(
                    f"{what} {group}.{key}", f"expected `str`, got `{type(value).__name__}`"
                )
            try:
                content[key] = (
                    value.encode()
                    if group == plain
                    # YAML wraps long texts, and Go's decoder skips line breaks.
                    else base64.b64decode("".join(value.split()), validate=True)
                )
            except ValueError:
                raise InvalidSpec(f"{what} {group}.{key}", "is not base64") from None
    if sum(map(len, content.values())) > SIZE_LIMIT_BYTES:
        raise InvalidSpec(what, f"has more than {SIZE_LIMIT_BYTES} bytes")
    return content


class UnsupportedField(InvalidSpec):
    """A field or value that Kubernetes supports and `run` does not support."""


def resolve(pod: dict[str, Any], objects: Objects, *, lenient: bool = False) -> list[str]:
    """Replace the Pod's references to ConfigMaps and Secrets by their content. Returns a message
    for each field that is left out.

    With `lenient`, unsupported fields are left out; without it they raise UnsupportedField. Raises
    InvalidSpec."""
    messages: list[str] = []
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return messages
    for i, volume in enumerate(_dicts(spec.get("volumes"))):
        try:
            _volume(volume, pod, objects, f"spec.volumes[{i}]")
        except UnsupportedField as error:
            if not lenient:
                raise
            messages.append(str(error))
            volume["emptyDir"] = {}
    for group in ("initContainers", "containers"):
        for i, container in enumerate(_dicts(spec.get(group))):
            path = f"spec.{group}[{i}]"
            messages += _environment(container, pod, objects, path, lenient=lenient)
            messages += _probes(container, path)
    return messages


def _dicts(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in a list. Skips values of other types, which `read` reports
    later."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _typed(value: Any, kind: type[Strict], path: str) -> Strict:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "no such field")
        raise InvalidSpec(path, text[:1].lower() + text[1:]) from None


def _literal(content: bytes, path: str) -> str:
    try:
        # kubelet expands $(NAME) in `value` only, never in values from other objects.
        return content.decode().replace("$", "$$")
    except UnicodeDecodeError:
        raise InvalidSpec(path, "the content is not UTF-8 text") from None


# -- environments


def _environment(
    container: dict[str, Any], pod: dict[str, Any], objects: Objects, path: str, *, lenient: bool
) -> Iterator[str]:
    """Replace `envFrom` and `valueFrom` of a container by plain variables. Yields a message for
    each variable that is left out. Raises InvalidSpec."""
    variables: list[Any] = []
    for i, source in enumerate(_dicts(container.pop("envFrom", None))):
        where = f"{path}.envFrom[{i}]"
        prefix = source.pop("prefix", "")
        kind, key = _one_of(source, {"configMapRef": "ConfigMap", "secretRef": "Secret"}, where)
        reference = _typed(source[key], SourceRef, f"{where}.{key}")
        content = objects.get(kind, reference.name, f"{where}.{key}", optional=reference.optional)
        for key_of_object, value in (content or {}).items():
            name = f"{prefix}{key_of_object}"
            if VARIABLE.fullmatch(name):
                text = _literal(value, f"{where}.{key}: {key_of_object}")
                variables.append({"name": name, "value": text})
            else:
                yield f"{where}: {name!r} is not a variable's name"
    entries = container.get("env") or []
    if not isinstance(entries, list):
        return  # `read` reports the type
    for i, entry in enumerate(entries):
        if isinstance(entry, dict) and "valueFrom" in entry:
            try:
                text_from = _value_from(entry, container, pod, objects, f"{path}.env[{i}]")
            except UnsupportedField as error:
                if not lenient:
                    raise
                yield str(error)
                continue
            if text_from is None:
                continue
            entry["value"] = text_from
        variables.append(entry)
    if variables or "env" in container:
        container["env"] = variables


def _one_of(source: Mapping[str, Any], kinds: Mapping[str, str], path: str) -> tuple[str, str]:
    """Return (kinds[key], key) for the only key of `source`. `kinds` has the supported keys: any
    other key raises UnsupportedField. Raises InvalidSpec if `source` has no key or several."""
    unknown = [key for key in source if key not in kinds]
    if unknown:
        raise UnsupportedField(
            f"{path}.{unknown[0]}", f"is not supported; supported are {', '.join(kinds)}"
        )
    if len(source) != 1:
        raise InvalidSpec(path, f"needs one of {', '.join(kinds)}")
    (key,) = source
    return kinds[key], key


def _value_from(
    entry: dict[str, Any],
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    objects: Objects,
    path: str,
) -> str | None:
    """Return the value that `valueFrom` of the variable `entry` refers to; None if an optional
    object or key is missing. Raises InvalidSpec.

    The pod's addresses are not known yet. For them, return an empty value and store the field's
    name under the key `@status` of `entry`; `translate.container` then sets the value."""
    source = entry.pop("valueFrom")
    if not isinstance(source, dict):
        raise InvalidSpec(f"{path}.valueFrom", "expected an object")
    if entry.get("value"):
        raise InvalidSpec(path, "has both value and valueFrom")
    kinds = {
        "configMapKeyRef": "ConfigMap",
        "secretKeyRef": "Secret",
        "fieldRef": "",
        "resourceFieldRef": "",
    }
    kind, key = _one_of(source, kinds, f"{path}.valueFrom")
    where = f"{path}.valueFrom.{key}"
    if key == "fieldRef":
        field = _typed(source[key], FieldRef, where).field_path
        if field in STATUS and not (pod.get("spec") or {}).get("hostNetwork"):
            entry["@status"] = field.removeprefix("status.")
            return ""
        return _field(field, pod, where).replace("$", "$$")
    if key == "resourceFieldRef":
        return _resource(_typed(source[key], ResourceRef, where), container, pod, where)
    reference = _typed(source[key], KeyRef, where)
    content = objects.get(kind, reference.name, where, optional=reference.optional)
    if content is not None and reference.key in content:
        return _literal(content[reference.key], where)
    if not reference.optional:
        raise InvalidSpec(where, f"{kind} {reference.name!r} has no key {reference.key!r}")
    return None


def _field(field: str, pod: Mapping[str, Any], path: str) -> str:
    """Return the value of a downward API field, such as `metadata.name`. Raises UnsupportedField
    for an unsupported field, or one that is known only after the pod has started."""
    metadata = pod.get("metadata") or {}
    plain: dict[str, Callable[[], Any]] = {
        "metadata.name": lambda: metadata.get("name", ""),
        "metadata.namespace": lambda: metadata.get("namespace", "default"),
        "metadata.uid": lambda: metadata.get("uid", ""),
        "metadata.labels": lambda: _pairs(metadata.get("labels") or {}),
        "metadata.annotations": lambda: _pairs(metadata.get("annotations") or {}),
        "spec.nodeName": lambda: (pod.get("spec") or {}).get("nodeName") or os.uname().nodename,
        "spec.serviceAccountName": lambda: (pod.get("spec") or {}).get(
            "serviceAccountName", "default"
        ),
    }
    if field in plain:
        return str(plain[field]())
    for group in ("labels", "annotations"):
        if field.startswith(f"metadata.{group}['") and field.endswith("']"):
            return str((metadata.get(group) or {}).get(field[len(group) + 11 : -2], ""))
    names = ", ".join([*plain, "metadata.labels['KEY']", "metadata.annotations['KEY']", *STATUS])
    raise UnsupportedField(
        f"{path}.fieldPath", f"{field!r} is not supported; supported are {names}"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    """Format labels or annotations as kubelet does: sorted lines KEY="VALUE"."""
    return "\n".join(
        f"{key}={json.dumps(str(values[key]), ensure_ascii=False)}" for key in sorted(values)
    )


def _resource(
    reference: ResourceRef, container: Mapping[str, Any] | None, pod: Mapping[str, Any], path: str
) -> str:
    """Return a container's resource such as `limits.cpu`, divided by the divisor and rounded up. A
    missing limit counts as the node's capacity, as in kubelet. Raises InvalidSpec."""
    if reference.container_name:
        spec = pod.get("spec") or {}
        containers = _dicts(spec.get("initContainers")) + _dicts(spec.get("containers"))
        named = (c for c in containers if c.get("name") == reference.container_name)
        container = next(named, None)
    if container is None:
        raise InvalidSpec(f"{path}.containerName", "no such container")
    group, _, name = reference.resource.partition(".")
    if group not in ("limits", "requests") or name not in ("cpu", "memory"):
        names = "limits.cpu, limits.memory, requests.cpu, requests.memory"
        raise UnsupportedField(
            f"{path}.resource", f"{reference.resource!r} is not supported; supported are {names}"
        )
    resources = container.get("resources") or {}
    value = (resources.get(group) or {}).get(name)
    if value is None and group == "requests":
        value = (resources.get("limits") or {}).get(name, 0)
    if value is None:
        value = (
            os.cpu_count()
            if name == "cpu"
            else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )
    divisor = quantity(reference.divisor, f"{path}.divisor") or Decimal(1)
    return str(math.ceil(quantity(value or 0, f"{path}.resource") / divisor))


# -- volumes


def _volume(volume: dict[str, Any], pod: Mapping[str, Any], objects: Objects, path: str) -> None:
    if FILES in volume:
        raise InvalidSpec(f"{path}.{FILES}", "no such field")
    for key in ("configMap", "secret", "downwardAPI", "projected"):
        if key in volume:
            source = volume.pop(key)
            volume[FILES] = _files(key, source, pod, objects, f"{path}.{key}")
            return


def _files(
    key: str, source: Any, pod: Mapping[str, Any], objects: Objects, path: str
) -> list[dict[str, Any]]:
    """Return the files of a volume, as JSON objects of `pod_model.VolumeFile`. `source` is the
    value of the volume's `key`: configMap, secret, downwardAPI or projected. Raises InvalidSpec."""
    if key == "configMap":
        return _files_of_object("ConfigMap", _typed(source, MapVolume, path), objects, path)
    if key == "secret":
        return _files_of_object("Secret", _typed(source, SecretVolume, path), objects, path)
    if key == "downwardAPI":
        return _downward_files(_typed(source, DownwardVolume, path), pod, path)
    files: list[dict[str, Any]] = []
    projected = _typed(source, ProjectedVolume, path)
    kinds = {"configMap": "ConfigMap", "secret": "Secret", "downwardAPI": ""}
    for i, each in enumerate(projected.sources):
        kind, key = _one_of(each, kinds, f"{path}.sources[{i}]")
        place = f"{path}.sources[{i}].{key}"
        own = each[key]
        if isinstance(own, dict):
            own = {"defaultMode": projected.default_mode, **own}
        if kind:
            files += _files_of_object(kind, _typed(own, MapVolume, place), objects, place)
        else:
            files += _downward_files(_typed(own, DownwardVolume, place), pod, place)
    return files


def _files_of_object(
    kind: str, volume: MapVolume, objects: Objects, path: str
) -> list[dict[str, Any]]:
    """Return the files of a volume that contains a ConfigMap or a Secret: one for each of the
    volume's `items`. If there are no `items`, one for each key."""
    contents = objects.get(kind, volume.name, path, optional=volume.optional) or {}
    items = (
        volume.items if volume.items is not None else [ConfigMapItem(key, key) for key in contents]
    )
    files = []
    for i, item in enumerate(items):
        place = f"{path}.items[{i}]"
        _check_place(item.path, place)
        if item.key in contents:
            files.append(_file(item, contents[item.key], volume.default_mode))
        elif not volume.optional:
            raise InvalidSpec(f"{place}.key", f"{kind} {volume.name!r} has no key {item.key!r}")
    return files


def _downward_files(
    volume: DownwardVolume, pod: Mapping[str, Any], path: str
) -> list[dict[str, Any]]:
    """Return the files of a downwardAPI volume, one for each field of the pod."""
    files = []
    for i, item in enumerate(volume.items):
        place = f"{path}.items[{i}]"
        _check_place(item.path, place)
        files.append(_file(item, _downward(item, pod, place), volume.default_mode))
    return files


def _file(item: ConfigMapItem | DownwardItem, content: bytes, default_mode: int) -> dict[str, Any]:
    mode = default_mode if item.mode is None else item.mode
    return {"path": item.path, "content": base64.b64encode(content).decode(), "mode": mode}


def _downward(item: DownwardItem, pod: Mapping[str, Any], path: str) -> bytes:
    if (item.field_ref is None) == (item.resource_field_ref is None):
        raise InvalidSpec(path, "needs exactly one of fieldRef and resourceFieldRef")
    if item.field_ref is not None:
        return _field(item.field_ref.field_path, pod, f"{path}.fieldRef").encode()
    assert item.resource_field_ref is not None
    return _resource(item.resource_field_ref, None, pod, f"{path}.resourceFieldRef").encode()


def _check_place(place: str, path: str) -> None:
    if place.startswith("/") or not place or ".." in place.split("/"):
        raise InvalidSpec(f"{path}.path", f"{place!r} is not a path in the volume")


# -- probes


def _probes(container: dict[str, Any], path: str) -> list[str]:
    """Remove the container's probes and return a message for each. `run` executes no probes,
    because it restarts no containers and has no services."""
    return [
        f"{path}.{name}: {_probe(container.pop(name))}: run does not probe"
        for name in PROBES
        if name in container
    ]


def _probe(probe: Any) -> str:
    if not isinstance(probe, dict):
        return "a probe"
    every = f" every {probe.get('periodSeconds', 10)} s"
    for kind in ("httpGet", "tcpSocket", "grpc"):
        if isinstance(probe.get(kind), dict):
            return f"{kind} :{probe[kind].get('port', '?')}{probe[kind].get('path', '')}{every}"
    if isinstance(probe.get("exec"), dict):
        return f"exec {' '.join(map(str, probe['exec'].get('command') or []))}{every}"
    return f"a probe{every}"
