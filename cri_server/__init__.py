"""The CRI server: sandboxes, containers, images and streaming, built on `pyrunc`."""
