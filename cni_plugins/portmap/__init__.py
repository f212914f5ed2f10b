"""The plugin portmap: forwards ports of the host to pods."""
