"""The node's shims and the keeper, as the server has them. The door is `pod.Pod`."""
