"""Parcels, shared by the worker processes of a FastAPI application.

    pip install 'jobsync-orm[fastapi,binary,embedded]' uvicorn
    uvicorn --app-dir examples fastapi_app.main:app --workers 2

Each worker process is a node of the cluster: ``GET /parcels/mine`` shows the parcels of whichever process answers, and
``POST /parcels`` stores a parcel together with the job that prints its label, which any of them runs.
``DATABASE_URL`` names a PostgreSQL; without it one is started in ``.jobsync``.
"""
