"""CRI container configuration + image configuration + facts of the node -> OCI spec. Pure but for
what `Inputs` names."""
