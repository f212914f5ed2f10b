"""Programs of system calls: assembles programs, checks that they cannot go wrong by themselves, has
`pause/launcher.c` run them, and converts failed operations to errors."""
