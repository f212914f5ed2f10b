"""The plugins' access to the kernel's networking: namespaces, links, addresses, routes, nftables.

ADD and DEL use the small netlink codecs `rtnetlink` and `nfnetlink`, which are fast to import.
CHECK and GC use pyroute2.
"""
