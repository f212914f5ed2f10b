"""How the plugins tell the kernel about networks: namespaces, links, addresses, routes, host rules.

`rtnetlink` and `nfnetlink` are the small codecs of the hot path (socket and struct, no import
cost); what is rare or only reads goes through pyroute2, which is also the codecs' oracle in the
tests.
"""
