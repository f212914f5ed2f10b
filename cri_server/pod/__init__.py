"""Lets the server call the shims and the keeper (the process that stores copies of the shims'
descriptors). The CRI verbs use `pod.Pod`."""
