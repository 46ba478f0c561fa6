"""A job in a FastAPI application (extra ``fastapi``).

::

    app = FastAPI(lifespan=jobsync_lifespan(config))
    app.include_router(health_router())  # /health/live and /health/ready

    @app.get("/mine")
    def mine(job: CurrentJob) -> list[str]: ...

``docs/integrations.md`` says more; all but the router and the dependency is :mod:`.starlette`'s.
"""

from __future__ import annotations

from typing import Annotated

from jobsync_orm.job import Job

try:
    from fastapi import APIRouter, Depends, Request
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise ImportError("jobsync_orm.integrations.fastapi needs fastapi: pip install 'jobsync-orm[fastapi]'") from error

from jobsync_orm.integrations.starlette import answer, current_host, current_job, jobsync_lifespan

__all__ = ["CurrentJob", "current_host", "current_job", "health_router", "jobsync_lifespan"]

CurrentJob = Annotated[Job, Depends(current_job)]
"""The job of the process that answers the request, as a parameter of a path operation or of another dependency."""


def health_router(prefix: str = "/health") -> APIRouter:
    """A router with ``{prefix}/live`` and ``{prefix}/ready``; they are not in the API's schema.

    Both answer from memory, with status 200 or 503 and a JSON object ``{"status", "node", "problems"}``. ``live`` says
    no only where a restart would help; ``ready`` while this process may not say yes to its tokens.
    """
    router = APIRouter(prefix=prefix, include_in_schema=False)

    @router.get("/live")
    async def live(request: Request) -> JSONResponse:
        return answer(current_host(request).live(), "live", "dead")

    @router.get("/ready")
    async def ready(request: Request) -> JSONResponse:
        return answer(current_host(request).ready(), "ready", "not ready")

    return router
