"""The tables that the consumers of a stream follow, and the publication's entries for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from ..decode import Relation
from ._consumer import Changes
from ._known import KnownConsumer
from ._store import StateStore, stored
from ._tables import Followed, Table, dump

__all__ = ["FollowedTables"]


class FollowedTables:
    """The tables of each consumer as they were last confirmed, in memory and in the state file.

    :param known: all consumers by their names.
    :param attached: returns the attached consumers.
    """

    def __init__(
        self,
        store: StateStore,
        known: Mapping[str, KnownConsumer],
        attached: Callable[[], list[Changes]],
    ) -> None:
        self._store, self._known, self._attached = store, known, attached
        #: The entries of the publication that were added here.
        self.added: set[int] = set()

    def of(self, name: str) -> Mapping[str, Followed]:
        """Return the tables that a consumer follows."""
        known = self._known.get(name)
        return {} if known is None else known.followed

    def contradicted(self, described: Collection[Relation]) -> bool:
        """Return whether the stream describes a table of an attached consumer as another one."""
        followed = [each for changes in self._attached() for each in self.of(changes.name).values()]
        return any(each.contradicts(now) for now in described for each in followed)

    def unused(self, wanted: Iterable[Table]) -> set[int]:
        """Return the added entries of the publication that no consumer follows or wants.

        Empty while the tables of a consumer are unknown: after a reset, until it attaches again.

        :param wanted: the tables of the attached consumers.
        """
        attached = {changes.name for changes in self._attached()}
        if not all(each.followed for name, each in self._known.items() if name not in attached):
            return set()
        members = {each.listed for each in wanted}
        for known in self._known.values():
            oids = ",".join(each.member for each in known.followed.values())
            members |= {int(oid) for oid in oids.split(",") if oid}
        return self.added - members

    async def keep_added(
        self, *, added: Collection[int] = (), removed: Collection[int] = ()
    ) -> None:
        """Store which entries of the publication were added here."""
        self.added = (self.added | set(added)) - set(removed)
        await stored(self._store.set_added, self.added)

    async def keep(self, followed: dict[str, str]) -> None:
        """Store which tables consumers follow, with one write for all consumers."""
        await stored(self._store.follow, followed)

    async def publication_changed(self, before: str, after: str) -> None:
        """Record a change of the publication by this process: no changes were missed by it."""
        for known in self._known.values():
            known.followed |= {
                wanted: each._replace(publication=after)
                for wanted, each in known.followed.items()
                if each.publication == before
            }
        await self.keep({name: dump(each.followed) for name, each in self._known.items()})
