"""The Node Resource Interface: plugins that observe pods and containers, and adjust containers
before they start.

`service.NriObserver` is the lifecycle observer that verbs call. Without `[nri] enabled` this
package is not imported.
"""
