"""The control protocol, sans-I/O: messages, frames, sessions and the two ends of a transfer (`proto/PROTOCOL.md`)."""
