"""The server's network with the real kernel, the real zygote and plugins that fail."""
