"""From a task id to its token, in Python, in PostgreSQL and in SQLite: one function, written three times.

``token = hash(text of the id, in UTF-8) % total_tokens``. Three hash functions are known by name:

``"double_sha256"`` (the default everywhere)
    First 8 bytes, big endian, of SHA-256 of SHA-256.
``"sha256"``
    First 8 bytes, big endian, of SHA-256.
``"md5"``
    The whole 128-bit MD5 digest.

Which id has which text
-----------------------
The text of an id is ``str(id)``, so ``7`` and ``"7"`` are the same task. It must be the same in every process
and on every machine, or two workers disagree on who owns the task. That holds for ``int``, ``str``, ``bool``,
``None``, ``uuid.UUID``, ``datetime.date``, ``datetime.datetime`` and ``decimal.Decimal``. Everything else (a
``float``, ``bytes``, a tuple, a set, an object with an address in its ``repr``) is refused with
:class:`~jobsync_orm.exceptions.UnstableTaskId`: say what you mean with ``str(...)``. A subclass counts as its
base as long as it prints like it: an ``IntEnum`` or ``StrEnum`` does, a ``class Color(str, Enum)`` does not.

PostgreSQL stores neither NUL nor lone surrogates; an id with one is an
:class:`~jobsync_orm.exceptions.InvalidTaskId`.

The twin in SQL
---------------
:func:`token_function_ddl` is the same function for PostgreSQL; it takes the text of a key. For ``text``,
``varchar``, integer and ``uuid`` columns, ``column::text`` is ``str(value)``. For other types it is not
(``true`` and ``True``; ``char(n)`` is padded; a ``timestamptz`` prints by the session's time zone), so keep
the key of such a row in a text column. In a database of another encoding than UTF8 the function converts the
text.

:func:`register_sqlite` gives the function to a SQLite connection, for unit tests without a server.
"""

from __future__ import annotations

import datetime
import hashlib
import reprlib
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jobsync_orm.exceptions import ConfigurationError, InvalidTaskId, UnstableTaskId

if TYPE_CHECKING:
    from sqlite3 import Connection

    sha256 = hashlib.sha256
    md5 = hashlib.md5
else:
    # An id is short, and then OpenSSL's set-up costs more than the hash. Measured for up to 50 bytes: CPython
    # 3.11's own SHA-256 takes 0.4 us where hashlib takes 0.5 to 0.9; 3.12 and later have another one (_sha2)
    # that is no faster than hashlib. CPython's own MD5 takes half of hashlib's time in each version. A build
    # may lack either.
    try:
        from _sha256 import sha256
    except ImportError:
        sha256 = hashlib.sha256
    try:
        from _md5 import md5
    except ImportError:
        # Where policy forbids MD5 for security, spreading tasks is still allowed.
        md5 = partial(hashlib.md5, usedforsecurity=False)

__all__ = [
    "HASH_FUNCTIONS",
    "hasher",
    "register_sqlite",
    "task_key",
    "task_to_token",
    "token_function_ddl",
]

# The SQL twin's 64-bit arithmetic holds for totals below 2**31, and a token is a PostgreSQL integer.
_MAX_TOTAL = 2**31 - 1


def _hash_md5(data: bytes) -> int:
    return int.from_bytes(md5(data).digest(), "big")


def _hash_sha256(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:8], "big")


def _hash_double_sha256(data: bytes) -> int:
    return int.from_bytes(sha256(sha256(data).digest()).digest()[:8], "big")


HASH_FUNCTIONS: Mapping[str, Callable[[bytes], int]] = MappingProxyType(
    {"md5": _hash_md5, "sha256": _hash_sha256, "double_sha256": _hash_double_sha256}
)
"""Name of each hash function, and the function from bytes to an unsigned number of 128 (md5) or 64 bits."""


# Types with a stable text, and how the type itself prints (an int by its repr: it has no __str__ of its own).
_PLAIN: Mapping[type, Callable[[Any], str]] = {
    int: int.__repr__,
    str: str.__str__,
    bool: bool.__repr__,
    type(None): str,
    uuid.UUID: uuid.UUID.__str__,
    datetime.datetime: datetime.datetime.__str__,
    datetime.date: datetime.date.__str__,
    Decimal: Decimal.__str__,
}

