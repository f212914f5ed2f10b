"""The server's configuration: a TOML file whose every key has a default, and flags that override keys.

An unknown key, a wrong type or a value out of range is refused with the file and the key's path, before anything starts.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from cri_server.store.paths import DEFAULT_STATE
from pyrunc.errors import InvalidSpec

DEFAULT_PATH = Path("/etc/pyrunc/config.toml")
SOCKET_PATH_LIMIT = 107  # sun_path, unix(7), without its final NUL

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """A TOML table: keys that are not fields are errors."""


class Server(Table):
    """`[server]`: where the server listens and keeps things."""

    listen: str = "unix:///run/pyrunc/cri.sock"
    root: str = "/var/lib/pyrunc"
    state: str = DEFAULT_STATE
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    shutdown_timeout_s: PositiveSeconds = 5.0


class Network(Table):
    """`[network]`: where CNI finds its configuration and plugins.

    `builtin`: subnets of the network that pods get while `conf_dir` holds no configuration, such as
    `["10.85.0.0/16", "fd85::/64"]`; empty: none, and the node is not ready. `builtin_bridge`: its bridge.
    """

    conf_dir: str = "/etc/cni/net.d"
    bin_dir: str = "/opt/cni/bin"
    builtin: list[str] = msgspec.field(default_factory=list)
    builtin_bridge: str = "pyrunc0"


class Cgroup(Table):
    """`[cgroup]`: how containers are grouped.

    `missing_controllers`: what to do about a limit whose controller is not in the v2 tree. `default_parent`: for pods whose
    caller names none; empty means `/pyrunc` or `system.slice`, by driver.
    """

    driver: Literal["auto", "systemd", "cgroupfs"] = "auto"
    missing_controllers: Literal["error", "warn"] = "error"
    default_parent: str = ""


class Registry(Table):
    """`[registry]`: `config_path` is a folder of HOST/hosts.toml files. A pull that makes no progress for
    `no_progress_timeout_s` fails.
    """

    config_path: str = ""
    no_progress_timeout_s: PositiveSeconds = 300.0


class Images(Table):
    """`[images]`: references that image garbage collection must leave alone."""

    pinned: list[str] = []


class Streaming(Table):
    """`[streaming]`: where exec, attach and port-forward sessions connect; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: Port = 0


class Containers(Table):
    """`[containers]`: what holds for each container.

    `restrict_oom_score_adj`: raise a score below the server's own instead of failing where lowering is not permitted;
    `auto` finds out. `volatile`: the overlay skips syncs (a container does not outlive a power cut anyway).
    `rlimits`: resource limits of processes, each `NAME=SOFT[:HARD]` with a number or `unlimited`, such as
    `nofile=65536:524288`; those not named are `node.DEFAULT_LIMITS`. `cdi_dirs`: where device drivers describe their devices, the last folder wins.
    """

    restrict_oom_score_adj: Literal["auto", "always", "never"] = "auto"
    volatile: bool = True
    rlimits: list[str] = []
    cdi_dirs: list[str] = msgspec.field(default_factory=lambda: ["/etc/cdi", "/run/cdi"])
    foreign_path_timeout_s: PositiveSeconds = 30.0


class Config(Table):
    """The whole file."""

    server: Server = msgspec.field(default_factory=Server)
    network: Network = msgspec.field(default_factory=Network)
    cgroup: Cgroup = msgspec.field(default_factory=Cgroup)
    registry: Registry = msgspec.field(default_factory=Registry)
    images: Images = msgspec.field(default_factory=Images)
    streaming: Streaming = msgspec.field(default_factory=Streaming)
    containers: Containers = msgspec.field(default_factory=Containers)

    @property
    def socket_path(self) -> Path:
        """The path behind `server.listen`."""
        return Path(self.server.listen.removeprefix("unix://"))

    @property
    def root(self) -> Path:
        return Path(self.server.root)

    @property
    def state(self) -> Path:
        return Path(self.server.state)


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """The configuration of `path` (None: the default path, which may be missing), then `overrides` by `table.key`.

    Raises InvalidSpec whose path is `FILE:KEY` (or the flag's key) and whose text says what is expected there.
    """
    values, source = _read(path)
    for key, value in overrides.items():
        if value is not None:
            table, _, name = key.partition(".")
            values.setdefault(table, {})[name] = value
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        raise _worded(source, error) from None
    _check(config)
    return config


def _read(path: Path | None) -> tuple[dict[str, Any], str]:
    chosen = path or DEFAULT_PATH
    try:
        with open(chosen, "rb") as file:
            return tomllib.load(file), str(chosen)
    except FileNotFoundError:
        if path is None:
            return {}, "flags"
        raise InvalidSpec(str(chosen), "no such file") from None
    except OSError as error:
        raise InvalidSpec(str(chosen), f"cannot be read: {os.strerror(error.errno or 0).lower()}") from None
    except UnicodeDecodeError as error:
        raise InvalidSpec(str(chosen), f"not TOML: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidSpec(str(chosen), f"not TOML: {error}") from None


def _worded(source: str, error: msgspec.ValidationError) -> InvalidSpec:
    """msgspec says `Expected … - at `$.table.key``; a person wants `FILE:table.key: expected …`."""
    text, _, place = str(error).partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text)
    if unknown:
        key = f"{key}.{unknown[1]}".lstrip(".")
        text = "no such key"
    return InvalidSpec(f"{source}:{key}" if key else source, text[:1].lower() + text[1:])


def _check(config: Config) -> None:
    if not config.server.listen.startswith("unix:///"):
        raise InvalidSpec("server.listen", f"{config.server.listen!r} is not unix:///PATH")
    if len(str(config.socket_path).encode()) > SOCKET_PATH_LIMIT:
        raise InvalidSpec("server.listen", f"the path is longer than {SOCKET_PATH_LIMIT} bytes")
    for key in ("server.root", "server.state", "network.conf_dir", "network.bin_dir"):
        table, _, name = key.partition(".")
        if not Path(getattr(getattr(config, table), name)).is_absolute():
            raise InvalidSpec(key, "must be an absolute path")
