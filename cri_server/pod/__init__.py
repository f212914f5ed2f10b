"""The server's clients of the shims, and of the keeper, the process that stores copies of the
shims' descriptors. Verbs use `pod.Pod`."""
