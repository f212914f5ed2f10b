"""Checks that packages import each other in one direction only, and that the parts that must start
fast or stay small load only the modules listed here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.app import JOB_MODULES
from tests.support.sources import python_files

ROOT = Path(__file__).parents[2]

# What a file may import of ours, by the first matching prefix of its module name.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "pyrunc": ("pyrunc",),
    "cni_plugins": (
        "cni_plugins",
        "pyrunc.errors",
        "pyrunc.kernel",
        "pyrunc.ipc",
        "pyrunc.records",
    ),
    "cri_server": ("cri_server", "pyrunc", "cni_plugins.protocol"),
}
FOREIGN_OF_PYRUNC = {"jeepney", "click", "_pyrunc"}  # the last: cli/front.c brings it
ONLY_IN_KERNEL = {"ctypes"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in python_files(ROOT / package):
        if "api" in path.parts or "__pycache__" in path.parts:
            continue
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def begins(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


# The folders of a package ("rooms"), lowest first: a room imports from rooms before it, never from
# its neighbours on the same line. Imports for the type checker only do not count.
PYRUNC_ROOMS = (
    ("errors", "debug", "undo", "timings", "varint"),
    ("abi", "jsontext"),
    ("atomic_file",),
    ("kernel",),
    ("ipc",),
    ("spec",),
    ("records",),
    ("seccomp", "cgroups", "program", "zygote", "keeper"),
    ("plan",),
    ("launch",),
    ("compile",),
    ("container",),
    ("checkpoint",),
    ("shim",),
    ("cli",),
    ("accelerate",),
)
# "room.file" gives a file or an inner folder its own place: the longest name counts.
CRI_SERVER_ROOMS = (
    ("operations.tasks",),
    (
        "explain",
        "observability.debug",
        "observability.lifecycle",
        "observability.logs",
        "observability.meters",
        "observability.timeline",
        "operations.locks",
        "systemd.notify",
        "typed",
    ),
    ("zygote",),
    ("systemd",),
    ("images", "operations", "security.selinux", "store.encoded", "streaming", "http2"),
    ("observability.events",),
    ("store",),
    ("config", "network", "checkpoints"),
    ("node",),
    ("spec", "security", "doctor"),
    ("pod",),
    ("node.check", "node.oci_features"),
    ("services",),
    ("status", "recovery"),
    ("containers",),
    ("observability.stats", "sandboxes"),
    ("observability", "store.garbage"),
    ("rpc",),
    ("observability.telemetry", "nri"),
    ("reload",),
    ("app", "install"),
    ("cli",),
)

# The folders and files of `cri_server.cli` and `cri_server.images`, lowest first, imports for types
# included.
CLI_ROOMS = (
    ("connection", "output"),
    ("arguments",),
    ("manifest",),
    ("containers",),
    ("streams",),
    ("observe",),
    ("images",),
    ("main",),
    ("server", "help"),
    ("pods",),
)
IMAGES_ROOMS = (
    ("model", "reserve", "waiting"),
    ("formats",),
    ("layers",),
    ("erofs",),
    ("store",),
    ("registry",),
    ("archives", "signatures"),
    ("pull", "push"),
    ("service",),
)


def test_the_runtime_has_no_event_loop_but_the_shims() -> None:
    # Clients with asyncio belong to the server, not to the OCI runtime and its supervisors.
    importers = [
        path
        for _, path in modules("pyrunc")
        for name, _ in imports(path)
        if begins(name, ("asyncio",))
    ]
    assert not importers


def runtime_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Return (name, line) of each import that is executed, also of those in functions."""

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for other in child.orelse:
                    yield from walk(other)
            elif isinstance(child, ast.Try) and [
                ast.unparse(h.type) for h in child.handlers if h.type
            ] == ["ImportError"]:
                continue  # it may be missing (`accelerate`)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from ((f"{child.module}.{alias.name}", child.lineno) for alias in child.names)
            else:
                yield from walk(child)

    return walk(ast.parse(path.read_text()))


def room_of(module: str, rank: dict[str, int]) -> str:
    """Return the name by which `rank` lists the module `package.room.file`: "room.file", or else
    "room"."""
    _, room, file, *_ = [*module.split("."), "", ""]
    return f"{room}.{file}" if f"{room}.{file}" in rank else room


