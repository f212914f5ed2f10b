"""A server and shims on a kernel that does not report how a process has ended that another process
has reaped, as before Linux 6.15 (PIDFD_INFO_EXIT): started as `python -m
tests.cri.without_exit_info serve …`."""

from __future__ import annotations

from pyrunc.kernel import process

process._PIDFD_GET_INFO = 0xC040FFFF  # ENOTTY, as for an unknown request

if __name__ == "__main__":
    from cri_server import app
    from cri_server.cli.main import main

    app.SHIM_MODULES.append("tests.cri.without_exit_info")  # the zygote imports it
    main()
