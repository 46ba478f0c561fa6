"""The site has every page in its navigation and every public name in its reference."""

from __future__ import annotations

import inspect
import re

import pytest

import jobsync_orm
from jobsync_orm import JobQueue, migrate, models, operate, orm, queue, testing, worker
from jobsync_orm.queue.core import QueueCore
from tests.docs.test_code_blocks import ROOT

DOCS = ROOT / "docs"
REFERENCE = {page.name: page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.rst"))}
WHOLE_MODULES = set(re.findall(r"\.\. automodule:: (\S+)\n   :members:\n", "\n".join(REFERENCE.values())))

# What only the library itself, or a subclass of a user's model, has to do with.
NOT_FOR_READERS = {
    "jobsync_orm.orm": {"Owner"},
    "jobsync_orm.queue": set(),
    "jobsync_orm.models": {name for name in models.__all__ if name.endswith("Mixin")}
    | {"AuditRecord", "Base", "Checkpoint", "Claim", "Cluster", "JobAttempt", "JobDependency", "JobPause"}
    | {"JobSchedule", "JobWorker", "Lock", "Node", "QueuedJob", "Rebalance", "Token"},
}


def in_reference(name: str) -> bool:
    pattern = rf"\.\. auto(?:class|function|exception):: (?:[\w.]+\.)?{name}\b"
    return any(re.search(pattern, page) for page in REFERENCE.values())


def test_each_page_is_in_the_navigation() -> None:
    contents = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^]]+\]\(([\w/.-]+)\): \S", contents, re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for kind in ("md", "rst") for page in sorted(DOCS.glob(f"**/*.{kind}"))]
    assert len(listed) == len(set(listed)), "a page is listed twice in docs/index.md"
    missing = sorted(set(pages) - {"index.md"} - set(listed))
    assert not missing, f"give these a line under one of the headings of docs/index.md: {missing}"
    assert sorted(set(listed) - set(pages)) == []


@pytest.mark.parametrize(
    "module", [jobsync_orm, orm, queue, worker, models, migrate, operate, testing], ids=lambda module: module.__name__
)
def test_each_public_name_is_in_the_reference(module: object) -> None:
    name = str(module.__name__)  # type: ignore[attr-defined]
    errors = {error for error, _ in inspect.getmembers(jobsync_orm.exceptions, inspect.isclass)}
    assert "jobsync_orm.exceptions" in WHOLE_MODULES
    if name in WHOLE_MODULES:
        return
    public = set(module.__all__) - errors - NOT_FOR_READERS.get(name, set())  # type: ignore[attr-defined]
    if name == "jobsync_orm.queue":  # the parts that JobQueue is made of are in the reference with it
        public -= {part.__name__ for part in JobQueue.__mro__[1:]}
    assert sorted(each for each in public if not in_reference(each)) == []


def test_the_signature_that_the_reference_gives_the_queue() -> None:
    """Spelled out there, because that of the class itself passes everything on."""
    given = re.search(r"autoclass:: JobQueue\((.*)\)", REFERENCE["queue.rst"])
    assert given is not None
    parameters = list(inspect.signature(QueueCore.__init__).parameters.values())[1:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert f"({given[1]})" == str(inspect.Signature(plain))
