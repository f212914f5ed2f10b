"""The Node Resource Interface: plugins of the node's owner hear of pods and containers and adjust
them before they run.

`service.py` is what the verbs call; a server without `[nri] enabled` imports none of this.
"""