_brief = reprlib.Repr()
_brief.maxother = _brief.maxstring = _brief.maxlong = 80


def _show(value: object) -> str:
    return _brief.repr(value)[:80]


def _text(task_id: object) -> str:
    kind = type(task_id)
    if kind is str:
        return task_id  # type: ignore[return-value]
    for base, plain in _PLAIN.items():
        if kind is base or (isinstance(task_id, base) and str(task_id) == plain(task_id)):
            return plain(task_id)
    raise UnstableTaskId(
        f"task id {_show(task_id)} is of type {kind.__module__}.{kind.__qualname__}, whose text may differ from "
        "process to process: pass str(...) of it, or an int, str or UUID"
    )


def _encoded(task_id: object) -> bytes:
    try:
        data = _text(task_id).encode()
    except UnicodeEncodeError as error:
        raise InvalidTaskId(
            f"task id {_show(task_id)} has a lone surrogate at position {error.start}: "
            "decode the bytes it came from with the right encoding"
        ) from error
    except ValueError as error:
        raise InvalidTaskId(f"task id of type int is too long: {error}") from error
    if b"\0" in data:
        raise InvalidTaskId(
            f"task id {_show(task_id)} has a NUL character, which PostgreSQL cannot store: leave it out"
        )
    return data


def task_key(task_id: object) -> str:
    """The text by which a task is known: what is hashed, and what the library's tables hold.

    Parameters
    ----------
    task_id : object
        Int, str, bool, None, UUID, date, datetime or Decimal.

    Raises
    ------
    UnstableTaskId
        Another type, whose text may differ from process to process.
    InvalidTaskId
        The text has a NUL character or a lone surrogate.
    """
    return _encoded(task_id).decode()


def _check(total_tokens: int, hash_function: str) -> None:
    if hash_function not in HASH_FUNCTIONS:
        raise ConfigurationError(f"hash_function={hash_function!r} is none of {', '.join(sorted(HASH_FUNCTIONS))}")
    if type(total_tokens) is not int or not 1 <= total_tokens <= _MAX_TOTAL:
        raise ConfigurationError(f"total_tokens={total_tokens!r} must be a whole number from 1 to {_MAX_TOTAL}")


def task_to_token(task_id: object, total_tokens: int, hash_function: str = "double_sha256") -> int:
    """Token of a task, from 0 to ``total_tokens - 1``.

    Parameters
    ----------
    task_id : object
        See :func:`task_key`.
    total_tokens : int
        Tokens of the cluster, from 1 to 2**31 - 1.
    hash_function : str
        ``"md5"``, ``"sha256"`` or ``"double_sha256"``.

    Raises
    ------
    UnstableTaskId, InvalidTaskId
        See :func:`task_key`.
    ConfigurationError
        No such hash function, or a total out of range.

    Notes
    -----
    Value for value the function of jobsync 1.3; only its default hash function is not that one's.
    """
    _check(total_tokens, hash_function)
    return HASH_FUNCTIONS[hash_function](_encoded(task_id)) % total_tokens


def hasher(total_tokens: int, hash_function: str = "double_sha256") -> Callable[[object], int]:
    """:func:`task_to_token` for one cluster: settings are checked once, and each call is as fast as can be.

    Raises
    ------
    ConfigurationError
        No such hash function, or a total out of range.
    """
    _check(total_tokens, hash_function)
    if hash_function != "double_sha256":
        number = HASH_FUNCTIONS[hash_function]
        return lambda task_id: number(_encoded(task_id)) % total_tokens

    # The default is on the path of every claim, so it is written out: no call but the hash itself.
    sha, number_of, encoded = sha256, int.from_bytes, _encoded

    def token(task_id: object) -> int:
        try:
            if type(task_id) is str:
                data = task_id.encode()
                if 0 in data:
                    data = encoded(task_id)
            elif type(task_id) is int:
                data = b"%d" % task_id
            else:
                data = encoded(task_id)
        except ValueError:
            data = encoded(task_id)  # says what is wrong
        return number_of(sha(sha(data).digest()).digest()[:8], "big") % total_tokens

    return token


