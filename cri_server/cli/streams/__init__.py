"""Verbs that stream: exec, attach, port-forward and logs."""
