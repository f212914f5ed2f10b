"""Programs of system calls: assembled and proved here, run by `pause/launcher.c`; its failures
become errors here."""
