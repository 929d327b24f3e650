"""Tokens for Aurora DSQL and for RDS with IAM, signed by botocore.

A token is signed on this machine, without a call to AWS. That takes about 0.1 ms; creating the
client that signs takes some 50 ms, so each provider creates it once::

    AsyncConnectionPool(
        "host=CLUSTER.dsql.eu-central-1.on.aws dbname=postgres user=admin sslmode=verify-full",
        kwargs={"sslrootcert": "system"},
        tokens=DsqlTokens("CLUSTER.dsql.eu-central-1.on.aws"),
    )

A token expires with the credentials that signed it, even if its own lifetime is longer: providers
return the earlier of the two times, and the pool fetches the next token before. This module needs
`moored[aws]`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from typing import Any, ClassVar

from moored.kernel import describe, extra, refuse

from ._errors import TokenError
from ._tokens import Token

__all__ = ["DsqlTokens", "RdsTokens"]

#: The longest lifetime of a token for Aurora DSQL: a week.
LONGEST = 604_800
#: The fixed lifetime of a token for RDS.
RDS_LIFETIME = 900

_DSQL_HOST = re.compile(r"\.dsql(?:-[a-z0-9]+)?\.([a-z0-9-]+)\.on\.aws$")
_RDS_HOST = re.compile(r"\.(?:([a-z0-9-]+)\.rds|rds\.([a-z0-9-]+))\.amazonaws\.com(?:\.cn)?$")


class _Signer:
    """Signs tokens for one user of one host, with one client, from any thread."""

    _service: ClassVar[str]
    _hosts: ClassVar[re.Pattern[str]]

    def __init__(
        self,
        host: str,
        *,
        region: str | None = None,
        user: str = "admin",
        lifetime: int = 900,
        session: Any = None,
    ) -> None:
        refuse(type(self).__name__, _mistakes(host, user, lifetime))
        self.host = host
        self.user = user
        #: The maximum lifetime of a token, in seconds.
        self.lifetime = lifetime
        self._session = _new_session() if session is None else session
        self.region = region or self._region_in_host() or self._region_of_session()
        self._lock = threading.Lock()
        self._client: Any = None
        self._credentials: Any = None

    def __call__(self) -> Token:
        """Return a new token, with the time when it expires."""
        try:
            client = self._ready_client()
            # This renews credentials that are due, so that the new ones sign the token.
            self._credentials.get_frozen_credentials()
            ends = self._end_of_credentials()
            signed_at = math.floor(time.time())
            value = self._sign(client)
        except TokenError:
            raise
        except Exception as error:
            raise TokenError(f"no token for {self._target()}: {describe(error)}") from error
        # Another thread may have renewed them meanwhile: then either may have signed.
        ends = min(ends, self._end_of_credentials())
        return Token(value, min(signed_at + self.lifetime, ends))

    def _sign(self, client: Any) -> str:
        raise NotImplementedError

    def _ready_client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._credentials = self._session.get_credentials()
                if self._credentials is None:
                    raise TokenError(
                        f"no token for {self._target()}: there are no AWS credentials; set "
                        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run "
                        "with an IAM role (ECS, EKS, EC2, Lambda)"
                    )
                self._client = _make_client(self._session, self._service, self.region)
            return self._client

    def _end_of_credentials(self) -> float:
        """When the credentials expire, in seconds since 1970; infinity if they are static."""
        ends = getattr(self._credentials, "_expiry_time", None)
        return math.inf if ends is None else float(ends.timestamp())

    def _region_in_host(self) -> str | None:
        found = self._hosts.search(self.host.lower())
        return next((group for group in found.groups() if group), None) if found else None

    def _region_of_session(self) -> str:
        region = _region_of(self._session)
        if not region:
            raise TokenError(
                f"no AWS region for {self._target()}, and its name contains none: pass region=, or "
                "set AWS_DEFAULT_REGION"
            )
        return region

    def _target(self) -> str:
        return f"{self.user}@{self.host}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target()}, {self.region}>"


class DsqlTokens(_Signer):
    """Signs tokens for Aurora DSQL.

    :param host: the cluster's endpoint, as in the conninfo.
    :param region: the cluster's region; by default from the host's name.
    :param user: the database role. Only `admin` gets a token for administrators, and the AWS
        identity then needs `dsql:DbConnectAdmin` instead of `dsql:DbConnect`.
    :param lifetime: the lifetime of a token in seconds, up to a week. A session continues when its
        token expires.
    :param session: a session of botocore or boto3; by default a new one.
    """

    _service = "dsql"
    _hosts = _DSQL_HOST

    def _sign(self, client: Any) -> str:
        sign = client.generate_db_connect_auth_token
        if self.user == "admin":
            sign = client.generate_db_connect_admin_auth_token
        return str(sign(self.host, self.region, self.lifetime))


class RdsTokens(_Signer):
    """Signs tokens for a user of RDS or Aurora who logs in with IAM; each is valid for 15 minutes.

    :param host: the endpoint of the database or of its proxy; not an alias, because the name is
        signed.
    :param port: the port of that endpoint, which is signed too.
    :param user: the database user; it needs the role `rds_iam`.
    :param region: the database's region; by default from the host's name.
    :param session: a session of botocore or boto3; by default a new one.
    """

    _service = "rds"
    _hosts = _RDS_HOST

    def __init__(
        self,
        host: str,
        port: int = 5432,
        *,
        user: str,
        region: str | None = None,
        session: Any = None,
    ) -> None:
        self.port = port
        super().__init__(host, region=region, user=user, lifetime=RDS_LIFETIME, session=session)

    def _sign(self, client: Any) -> str:
        return str(client.generate_db_auth_token(self.host, self.port, self.user, self.region))


def _new_session() -> Any:
    with extra("aws", "a token for AWS"):
        import botocore.session  # type: ignore[import-untyped]
    return botocore.session.get_session()


def _make_client(session: Any, service: str, region: str) -> Any:
    # `create_client` is botocore's name, `client` is boto3's.
    make = getattr(session, "create_client", None) or session.client
    return make(service, region_name=region)


def _region_of(session: Any) -> str | None:
    if hasattr(session, "get_config_variable"):
        region: str | None = session.get_config_variable("region")
    else:
        region = session.region_name
    return region


def _mistakes(host: str, user: str, lifetime: int) -> list[str]:
    found = []
    if not host or re.search(r"[\s/:@]", host):
        found.append(f"host={host!r} must be only a host name, without scheme, port or user")
    if not user:
        found.append("user must be the name of the database user, and not empty")
    if not 1 <= lifetime <= LONGEST:
        found.append(f"lifetime={lifetime!r} must be between 1 s and {LONGEST} s (a week)")
    return found
