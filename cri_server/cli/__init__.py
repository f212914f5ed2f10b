"""The program `pyrunc-cri`: the server, and a front end for people over its socket."""
