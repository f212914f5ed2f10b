"""What Linux 6.1 (Debian 12) does in another way than newer kernels, and the one thing that it
cannot do."""
