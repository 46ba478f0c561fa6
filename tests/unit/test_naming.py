"""jobsync_orm.naming: two clusters never meet, and no name reaches SQL unquoted."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import MAX_APPNAME, Names, quote


def test_names_of_the_default_cluster() -> None:
    names = Names()
    assert names.bare("node") == "sync_node"
    assert names.sql("node") == '"sync_node"'
    assert names.token_function == "sync_token_of"
    assert names.version_table == "sync_alembic_version"


def test_schema_is_quoted_and_qualifies() -> None:
    assert Names("x_", 'we"ird.One').sql("token") == '"we""ird.One"."x_token"'


@pytest.mark.parametrize(
    "appname",
    ["", "Sync_", "sync-", "sync ", 'a"b', "a'b", "a;drop", "1a", "é_", "sync_\n", "a.b", "a%s", "a:b", "\0"],
)
def test_an_appname_that_is_no_plain_identifier_is_refused(appname: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Names(appname)
    assert repr(appname) in str(caught.value)
    assert "[a-z_][a-z0-9_]*" in str(caught.value)


@pytest.mark.parametrize("appname", [None, 7, b"sync_"])
def test_an_appname_that_is_no_string_is_refused(appname: object) -> None:
    with pytest.raises(ConfigurationError, match="appname"):
        Names(appname)  # type: ignore[arg-type]


def test_the_longest_appname_fits_and_one_more_does_not() -> None:
    assert Names("a" * MAX_APPNAME).appname == "a" * MAX_APPNAME
    with pytest.raises(ConfigurationError, match=f"has {MAX_APPNAME + 1} characters; at most {MAX_APPNAME}"):
        Names("a" * (MAX_APPNAME + 1))


@pytest.mark.parametrize("schema", ["", "x" * 64, "ü" * 32, "nul\0"])
def test_a_schema_postgresql_could_not_keep_is_refused(schema: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 63 bytes"):
        Names(schema=schema)


def test_a_schema_of_63_bytes_is_taken() -> None:
    assert Names(schema="ü" * 31 + "x").schema == "ü" * 31 + "x"


@given(st.text())
def test_quoting_can_be_undone(identifier: str) -> None:
    quoted = quote(identifier)
    assert quoted[0] == quoted[-1] == '"'
    assert quoted[1:-1].replace('""', '"') == identifier
    assert '"' not in quoted[1:-1].replace('""', "")


def test_clusters_differ_in_every_channel_and_key() -> None:
    # The last two would collide if the parts were only put one after the other.
    clusters = [Names(), Names("x_"), Names("sync_", "s"), Names("x_", "s"), Names("sx_", None), Names("c", "ab")]
    assert len({names.cluster_channel for names in clusters}) == len(clusters)
    assert len({names.node_channel("n") for names in clusters}) == len(clusters)
    assert len({names.advisory_key("migrate") for names in clusters}) == len(clusters)
    assert Names("bc", "a").advisory_key("x") != Names("c", "ab").advisory_key("x")


def test_a_node_cannot_take_the_clusters_channel() -> None:
    names = Names()
    channels = {names.cluster_channel, names.node_channel(""), names.node_channel("cluster"), names.node_channel("a")}
    assert len(channels) == 4


@given(st.text(max_size=300))
def test_channels_fit_into_an_identifier_whatever_the_node_is_called(node: str) -> None:
    channel = Names().node_channel(node)
    assert len(channel.encode()) <= 63
    assert channel.isidentifier()
    assert channel == channel.lower()


@given(st.text(), st.text())
def test_advisory_keys_are_signed_64_bit_and_told_apart_by_their_parts(one: str, other: str) -> None:
    names = Names()
    key = names.advisory_key("node", one)
    assert -(2**63) <= key < 2**63
    assert (key == names.advisory_key("node", other)) == (one == other)
    assert key != names.advisory_key("leader", one)


def test_names_are_values() -> None:
    assert Names("x_", "s") == Names("x_", "s")
    assert hash(Names("x_", "s")) == hash(Names("x_", "s"))
    assert pickle.loads(pickle.dumps(Names("x_", "s"))) == Names("x_", "s")


def test_channels_and_keys_are_the_same_in_every_release() -> None:
    # Two releases may run side by side during a deploy.
    names = Names("billing_", "jobs")
    assert names.cluster_channel == "jobsync_0729263da3eec67bdf09707acaab3838ec15d8a8"
    assert names.node_channel("worker-1") == "jobsync_06fed146791fefb74f9d47c33d52b231c6934627"
    assert names.advisory_key("migrate") == 8805436590841037886
