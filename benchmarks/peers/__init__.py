"""Other engines on the same requests, each in a process of its own."""
