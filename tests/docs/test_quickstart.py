"""The quick start for FastAPI, with the file that the page shows, under a real uvicorn with two workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from tests.docs.test_code_blocks import ROOT, blocks
from tests.integration.cluster import wait_for
from tests.integration.integrations.servers import serving


@pytest.mark.slow
def test_two_workers(empty_database: URL, tmp_path: Path) -> None:
    (code,) = (block.text for block in blocks(ROOT / "docs" / "quickstart-fastapi.md") if block.language == "python")
    (tmp_path / "shop.py").write_text(code)
    arguments = ("-m", "uvicorn", "shop:app", "--workers", "2", "--port", "{port}")
    with (
        serving(empty_database, tmp_path / "log", *arguments, folder=tmp_path) as server,
        ThreadPoolExecutor(16) as many,
    ):

        def both() -> Any:
            answers = [answer for answer in many.map(server.get, ["/mine"] * 16) if answer is not None]
            shares = {answer["node"]: answer["parcels"] for answer in answers}
            codes = [code for share in shares.values() for code in share]
            return len(shares) == 2 and len(codes) == len(set(codes)) == 100

        wait_for(both, "two workers share the hundred parcels")
        packed = server.request("POST", "/pack")
        assert packed is not None
        assert len(packed[1]["packed"]) == 5
        wait_for(lambda: server.get("/health/ready"), "ready")
        assert server.end() == 0, server.said()
