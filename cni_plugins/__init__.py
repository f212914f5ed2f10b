"""CNI plugins (bridge, host-local, loopback, portmap) and the protocol they speak."""
