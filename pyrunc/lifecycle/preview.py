"""The plan of a bundle without running it: what `pyrunc plan` prints. Looks at files, makes and opens nothing that stays."""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc.errors import InvalidSpec
from pyrunc.kernel.path import open_root
from pyrunc.lifecycle import facts, findings
from pyrunc.plan import build as plans
from pyrunc.plan.model import LoadFilter
from pyrunc.plan.mounts import is_bind
from pyrunc.spec.check import check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import Plan
    from pyrunc.spec.model import Spec


def preview(spec: Spec, bundle: str, *, await_start: bool = True) -> Plan:
    """The plan that `create` would carry out for the bundle. Raises InvalidSpec, KernelError."""
    check(spec)
    assert spec.root is not None  # check
    path = os.path.join(bundle, spec.root.path)
    if not os.path.isdir(path):
        raise InvalidSpec("root.path", f"{path} is not a directory")
    root = open_root(path)
    try:
        found = findings.look(spec, {"root": root}, (0, 1, 2))
    finally:
        os.close(root)
    directories = {
        i: _is_directory(os.path.join(bundle, mount.source), f"mounts[{i}].source")
        for i, mount in enumerate(spec.mounts)
        if is_bind(mount)
    }
    return plans.build(
        spec,
        facts.host(),
        found.replace(directories=directories),
        load_filter=_load_filter(spec),
        await_start=await_start,
        keyring="_ses.ID",
    )


def _is_directory(source: str, path: str) -> bool:
    try:
        return S_ISDIR(os.stat(source).st_mode)
    except OSError as error:
        raise InvalidSpec(path, f"{source}: {os.strerror(error.errno or 0).lower()}") from None


def _load_filter(spec: Spec) -> LoadFilter | None:
    if not spec.linux.seccomp:
        return None
    from pyrunc.seccomp.compiler import compile as compile_filter

    made = compile_filter(spec.linux.seccomp)
    return None if made is None else LoadFilter(made.program, made.flags, made.notifies)
