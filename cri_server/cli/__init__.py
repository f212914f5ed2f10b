"""The command `pyrunc-cri`: runs the server, and offers verbs for people that call the server."""
