"""Checks whether this machine can be a node. Each result has an observation, its effect on pods,
and a remedy."""
