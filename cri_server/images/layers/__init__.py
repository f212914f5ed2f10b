"""From a layer's blob to its files: what decodes it, reads its tar and unpacks it, and the processes that do so."""
