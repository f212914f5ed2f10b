"""The Node Resource Interface: plugins that observe pods and containers, and adjust containers
before they start.

`service.NriObserver` is the lifecycle observer that CRI calls notify. Without `[nri] enabled` this
package is not imported.
"""
