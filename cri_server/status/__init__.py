"""What the server says of sandboxes and containers: messages in their wire form, from the index
alone."""
