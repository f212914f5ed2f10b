"""SELinux: labels of pods and containers, their levels, and files that get a label."""
