"""Signature policy: which signatures an image needs, and how they are verified."""
