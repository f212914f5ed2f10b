"""The image store on disk: blobs, unpacked layers, tars with their indexes, and the catalog of images."""
