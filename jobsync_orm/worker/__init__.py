"""Runs queued jobs: see :class:`JobWorker`."""
