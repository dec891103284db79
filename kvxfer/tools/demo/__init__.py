"""`kvxfer demo`: a real model, prefilled in one process, decoded in another, every byte of its cache checked."""
