"""Parcels, shared by the worker processes of a Flask application, with Flask-SQLAlchemy's models.

    pip install 'jobsync-orm[flask,binary,embedded,cli]' flask-sqlalchemy gunicorn
    cd examples
    gunicorn -c gunicorn_conf.py 'flask_app:create_app()'
    flask --app flask_app jobsync status

``GET /parcels/mine`` shows the parcels of whichever process answers. ``DATABASE_URL`` names a PostgreSQL; without it
one is started in ``.jobsync``.
"""

import os

from flask import Flask

from flask_app.extensions import db, jobsync
from flask_app.views import parcels
from jobsync_orm import CoordinationConfig
from jobsync_orm.integrations.flask import health_blueprint


def create_app() -> Flask:
    app = Flask(__name__)
    url = os.environ.get("DATABASE_URL") or CoordinationConfig.embedded(".jobsync/pg").sqlalchemy_url()
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    # A process that hangs in a transaction holds the locks of its rows: the server ends such a session after 15 s.
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {
        "connect_args": {"options": "-c idle_in_transaction_session_timeout=15000"}
    }
    app.config["JOBSYNC_CREATE_TABLES"] = True
    db.init_app(app)
    jobsync.init_app(app)  # on the database of db
    app.register_blueprint(parcels)
    app.register_blueprint(health_blueprint())  # /health/live and /health/ready
    return app
