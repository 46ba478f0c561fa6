"""Ties to other libraries. Each module needs an extra of its own, and is imported by nobody but its user."""
