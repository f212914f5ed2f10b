"""The plugins' access to the kernel's networking: namespaces, links, addresses, routes, host rules.

`rtnetlink` and `nfnetlink` are small codecs for ADD and DEL (socket and struct, cheap to import).
Rare and reading code uses pyroute2, which also checks the codecs in the tests.
"""
