"""The server's clients of the shims and of the keeper. Verbs use `pod.Pod`."""
