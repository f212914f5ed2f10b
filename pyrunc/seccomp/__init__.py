"""System call filters: `profile` parses an OCI `linux.seccomp` object, `compiler` makes its BPF
program (and stores it), `default` is the profile of RuntimeDefault, `stub` answers ENOSYS to
calls that are newer than the profile."""
