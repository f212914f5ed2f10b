"""The image store on disk: blobs, unpacked layers, tars with their indexes, mounts, and the catalog
of images."""
