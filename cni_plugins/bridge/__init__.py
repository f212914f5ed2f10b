"""The plugin bridge: connects pods to a bridge of the host, which may be their gateway."""
