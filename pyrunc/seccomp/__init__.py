"""System call filters: `profile` parses an OCI `linux.seccomp` object, `compiler` compiles it to a
BPF filter and stores the filter, `default` is the profile of RuntimeDefault, `stub` answers ENOSYS
to calls that are newer than the profile."""
