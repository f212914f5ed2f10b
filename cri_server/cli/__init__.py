"""The command `pyrunc-cri`: runs the server, and has verbs for users, as crictl and docker do."""
