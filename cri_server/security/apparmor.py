"""The default AppArmor profile of containers, as docker and containerd define it.

It allows a container its own files, network and processes, and denies access to the host through
/proc, /sys and mounts. apparmor_parser compiles the profile. After each start the server loads the
profile for its first container, so that a new version of the profile replaces an old one. Before
each later container the server loads the profile again if the kernel no longer has it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass, field

from cri_server.node.host import NodeFacts, loaded_apparmor_profiles
from cri_server.zygote.client import Zygote
from cri_server.zygote.jobs import COMPILE_APPARMOR, CompileAppArmorRequest
from pyrunc.errors import PeerError

log = logging.getLogger(__name__)

NAME = "cri-pyrunc-default"
PARSER_TIMEOUT_S = 60.0
SEARCH_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"

# Paths are the container's; `attach_disconnected` gives names to descriptors from outside its
# mounts. A deny rule overrides every allow rule, also for root with all capabilities.
POLICY = f"""
profile {NAME} flags=(attach_disconnected,mediate_deleted) {{
  network,
  capability,
  file,
  umount,

  signal (receive) peer=unconfined,
  signal (send,receive) peer={NAME},
  ptrace (trace,read,tracedby,readby) peer={NAME},

  # In /proc only own processes and the sysctls of System V shared memory may be written.
  deny /proc/* w,
  deny /proc/{{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}}/** w,
  deny /proc/sys/[^k]** w,
  deny /proc/sys/kernel/{{?,??,[^s][^h][^m]**}} w,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,
  deny /proc/mem rwklx,
  deny /proc/kmem rwklx,

  deny mount,

  # In /sys only cgroups may be written, which are mounted read-only; firmware, power and security
  # may not be read.
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
    """Loads the default AppArmor profile into the kernel when a container needs it."""

    _loaded: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def name(self, node: NodeFacts, jobs: Zygote) -> str:
        """Load the default profile if needed and return its name; empty if AppArmor or
        apparmor_parser is missing.

        Raises PeerError with apparmor_parser's output.
        """
        if not node.apparmor:
            return ""
        async with self._lock:
            if self._loaded and NAME in await asyncio.to_thread(loaded_apparmor_profiles):
                return NAME
            parser = shutil.which("apparmor_parser", path=SEARCH_PATH)
            if parser is None:
                log.warning(
                    "AppArmor is enabled, but apparmor_parser is missing: containers run without "
                    "the default profile"
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
        output = done.stderr.decode(errors="replace").strip()
        reason = output or f"exit code {done.exit_code}"
        raise PeerError(f"apparmor_parser did not load {NAME}: {reason}")
    log.info("loaded the AppArmor profile %s", NAME)
