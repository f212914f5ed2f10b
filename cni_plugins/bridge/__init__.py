"""The plugin bridge: connects each pod to a bridge on the host with a veth."""
