"""Installs the server on a node, and removes it: the files to install, and the actions that write
and remove them. Most of the files are generated from the tables of configuration keys and
commands."""
