"""The queue beside the queues of other libraries: see ``run.py``."""
