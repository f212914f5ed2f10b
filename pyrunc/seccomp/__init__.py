"""System call filters: `profile` reads an OCI `linux.seccomp` object, `compiler` makes its BPF
program (and keeps it), `default` is the profile of RuntimeDefault, `stub` answers ENOSYS to calls
that are newer than the profile."""
