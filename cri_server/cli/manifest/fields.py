"""Lists the fields of a Pod that Kubernetes 1.36 has and `run` does not support, and detects
unknown fields.

The tables contain the harmless values of each field, such as Kubernetes' default. Any other value
is an error, because the pod would differ from its manifest. Source: k8s.io/api/core/v1 and its
defaults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from cri_server.cli.manifest import pod_model

# All values are accepted: the API server sets the field, or `run` lacks what the field controls.
ANY = None
NONE: tuple[Any, ...] = ()
EMPTY: tuple[Any, ...] = ("", [], {})
APPARMOR = ({"type": "RuntimeDefault"},)

Harmless = tuple[Any, ...] | None

_SET_BY_API_SERVER = """
    creationTimestamp deletionTimestamp deletionGracePeriodSeconds generation managedFields
    resourceVersion selfLink
"""
_METADATA: dict[str, Harmless] = {
    **dict.fromkeys(_SET_BY_API_SERVER.split(), ANY),
    **dict.fromkeys(("generateName", "finalizers", "ownerReferences"), EMPTY),
}

# Fields for the scheduler, the API server or a controller, all of which `run` replaces. No token is
# mounted, with or without a service account.
_FOR_CONTROLLERS = """
    affinity automountServiceAccountToken enableServiceLinks nodeName nodeSelector overhead
    preemptionPolicy priority priorityClassName readinessGates schedulerName schedulingGates
    schedulingGroup serviceAccount serviceAccountName tolerations topologySpreadConstraints
"""
_SPEC: dict[str, Harmless] = {
    **dict.fromkeys(_FOR_CONTROLLERS.split(), ANY),
    "activeDeadlineSeconds": NONE,
    "hostUsers": (True,),
    "os": ({"name": "linux"}, {}),
    "restartPolicy": ("Always", "Never"),
    "setHostnameAsFQDN": (False,),
    **dict.fromkeys(("ephemeralContainers", "hostnameOverride", "imagePullSecrets"), EMPTY),
    **dict.fromkeys(("resourceClaims", "resources", "runtimeClassName", "subdomain"), EMPTY),
}

_CONTAINER: dict[str, Harmless] = {
    "terminationMessagePath": ("/dev/termination-log", ""),
    "terminationMessagePolicy": ("File", ""),
    # removed by `config_maps`
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), NONE),
    **dict.fromkeys(
        ("envFrom", "lifecycle", "resizePolicy", "restartPolicyRules", "volumeDevices"), EMPTY
    ),
}

_VOLUME_SOURCES = """
    awsElasticBlockStore azureDisk azureFile cephfs cinder configMap csi downwardAPI ephemeral fc
    flexVolume flocker gcePersistentDisk gitRepo glusterfs image iscsi nfs persistentVolumeClaim
    photonPersistentDisk portworxVolume projected quobyte rbd scaleIO secret storageos vsphereVolume
"""

_POD_SECURITY: dict[str, Harmless] = {
    "appArmorProfile": APPARMOR,
    "fsGroupChangePolicy": ("Always", "OnRootMismatch"),
    "seLinuxChangePolicy": ("MountOption", "Recursive"),
    "supplementalGroupsPolicy": ("Merge",),
    **dict.fromkeys(("seLinuxOptions", "windowsOptions"), EMPTY),
}

_SECURITY: dict[str, Harmless] = {
    "appArmorProfile": APPARMOR,
    "procMount": ("Default",),
    **dict.fromkeys(("seLinuxOptions", "windowsOptions"), EMPTY),
}

NOT_DONE: dict[type, dict[str, Harmless]] = {
    pod_model.PodManifest: {"status": ANY},
    pod_model.Metadata: _METADATA,
    pod_model.PodSpec: _SPEC,
    pod_model.ContainerManifest: _CONTAINER,
    pod_model.Env: {"valueFrom": NONE},
    pod_model.Volume: dict.fromkeys(_VOLUME_SOURCES.split(), NONE),
    pod_model.EmptyDir: {"medium": ("",), "sizeLimit": NONE},
    pod_model.Resources: {"claims": EMPTY},
    pod_model.PodSecurity: _POD_SECURITY,
    pod_model.ContainerSecurity: _SECURITY,
}

# resources of a container besides cpu and memory; names with a slash belong to device plugins
RESOURCE = re.compile(r"ephemeral-storage|hugepages-.+|.+/.+")


def problems(value: Any, kind: Any = pod_model.PodManifest, path: str = "") -> Iterator[str]:
    """Yield `PATH: problem` for each field of `value` that `run` would ignore, because it is
    unknown or not supported. `kind`: the type of `value` in `pod_model`; `path`: the path of
    `value` in the manifest."""
    kind = _plain(kind)
    if get_origin(kind) is list and isinstance(value, list):
        (item,) = get_args(kind)
        for index, each in enumerate(value):
            yield from problems(each, item, f"{path}[{index}]")
    if not (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict)
    ):
        return
    hints, not_done = get_type_hints(kind), NOT_DONE.get(kind, {})
    done = {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}
    for key, item in value.items():
        place = f"{path}.{key}".lstrip(".")
        if key in done:
            yield from problems(item, done[key], place)
        elif key in not_done:
            if not _harmless(item, not_done[key]):
                yield f"{place}: is not supported"
        elif kind is pod_model.Quantities and RESOURCE.fullmatch(key):
            yield f"{place}: is not supported"
        else:
            yield f"{place}: no such field{_suggestion(key, {**done, **not_done})}"


def _harmless(value: Any, values: Harmless) -> bool:
    return values is ANY or any(type(value) is type(each) and value == each for each in values)


def _suggestion(key: str, names: Iterable[str]) -> str:
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(key.lower(), lower, 1)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""


def _plain(kind: Any) -> Any:
    """Return the type X for an annotation `X | None`; any other annotation is returned
    unchanged."""
    options = [each for each in get_args(kind) if each is not type(None)]
    return options[0] if get_origin(kind) not in (list, dict, None) and len(options) == 1 else kind
