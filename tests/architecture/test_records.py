"""Checks that messages, files and calls of the project use classes with named fields. Bare JSON
objects are for foreign formats, and for the listed modules that pass an object on unread."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.test_imports import MAY_IMPORT, ROOT, modules

OBJECT_TYPES = {"dict[str, Any]", "dict[str, object]", "Mapping[str, Any]", "Mapping[str, object]"}

# Reason -> its files, or folders with a slash at the end.
MAY_HOLD_OBJECTS = {
    # Formats of others.
    "OCI: config.json and its parts": """
        pyrunc/accelerate/command_rehearsal.py pyrunc/cgroups/convert.py
        pyrunc/cgroups/device_filter.py pyrunc/cgroups/group.py pyrunc/cgroups/limits.py
        pyrunc/cgroups/scope.py pyrunc/cgroups/scope_properties.py pyrunc/cli/execute.py
        pyrunc/cli/inspect.py pyrunc/cli/rootless.py pyrunc/cli/update.py
        pyrunc/compile/descriptors.py pyrunc/compile/exec.py pyrunc/compile/requests.py
        pyrunc/container/bundle.py pyrunc/container/delete.py pyrunc/container/state.py
        pyrunc/launch/rdt.py pyrunc/plan/model.py pyrunc/seccomp/ pyrunc/spec/check.py
        pyrunc/spec/default.py pyrunc/spec/model.py pyrunc/spec/parse.py
        cri_server/cli/streams/execute.py cri_server/containers/exec.py
        cri_server/containers/restore.py cri_server/containers/sessions.py
        cri_server/containers/update.py cri_server/nri/ cri_server/observability/lifecycle.py
        cri_server/spec/ cri_server/streaming/backend.py""",
    "OCI: the state for hooks, listeners and callers": """
        pyrunc/cli/container.py pyrunc/container/list.py pyrunc/container/status.py
        pyrunc/launch/hook_process.py pyrunc/launch/hooks.py pyrunc/launch/listener.py
        pyrunc/launch/steps.py""",
    "OCI: the features of a runtime": ("pyrunc/cli/features.py cri_server/node/oci_features.py"),
    "runc: the events of a container": "pyrunc/container/stats.py",
    "OCI and Docker: manifests, indexes and configurations of images": """
        cri_server/cli/images/clean.py cri_server/images/archives/build.py
        cri_server/images/store/catalog.py
        cri_server/images/archives/load.py cri_server/images/formats/manifest.py
        cri_server/images/service.py""",
    "JSON objects whose keys must be unique": "cri_server/typed.py",
    "Docker: config.json with logins": "cri_server/cli/images/credentials.py",
    "CNI: configurations, arguments of plugins, results": """
        cni_plugins/host_local/settings.py cni_plugins/ipam.py
        cni_plugins/protocol/ cni_plugins/skel.py
        cri_server/network/ cri_server/reload.py""",
    "Kubernetes: manifests": (
        "cri_server/cli/manifest/document.py "
        "cri_server/cli/manifest/config_maps.py "
        "cri_server/cli/manifest/read.py"
    ),
    "Kubernetes: the ports of a container, an annotation": "cri_server/cli/streams/forward.py",
    "Kubernetes: a Status": "cri_server/streaming/remotecommand.py",
    "Kubernetes: kubelet's configuration": "cri_server/doctor/kubelet.py",
    "crictl: the configuration of a pod or container": "cri_server/cli/pods/messages.py",
    "CRI-O and containerd: descriptions in a checkpoint": "cri_server/checkpoints/describe.py",
    "CRIU: options of its RPC": "cri_server/checkpoints/options.py",
    "crictl: the info of a verbose status": """
        cri_server/cli/observe/inspect.py cri_server/cli/observe/origins.py
        cri_server/cli/connection/client.py cri_server/status/container.py
        cri_server/status/sandbox.py""",
    "a printed document, whose fields templates name": (
        "cri_server/cli/output/formats.py cri_server/cli/output/template.py"
    ),
    "TOML before its tables are parsed": "cri_server/config/ cri_server/cli/server/doctor.py",
    "OpenTelemetry: attributes": "cri_server/observability/timeline/export.py",
    "keyword arguments of a library": (
        "pyrunc/cli/click_front.py cri_server/cli/server/serve.py "
        "cri_server/images/registry/client.py"
    ),
    "Python: the body of a class": "pyrunc/spec/value.py",
    "fields that an object passes to its record, and back": "cri_server/store/model.py",
    # Our containers of any content.
    "options of a command line by the names in its table": """
        pyrunc/accelerate/exec_cache.py pyrunc/cli/fd_passing.py pyrunc/cli/log.py
        pyrunc/cli/migrate.py pyrunc/cli/parse.py pyrunc/cli/process.py
        pyrunc/container/update.py""",
    "the framing: one object, whatever it is": """
        pyrunc/atomic_file.py pyrunc/ipc.py cri_server/zygote/peer.py pyrunc/records.py
        cri_server/pod/client.py pyrunc/shim/serve.py pyrunc/shim/worker.py
        cri_server/zygote/client.py pyrunc/zygote/loop.py""",
    "arguments before their record is read": """
        cni_plugins/jobs.py cri_server/checkpoints/dump.py cri_server/checkpoints/read.py
        cri_server/zygote/jobs.py cri_server/doctor/job.py cri_server/images/layers/decode.py
        cri_server/images/erofs/build.py cri_server/images/erofs/layer_tar.py
        cri_server/images/layers/layer_job.py cri_server/images/layers/unpack.py
        cri_server/security/selinux/relabel.py pyrunc/shim/main.py""",
    "arguments of any function": """
        pyrunc/zygote/child.py pyrunc/zygote/messages.py pyrunc/zygote/preload.py""",
    "OCI process objects; the fields of what a fork of a shim has made": """
        pyrunc/shim/messages.py pyrunc/shim/compile.py pyrunc/shim/other_runtime.py
        pyrunc/shim/pod.py""",
    "OCI's seccomp object, and what checkpoint.CriuOptions is told": "pyrunc/shim/files.py",
    "a login, which the errors of a record would show": "cri_server/rpc/image_admin.py",
    "fields of a log line, which differ by call": """
        cri_server/observability/logs/fields.py cri_server/rpc/verbs.py cri_server/rpc/admin.py
        cri_server/observability/timeline/choose.py cri_server/observability/timeline/ring.py
        cri_server/cli/observe/timeline.py cri_server/cli/observe/waterfall.py
        cri_server/cli/observe/past_events.py""",
    "the framing; a login; entries of the timeline": "cri_server/rpc/private.py",
}


def test_our_records_are_typed() -> None:
    with_objects = set(_files_with_objects())
    listed: dict[str, set[str]] = {}
    for where in MAY_HOLD_OBJECTS.values():
        for place in where.split():
            assert place not in listed, f"{place} has two reasons"
            listed[place] = {
                file
                for file in with_objects
                if file == place or (place.endswith("/") and file.startswith(place))
            }
    unlisted = with_objects.difference(*listed.values())
    assert not unlisted, f"replace these objects by records, or give a reason: {sorted(unlisted)}"
    needless = [place for place, files in listed.items() if not files]
    assert not needless, f"remove the needless exceptions: {needless}"


def _files_with_objects() -> Iterator[str]:
    """Yield the files that use one of the types `OBJECT_TYPES`, or an alias of one (`Message =
    dict[str, Any]`)."""
    trees = {
        module: (str(path.relative_to(ROOT)), list(ast.walk(ast.parse(path.read_text()))))
        for package in MAY_IMPORT
        for module, path in modules(package)
    }
    names = {f"{module}.{name}" for module, (_, nodes) in trees.items() for name in _named(nodes)}
    for file, nodes in trees.values():
        object_names = set(_named(nodes)) | {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in names
        }
        if any(_is_object(node, object_names) for node in nodes):
            yield file


def _named(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in OBJECT_TYPES:
            yield ast.unparse(node.targets[0])


def _is_object(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Subscript):
        return ast.unparse(node) in OBJECT_TYPES
    return (isinstance(node, ast.Name) and node.id in names) or (
        isinstance(node, ast.Attribute) and ast.unparse(node) == "ipc.Message"
    )
