"""The names of everything one cluster keeps in the database.

A cluster is known by its ``appname`` (the prefix of each table) and, optionally, a schema. Every table name,
function name, NOTIFY channel and advisory lock key is derived here and nowhere else, so that two clusters in one
database never meet.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from jobsync_orm.exceptions import ConfigurationError

__all__ = [
    "DEFAULT_APPNAME",
    "EPOCH_SETTING",
    "MAX_APPNAME",
    "MAX_IDENTIFIER",
    "NODE_SETTING",
    "NOT_HELD",
    "OWNERSHIP_LOST",
    "OWNER_UNDECLARED",
    "Names",
    "is_identifier",
    "is_storable",
    "literal",
    "quote",
]

DEFAULT_APPNAME = "sync_"

# PostgreSQL cuts identifiers at 63 bytes. The longest suffix this library appends (an index name) has 40.
MAX_APPNAME = 23

# PostgreSQL cuts identifiers at this many bytes.
MAX_IDENTIFIER = 63

# Settings of a transaction by which it declares who commits, and the epoch that node knew when it began.
NODE_SETTING = "jobsync.node"
EPOCH_SETTING = "jobsync.epoch"

# SQLSTATEs of the trigger that guards a table: the token is another's; who commits has not been declared.
OWNERSHIP_LOST = "JO001"
OWNER_UNDECLARED = "JO002"

# SQLSTATE of the function that holds tokens until a commit: one of them is another's.
NOT_HELD = "JO003"

# A character no name is likely to hold, and which, unlike NUL, PostgreSQL can hash as well.
_SEPARATOR = "\x1f"

_APPNAME = re.compile(r"[a-z_][a-z0-9_]*\Z")


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can store ``text``: it has no NUL and no lone surrogate."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def is_identifier(name: object) -> bool:
    """Whether PostgreSQL can keep ``name`` as the name of something, as it is."""
    return isinstance(name, str) and is_storable(name) and 0 < len(name.encode()) <= MAX_IDENTIFIER


def quote(identifier: str) -> str:
    """``identifier`` as a quoted SQL identifier."""
    return '"' + identifier.replace('"', '""') + '"'


def _fitting(name: str) -> str:
    """``name``, or as much of it as an identifier may have, with a digest of the whole."""
    if len(name.encode()) <= MAX_IDENTIFIER:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    # Cut between characters, not in the middle of one.
    start = name.encode()[: MAX_IDENTIFIER - len(digest) - 1].decode(errors="ignore")
    return f"{start}_{digest}"


def literal(sql: str) -> str:
    """``sql`` as an SQL string constant, whatever ``standard_conforming_strings`` says."""
    return "E'" + sql.replace("\\", "\\\\").replace("'", "''") + "'"


@dataclass(frozen=True)
class Names:
    """The names of one cluster.

    Parameters
    ----------
    appname : str
        Prefix of each table, ``[a-z_][a-z0-9_]*``, at most 23 characters.
    schema : str, optional
        Schema the tables live in. None leaves it to the connection's ``search_path``.

    Raises
    ------
    ConfigurationError
        A name PostgreSQL could not keep as it is.
    """

    appname: str = DEFAULT_APPNAME
    schema: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.appname, str) or not _APPNAME.match(self.appname):
            raise ConfigurationError(
                f"appname {self.appname!r} must match [a-z_][a-z0-9_]*: it becomes the prefix of table names"
            )
        if len(self.appname) > MAX_APPNAME:
            raise ConfigurationError(
                f"appname {self.appname!r} has {len(self.appname)} characters; at most {MAX_APPNAME} fit into "
                "PostgreSQL's 63-byte identifiers"
            )
        if self.schema is not None and not is_identifier(self.schema):
            raise ConfigurationError(f"schema {self.schema!r} must be a name of 1 to 63 bytes, or None")

    def bare(self, kind: str) -> str:
        """Table or function name without schema: ``bare("node")`` is ``sync_node``."""
        return f"{self.appname}{kind}"

    def sql(self, kind: str) -> str:
        """The same, quoted and qualified, ready to stand in SQL text."""
        name = quote(self.bare(kind))
        return name if self.schema is None else f"{quote(self.schema)}.{name}"

    def text(self, kind: str) -> str:
        """The same for SQLAlchemy's ``text()``, in which a colon would begin a parameter."""
        return self.sql(kind).replace(":", r"\:")

    @property
    def token_function(self) -> str:
        """Bare name of the SQL function that maps a key's text to its token."""
        return self.bare("token_of")

    @property
    def version_table(self) -> str:
        """Alembic's version table of this cluster, so that the application's own stays untouched."""
        return self.bare("alembic_version")

    def fence(self, table: str) -> str:
        """Bare name of the trigger that guards ``table`` of the application, and of the trigger's function."""
        return _fitting(self.bare(f"fence_{table}"))

    def token_column(self, table: str) -> str:
        """Bare name of the function and the CHECK behind ``token_id`` of ``table`` where a trigger keeps it."""
        return _fitting(self.bare(f"token_id_{table}"))

    def token_trigger(self, table: str) -> str:
        """Bare name of that trigger. Triggers fire in the order of their names, and this one is to be the last."""
        return _fitting(f"zz_{self.bare(f'token_id_{table}')}")

    def _digest(self, *parts: str) -> bytes:
        text = _SEPARATOR.join(("jobsync_orm", self.schema or "", self.appname, *parts))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    @property
    def cluster_channel(self) -> str:
        """NOTIFY channel on which whoever leads hears that the plan's inputs have changed."""
        return "jobsync_" + self._digest("cluster").hex()[:40]

    @property
    def queue_channel(self) -> str:
        """NOTIFY channel on which queue workers hear that there are jobs."""
        return "jobsync_" + self._digest("queue").hex()[:40]

    def node_channel(self, node: str) -> str:
        """NOTIFY channel on which ``node`` hears that its tokens have changed."""
        return "jobsync_" + self._digest("node", node).hex()[:40]

    def node_channel_sql(self, node: str) -> str:
        """SQL expression for ``node_channel`` of the node that the SQL expression ``node`` names."""
        prefix = _SEPARATOR.join(("jobsync_orm", self.schema or "", self.appname, "node", "")).replace("'", "''")
        text = f"pg_catalog.convert_to('{prefix}' || {node}, 'UTF8')"
        return f"'jobsync_' || left(pg_catalog.encode(pg_catalog.sha256({text}), 'hex'), 40)"

    def advisory_key(self, purpose: str, *parts: str) -> int:
        """Signed 64-bit key of the advisory lock for ``purpose``."""
        return int.from_bytes(self._digest("lock", purpose, *parts)[:8], "big", signed=True)
