"""Tests of pod networks with the real kernel, the real zygote and CNI plugins that fail."""
