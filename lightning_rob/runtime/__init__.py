"""Errors, files, processes, memory: whatever keeps a run alive."""
