"""gunicorn with the application loaded before the fork: ``gunicorn -c gunicorn_conf.py 'flask_app:create_app()'``.

Neither thread nor connection crosses a fork, so each worker process starts a job of its own when it has been forked,
and stops it when it ends.
"""

preload_app = True
workers = 2
threads = 4
graceful_timeout = 30  # more than stopping takes: the grace of a JobWorker, and drain_timeout_sec


def post_worker_init(worker):
    worker.wsgi.extensions["jobsync"].start()


def worker_exit(server, worker):
    if worker.wsgi is not None:  # it has come so far
        worker.wsgi.extensions["jobsync"].stop()
