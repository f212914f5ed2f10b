"""host-local: addresses from ranges in the configuration, leases as files on this host."""
