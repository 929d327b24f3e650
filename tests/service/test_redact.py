"""What is shown of a connection string holds no secret."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moored.service._redact import place_of, redact_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:pw@db/orders", "postgresql://app:********@db/orders"),
        ("postgresql://app:p:w@x@db:1/o", "postgresql://app:********@db:1/o"),
        ("postgresql://app:p/w@db/o", "postgresql://app:********@db/o"),
        ("postgresql://:pw@db", "postgresql://:********@db"),
        ("postgresql://app@db:5432/o", "postgresql://app@db:5432/o"),
        ("postgresql://db:5432/o", "postgresql://db:5432/o"),
        ("postgresql:///o?host=/run&password=pw", "postgresql:///o?host=/run&password=********"),
        ("postgresql://db/o?PASSWORD=pw&x=1", "postgresql://db/o?PASSWORD=********&x=1"),
        ("host=db password=pw user=a", "host=db password=******** user=a"),
        (r"host=db password = 'p w\' x' user=a", "host=db password = ******** user=a"),
        ("host=db sslpassword=pw", "host=db sslpassword=********"),
    ],
)
def test_the_password_is_hidden_and_the_rest_is_not(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(st.text(min_size=4), st.booleans())
def test_no_password_shines_through(password: str, escaped: bool) -> None:
    written = quote(password, safe="") if escaped else password
    assume(written.strip("*") and written not in "postgresql://app:@db/orders")
    assert written not in redact_url(f"postgresql://app:{written}@db/orders")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://app:pw@db/orders", "db:5432/orders"),
        ("postgresql://app@db:6000", "db:6000/app"),
        ("postgresql://a:1,b:2/o", "a:1,b:2/o"),
        ("host=a,b port=7 dbname=o", "a:7,b:7/o"),
        ("host=/run/postgresql", "/run/postgresql:5432"),
        ("dbname=o", "localhost:5432/o"),
    ],
)
def test_a_place_is_short_and_has_no_secrets(url: str, place: str) -> None:
    assert place_of(url) == place
