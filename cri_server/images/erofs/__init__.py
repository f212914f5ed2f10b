"""EROFS indexes: one small file per image that makes its layers' uncompressed tars mountable."""
