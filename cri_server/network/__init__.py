"""Pod networks by CNI: configuration, plugin chains, records of attachments."""