def _int8(hexadecimal: str) -> str:
    """SQL: 16 hexadecimal digits as a bigint with these bits."""
    return f"pg_catalog.int8(CAST(pg_catalog.textcat('x', {hexadecimal}) AS pg_catalog.bit(64)))"


def _int8_mod(bits: str, total: int) -> str:
    """SQL: the bigint ``bits``, read as unsigned, modulo ``total``.

    SQL's remainder has the sign of the dividend, and a negative dividend stands for one that is 2**64
    greater: so add ``2**64 % total`` to the remainder, and ``total`` to come out above zero.
    """
    return (
        f"pg_catalog.mod(pg_catalog.int8pl(pg_catalog.mod({bits}, {total}::pg_catalog.int8), "
        f"pg_catalog.int8and(pg_catalog.int8shr({bits}, 63), {2**64 % total + total}::pg_catalog.int8)), "
        f"{total}::pg_catalog.int8)"
    )


def token_function_ddl(qualified_name: str, total_tokens: int, hash_function: str = "double_sha256") -> str:
    """``CREATE OR REPLACE FUNCTION`` for the twin of :func:`task_to_token`: from text to integer.

    The function is immutable, strict (NULL gives NULL) and parallel safe, fit for a stored generated column
    or an index. It means the same under any ``search_path``, and needs PostgreSQL 12 and PL/pgSQL.

    Parameters
    ----------
    qualified_name : str
        Name of the function as it stands in SQL: quoted where needed, with its schema if it has one.
    total_tokens, hash_function : int, str
        As for :func:`task_to_token`. They become part of the body.

    Raises
    ------
    ConfigurationError
        No such hash function, or a total out of range.
    """
    _check(total_tokens, hash_function)
    # Measured on PostgreSQL 15, 100,000 rows, double_sha256: PL/pgSQL 0.25 s; LANGUAGE sql, put in place of
    # the call, 0.41 s, because it must hash twice to use the number twice; LANGUAGE sql that is not put in
    # place 0.75 s. A SET search_path clause would make 0.25 s 0.40; qualified names, and functions in place
    # of operators, cost nothing.
    text = "pg_catalog.convert_to($1, 'UTF8')"
    if hash_function == "md5":
        high = _int8_mod("high", total_tokens)
        low = _int8_mod("low", total_tokens)
        declared = (
            f"digest pg_catalog.text := pg_catalog.md5({text});\n"
            f"  high pg_catalog.int8 := {_int8('pg_catalog.substr(digest, 1, 16)')};\n"
            f"  low pg_catalog.int8 := {_int8('pg_catalog.substr(digest, 17, 16)')};"
        )
        token = (
            f"pg_catalog.mod(pg_catalog.int8pl(pg_catalog.int8mul({high}, "
            f"{2**64 % total_tokens}::pg_catalog.int8), {low}), {total_tokens}::pg_catalog.int8)"
        )
    else:
        digest = f"pg_catalog.sha256({text})"
        if hash_function == "double_sha256":
            digest = f"pg_catalog.sha256({digest})"
        head = f"pg_catalog.encode(pg_catalog.substr({digest}, 1, 8), 'hex')"
        declared = f"bits pg_catalog.int8 := {_int8(head)};"
        token = _int8_mod("bits", total_tokens)
    return f"""CREATE OR REPLACE FUNCTION {qualified_name}(pg_catalog.text) RETURNS integer
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $body$
DECLARE
  {declared}
BEGIN
  RETURN pg_catalog.int4({token});
END
$body$"""


def register_sqlite(
    dbapi_connection: Connection,
    function_name: str,
    total_tokens: int,
    hash_function: str = "double_sha256",
) -> None:
    """Give a SQLite connection the function that :func:`token_function_ddl` makes in PostgreSQL.

    Parameters
    ----------
    dbapi_connection : sqlite3.Connection
        The driver's connection, as SQLAlchemy's ``connect`` event passes it.
    function_name : str
        Bare name of the function.
    total_tokens, hash_function : int, str
        As for :func:`task_to_token`.
    """
    token = hasher(total_tokens, hash_function)
    dbapi_connection.create_function(
        function_name, 1, lambda key: None if key is None else token(key), deterministic=True
    )
