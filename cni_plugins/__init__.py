"""CNI plugins (bridge, host-local, loopback, portmap) and the protocol that they use."""
