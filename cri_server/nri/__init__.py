"""The Node Resource Interface: plugins that observe pods and containers, and adjust containers
before they start.

`service.Nri` is the lifecycle observer that verbs call. Without `[nri] enabled` nothing here is
imported.
"""
