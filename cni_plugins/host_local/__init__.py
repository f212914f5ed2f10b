"""The IPAM plugin host-local: assigns addresses from configured ranges and stores the leases as
files on this host."""
