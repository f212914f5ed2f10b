"""The IPAM plugin host-local: assigns addresses from configured ranges and records them as files on
this host."""
