"""The server's network against the real kernel, the real zygote and plugins that misbehave."""
