"""Measurements of this library beside the original, on the same machine in the same run. See README.md."""