@pytest.mark.parametrize(
    ("package", "rooms"),
    [("pyrunc", PYRUNC_ROOMS), ("cri_server", CRI_SERVER_ROOMS)],
    ids=["pyrunc", "cri_server"],
)
def test_folders_of_a_package_import_only_lower_folders(
    package: str, rooms: tuple[tuple[str, ...], ...]
) -> None:
    rank = {room: number for number, level in enumerate(rooms) for room in level}
    wrong, seen = [], set()
    for module, path in modules(package):
        if module == package:
            continue
        room = room_of(module, rank)
        seen.add(room)
        for name, line in runtime_imports(path):
            other = room_of(name, rank) if name.startswith(f"{package}.") else room
            if other in rank and other != room and rank[other] >= rank[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert seen == set(rank)


@pytest.mark.parametrize(
    "package, rooms",
    [("cri_server.cli", CLI_ROOMS), ("cri_server.images", IMAGES_ROOMS)],
    ids=["cli", "images"],
)
def test_folders_import_only_lower_folders(
    package: str, rooms: tuple[tuple[str, ...], ...]
) -> None:
    rank = {room: number for number, level in enumerate(rooms) for room in level}
    wrong = []
    for module, path in modules("cri_server"):
        if not module.startswith(f"{package}."):
            continue
        room = module.split(".")[2]
        for name, line in imports(path):
            other = name.split(".")[2] if name.startswith(f"{package}.") else room
            if other != room and rank[other] >= rank[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_follow_the_order_of_packages(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for _, path in modules(package)
        for name, line in imports(path)
        if begins(name, tuple(MAY_IMPORT)) and not begins(name, MAY_IMPORT[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_pyrunc_needs_the_standard_library_and_its_named_dependencies() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for _, path in modules("pyrunc")
        for name, line in imports(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top not in FOREIGN_OF_PYRUNC | {"pyrunc"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_only_the_kernel_folder_talks_to_libc(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, path in modules(package)
        if not module.startswith("pyrunc.kernel")
        for name, line in imports(path)
        if name.split(".")[0] in ONLY_IN_KERNEL
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(module: str) -> set[str]:
    """Return the names of all modules that importing `module` loads in a new isolated
    interpreter."""
    script = (
        "import sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1]); "
        "sys.path.extend(sys.argv[3:]);"
        "__import__(sys.argv[2]); print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    site = [p for p in sys.path if p.endswith("site-packages")]
    listing = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(ROOT), module, *site],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listing.stdout.split())


FORBIDDEN = {
    # The fast verbs, the shim and the zygote never pay for these; the number is what importing each
    # costs at least.
    "asyncio", "click", "grpc", "google", "pyroute2", "subprocess", "threading", "logging",
    "dataclasses", "inspect",
    "typing", "re", "msgspec", "urllib", "http", "ssl", "email", "argparse", "tempfile", "shutil",
    "pathlib", "concurrent",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("pyrunc.cli.fast", {"ctypes"}),
        ("pyrunc.shim.main", {"ctypes"}),
        ("pyrunc.zygote.__main__", set()),
    ],
)
def test_modules_that_must_be_small_import_only_permitted_modules(
    module: str, allowed: set[str]
) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    assert path.exists(), f"{module} is pinned here, but does not exist"
    tops = {name.split(".")[0] for name in loaded_by(module)}
    assert not (tops & FORBIDDEN) - allowed


def test_a_shim_imports_at_its_start_what_the_end_of_a_container_needs() -> None:
    # An upgrade replaces the files of the package while the shim runs: a later import would load
    # another version of a module, or fail and skip the poststop hooks.
    needed = {"container.status", "launch.hooks", "launch.rdt", "shim.other_runtime"}
    assert {f"pyrunc.{name}" for name in needed} <= loaded_by("pyrunc.shim.main")


def test_the_server_does_without_grpcs_library() -> None:
    # grpcio takes 12 MB and seven threads, and four times as long per call as the server's own
    # transport.
    tops = {name.split(".")[0] for name in loaded_by("cri_server.app")}
    assert not tops & {"grpc", "hpack", "h2", "click"} and "google" in tops


def test_the_zygote_of_jobs_does_without_msgspec() -> None:
    for module in JOB_MODULES:
        # With its own imports, msgspec takes 1.3 MiB.
        assert "msgspec" not in loaded_by(module), module


def test_built_in_plugins_import_no_subprocess() -> None:
    # `subprocess` takes 1 MiB in a network worker, and only foreign IPAM plugins need it.
    importers = {
        module
        for module, path in modules("cni_plugins")
        for name, _ in imports(path)
        if begins(name, ("subprocess",))
    }
    assert importers == {"cni_plugins.ipam"}


def test_the_server_loads_no_planner() -> None:
    modules = loaded_by("cri_server.app")
    # Only shims compile launches; these modules take 1 MiB.
    rooms = ("pyrunc.program", "pyrunc.plan.build", "pyrunc.plan.lower", "pyrunc.compile.sources")
    assert not [name for name in modules if begins(name, rooms)]
    assert "pyrunc.compile.requests" in modules


def test_the_server_loads_no_module_of_nri_while_nri_is_disabled() -> None:
    modules = loaded_by("cri_server.app")
    assert not [
        name for name in modules if name.startswith("cri_server.nri") or name.endswith("nri_pb2")
    ]


def test_a_verb_that_lists_pays_for_click_and_protobuf_only() -> None:
    modules = {
        name.split(".")[0]
        for name in loaded_by("cri_server.cli.main") | loaded_by("cri_server.cli.observe.listing")
    }
    # Most of the time of `ps` goes to click and protobuf. The verb, option or error that needs one
    # of these modules imports it.
    unwanted = {
        "grpc",
        "asyncio",
        "subprocess",
        "logging",
        "urllib",
        "ssl",
        "ipaddress",
        "pathlib",
        "tempfile",
        "shutil",
        "yaml",
        "msgspec",
    }
    assert {"click", "google"} <= modules and not modules & unwanted
