"""What keeps memory safe: fences before it, evidence that nobody writes it, and the end of doubts."""
