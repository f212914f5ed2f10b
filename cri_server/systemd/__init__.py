"""The systemd interfaces that the server uses: sd_notify(3) and the descriptor store."""
