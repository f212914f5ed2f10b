"""Pod networks with CNI: configuration, plugin chains, records of attachments."""
