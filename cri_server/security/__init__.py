"""Mandatory access control: AppArmor profiles and SELinux labels of pods and containers."""
