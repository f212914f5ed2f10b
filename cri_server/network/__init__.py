"""Pod networks by CNI: configuration, plugin chains, what is remembered about each attachment."""
