"""The image store on disk: blobs, unpacked layers, tars with their EROFS indexes, mounts, and the
catalog of images."""
