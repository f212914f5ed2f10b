"""A server and shims as on a kernel before Linux 6.15, without PIDFD_INFO_EXIT: they cannot learn
the exit code of a process that another process has reaped. Started as `python -m
tests.cri.without_exit_info serve …`."""

from __future__ import annotations

from pyrunc.kernel import process

process._PIDFD_GET_INFO = 0xC040FFFF  # ENOTTY, as for an unknown request

if __name__ == "__main__":
    from cri_server import app
    from cri_server.cli.main import main

    app.SHIM_MODULES.append("tests.cri.without_exit_info")  # the zygote imports it
    main()
