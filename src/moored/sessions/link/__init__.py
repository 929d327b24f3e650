"""The connection of a session: one link after another, and the rules for making them."""

from ._closing_links import ClosingLinks
from ._connection import Connection
from ._core import CHART, PAUSES, LastLoss, SessionCore
from ._credentials import Credentials, CredentialsProvider
from ._link import Link
from ._offline_server import OfflineServer

__all__ = [
    "CHART",
    "PAUSES",
    "ClosingLinks",
    "Connection",
    "Credentials",
    "CredentialsProvider",
    "LastLoss",
    "Link",
    "OfflineServer",
    "SessionCore",
]
