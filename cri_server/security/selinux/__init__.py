"""SELinux: labels of pods and containers, their levels, and the relabelling of files."""
