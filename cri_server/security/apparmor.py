"""The AppArmor profile of containers that ask for the runtime's default, as docker and containerd
know it: everything that a container does with its own files, network and processes, and nothing
that reaches the host through /proc, /sys or mounts.

Only apparmor_parser can compile policy; the kernel takes the result through
/sys/kernel/security/apparmor/.replace. The first container of a server's life loads the profile, so
a new version replaces an old one, and a container that finds it unloaded loads it again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass, field

from cri_server.node.host import Node, loaded_apparmor_profiles
from cri_server.zygote.client import Zygote
from cri_server.zygote.jobs import COMPILE_APPARMOR, CompileAppArmorRequest
from pyrunc.errors import PeerError

log = logging.getLogger(__name__)

NAME = "cri-pyrunc-default"
PARSER_TIMEOUT_S = 60.0
SEARCH_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"

# Paths are what the container sees; `attach_disconnected` gives names to descriptors that come from
# outside its mounts. A deny rule wins over every allow rule, so what is denied here stays denied
# for root with all capabilities.
POLICY = f"""
profile {NAME} flags=(attach_disconnected,mediate_deleted) {{
  network,
  capability,
  file,
  umount,

  signal (receive) peer=unconfined,
  signal (send,receive) peer={NAME},
  ptrace (trace,read,tracedby,readby) peer={NAME},

  # In /proc: own processes and the sysctls of System V shared memory; nothing else is written.
  deny /proc/* w,
  deny /proc/{{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}}/** w,
  deny /proc/sys/[^k]** w,
  deny /proc/sys/kernel/{{?,??,[^s][^h][^m]**}} w,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,
  deny /proc/mem rwklx,
  deny /proc/kmem rwklx,

  deny mount,

  # In /sys: nothing is written but cgroups, which are mounted read-only anyway; firmware, power and security stay unread.
  deny /sys/[^f]*/** wklx,
  deny /sys/f[^s]*/** wklx,
  deny /sys/fs/[^c]*/** wklx,
  deny /sys/fs/c[^g]*/** wklx,
  deny /sys/fs/cg[^r]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
  deny /sys/kernel/security/** rwklx,
}}
"""


@dataclass(slots=True)
class DefaultProfile:
    """Whether this server has loaded its profile, and whether it can."""

    _loaded: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def name(self, node: Node, jobs: Zygote) -> str:
        """The profile's name, loaded; empty on a host without AppArmor or without its compiler.

        Raises PeerError with the compiler's words.
        """
        if not node.apparmor:
            return ""
        async with self._lock:
            if self._loaded and NAME in await asyncio.to_thread(loaded_apparmor_profiles):
                return NAME
            parser = shutil.which("apparmor_parser", path=SEARCH_PATH)
            if parser is None:
                log.warning(
                    "AppArmor is on, but there is no apparmor_parser: containers run without a default profile"
                )
                return ""
            await _load(parser, jobs)
            self._loaded = True
            return NAME


async def _load(parser: str, jobs: Zygote) -> None:
    done = await jobs.run(
        COMPILE_APPARMOR,
        CompileAppArmorRequest(parser),
        timeout_s=PARSER_TIMEOUT_S,
        stdin=POLICY.encode(),
    )
    if done.exit_code:
        words = done.stderr.decode(errors="replace").strip()
        raise PeerError(
            f"apparmor_parser did not load {NAME}: {words or f'exit code {done.exit_code}'}"
        )
    log.info("loaded the AppArmor profile %s", NAME)
