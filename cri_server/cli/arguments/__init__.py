"""Arguments and options that select containers, pods and images, with shell completion."""
