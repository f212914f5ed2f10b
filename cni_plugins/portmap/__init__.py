"""portmap: ports of the host that lead into pods."""
