"""The CRI endpoint: sandboxes, containers, images, streaming, built on `pyrunc`."""
