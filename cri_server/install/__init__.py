"""Installs the server on a node, and removes it: the files to install, most of them generated from
the programs' tables of keys and commands, and the actions that write and remove them."""
