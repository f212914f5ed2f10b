"""The command `pyrunc-cri`, which runs the server and has verbs for people."""
