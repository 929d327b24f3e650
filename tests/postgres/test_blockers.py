"""SQL of other sessions is shown without literals and comments."""

from __future__ import annotations

import pytest

from moored.postgres.server._admin import without_literals

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("alter role a password 's3''cret'", "alter role a password …"),
        (r"select E's3\'cret', 1", "select …, …"),
        ("select $$s3cret$$, $x$s3 $$ cret$x$, t1.a", "select …, …, t1.a"),
        ("select 'cut off s3cr", "select …"),
        ("select $a$cut off s3cr", "select …"),
        ("update t set n = 4111.11 -- s3cret", "update t set n = … …"),
        ("/* s3cret */ select\n a", "… select a"),
        ("/* s3\ncret */ select a", "… select a"),
        ("select a /* cut off s3cr", "select a …"),
        ("select 's3\ncret', $$s3\ncret$$", "select …, …"),
    ],
)
def test_literals_and_comments_are_removed_from_queries(query: str, shown: str) -> None:
    assert without_literals(query) == shown
