"""Secrets are hidden by their value, in every encoding in which a text may quote them."""

from __future__ import annotations

import json
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from moored.kernel import SECRETS, Secrets, describe, redacted, unescaped_password

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://app:pw@db/orders", "postgresql://app:***@db/orders"),
        ("postgresql://app:p:w@x@db:1/o", "postgresql://app:***@db:1/o"),
        ("postgresql://app:p/w@db/o", "postgresql://app:***@db/o"),
        ("postgresql://app:p?w=1@db/o", "postgresql://app:***@db/o"),
        ("postgresql://a@corp:pw@db/o", "postgresql://a@corp:***@db/o"),
        ("postgresql://us/er:pw@db/o", "postgresql://us/er:***@db/o"),
        ("postgresql://:pw@db", "postgresql://:***@db"),
        ("postgresql://u:pw@[::1]:5432/o", "postgresql://u:***@[::1]:5432/o"),
        ("postgresql://u:pw@h/o?options=x@y", "postgresql://u:***@h/o?options=x@y"),
        ("postgresql://app@db:5432/o", "postgresql://app@db:5432/o"),
        ("postgresql://u@[::1]:5432/o", "postgresql://u@[::1]:5432/o"),
        ("postgresql://db:5432/o", "postgresql://db:5432/o"),
        ("postgresql://db:5432/o?options=x@y", "postgresql://db:5432/o?options=x@y"),
        ("postgresql:///o?host=/run&password=pw", "postgresql:///o?host=/run&password=***"),
        ("postgresql://db/o?PASSWORD=pw&x=1", "postgresql://db/o?PASSWORD=***&x=1"),
        ("postgresql://db/o?passw%6Frd=pw&x=1", "postgresql://db/o?passw%6Frd=***&x=1"),
        ("postgresql://db/o?password=p&w&x=1", "postgresql://db/o?password=***&***&x=1"),
        ("postgresql://db/o?oauth_client_secret=s", "postgresql://db/o?oauth_client_secret=***"),
        ("me:pw@db/o", "me:***@db/o"),
        ("postgresql//me:p=w@db/o", "postgresql//me:***@db/o"),
        ("postgresql:/me:p w@db/o", "postgresql:***@db/o"),
        ("dynamodb://t?secret_access_key=abc&x=1", "dynamodb://t?secret_access_key=***&x=1"),
        ("host=db password=pw user=a", "host=db password=*** user=a"),
        (r"host=db password=S3\ CRET user=a", "host=db password=*** user=a"),
        ("host=db password=S3 CRET user=a", "host=db password=*** *** user=a"),
        (r"host=db password = 'p w\' x' user=a", "host=db password = *** user=a"),
        ("host=db password='p w", "host=db password=***"),
        ("sslpassword=a scram_client_key=b scram_server_key=c oauth_client_secret=d", None),
        ("host=db user=a passfile=/x require_auth=password", ""),
    ],
)
def test_the_secrets_of_a_connection_string_are_hidden_and_the_rest_is_not(
    text: str, shown: str | None
) -> None:
    if shown is None:
        shown = " ".join(f"{word.partition('=')[0]}=***" for word in text.split())
    assert redacted(text) == (shown or text)


@pytest.mark.parametrize(
    ("url", "ambiguous"),
    [
        ("postgresql://app:p@ss@db/o", True),
        ("postgresql://app:p/ss@db/o", True),
        ("postgresql://a@corp:pw@db/o", False),
        ("postgresql://app:p%40ss:%2F@db/o?x=a@b", False),
        ("postgresql://app@db:5432/o", False),
        ("host=db password=p@s/s", False),
    ],
)
def test_a_password_that_a_url_must_escape_is_recognised(url: str, ambiguous: bool) -> None:
    assert unescaped_password(url) is ambiguous


passwords = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x17F, exclude_characters="\x7f*"), min_size=4
)


@given(passwords, st.booleans())
@example("p@ss/w0rd", False)
@example("100%zzz", False)
@example("pa?b=cde", False)
def test_no_password_of_a_url_is_quoted_by_libpq(password: str, escaped: bool) -> None:
    written = quote(password, safe="") if escaped else password
    url = f"postgresql://app:{written}@db/orders"
    assume(written not in "postgresql://app:***@db/orders")
    assert written not in redacted(url)
    known = Secrets()
    known.add_from(url)
    try:
        values = conninfo_to_dict(url)
    except psycopg.Error as error:
        said = str(error)
    else:
        said = " ".join(f'"{value}"' for name, value in values.items() if name != "user")
    hidden = known.hide(said)
    assert password not in hidden
    pieces = [piece for piece in password.replace("/", "@").split("@") if len(piece) >= 4]
    pieces = [piece for piece in pieces if not piece.isdigit()]
    assert not [piece for piece in pieces if piece in hidden and piece not in "app db orders"]


@given(passwords)
@example("0://")
def test_a_password_is_hidden_in_every_form_of_writing_it(password: str) -> None:
    assume(password not in ("host", "password"))
    known = Secrets()
    known.add_from(make_conninfo(host="db", password=password))
    for form in (password, quote(password, safe=""), json.dumps(password), f"{password!r}"):
        assert password not in (hidden := known.hide(f"error: {form} is wrong"))
        assert quote(password, safe="") not in hidden or password in "error is wrong"


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cr?a=word@db",
        "redis://u:s3cr#word@db",
        "u:s3cr=word@db",
        "redis:/u:s3cr=word@db",
    ],
)
def test_no_part_of_a_password_that_a_parser_cut_apart_is_shown(url: str) -> None:
    known = Secrets()
    known.add_from(url)
    assert known.hide("'s3cr' is no port, \"u:s3cr\" no option, 'word@db' no host") == (
        "'***' is no port, \"u:***\" no option, '***@db' no host"
    )


@pytest.mark.parametrize(
    ("password", "meant"),
    [("x%25%21y", "x%!y"), ("%25%34%30%31x", "%401x"), ("s#25?on@2026", "s#25?on@2026")],
)
def test_a_short_piece_of_a_password_or_a_number_in_it_is_not_hidden(
    password: str, meant: str
) -> None:
    known = Secrets()
    known.add_from(f"postgresql://app:{password}@db/orders")
    said = "on 2026-11-19 at 10:25:00, line 25 of 21y: 401 rows"
    assert known.hide(said) == said
    assert known.hide(f"{password!r} or {meant!r}") == "'***' or '***'"


def test_a_short_secret_is_hidden_only_as_a_whole_word() -> None:
    known = Secrets()
    known.add("as", "x")
    said = 'password "as" of host "x@db": as_as, has'
    assert known.hide(said) == 'password "***" of host "***@db": ***_***, has'


def test_a_password_that_is_also_the_user_does_not_blank_the_user_everywhere() -> None:
    known = Secrets()
    known.add_from("postgresql://postgres:postgres@db/postgres")
    assert known.hide('failed for user "postgres"') == 'failed for user "postgres"'


def test_only_the_newest_secrets_are_kept() -> None:
    known = Secrets()
    for number in range(300):
        known.add(f"token-{number:04}")
    assert known.hide("token-0299 token-0000") == "*** token-0000"
    assert repr(known) == "<Secrets: 256>"


def test_describe_hides_the_secrets_of_this_process() -> None:
    SECRETS.add("q7-very-secret-q7")
    error = ValueError("invalid token q7-very-secret-q7")
    assert describe(error) == "invalid token *** (ValueError)"
    assert "q7-very" not in describe(ExceptionGroup("several", [error]))
