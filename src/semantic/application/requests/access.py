"""Who is asking, by the keys there are now."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from semantic.domain.access import KeyRing
from semantic.domain.agents import LOCAL_TENANT, Principal
from semantic.domain.errors import AuthenticationError, InvalidRequestError


class Access:
    """The keys in force. Safe on any thread: they are replaced as a whole.

    Attributes:
        ring: All keys and limits.
    """

    def __init__(self, load: Callable[[], KeyRing], principal: Callable[[str], Principal]) -> None:
        """Read the keys.

        Args:
            load: Reads them, from wherever they are.
            principal: Finds a tenant, or makes it with a salt of its own.

        Raises:
            InvalidRequestError: they cannot be read.
        """
        self._load = load
        self._principal = principal
        self.ring = load()

    def reload(self) -> None:
        """Read the keys again; those in force stay if that fails.

        Raises:
            InvalidRequestError: they cannot be read, or there are none where there were some: a
                lost file must not open a server to everybody.
        """
        ring = self._load()
        if self.ring.is_guarded and not ring.is_guarded:
            raise InvalidRequestError(
                "there are no keys any more; those in force stay until a restart.",
                param="key_file",
            )
        self.ring = ring

    def authenticate(self, secrets: Iterable[str]) -> Principal:
        """Say on whose behalf a request comes.

        Args:
            secrets: What it sent as its key; clients may send two.

        Raises:
            AuthenticationError: none of them is a key. Says nothing else, whatever was wrong.
        """
        ring = self.ring
        if not ring.is_guarded:
            return self._known(ring, LOCAL_TENANT, is_admin=True)
        for key in map(ring.find, secrets):
            if key is not None:
                return self._known(ring, key.tenant, key_id=key.id, is_admin=key.is_admin)
        raise AuthenticationError(
            "a valid key is needed: send it as x-api-key, or as authorization: Bearer."
        )

    def _known(
        self, ring: KeyRing, tenant: str, *, key_id: str = "", is_admin: bool = False
    ) -> Principal:
        weight = ring.policy(tenant).weight
        return replace(self._principal(tenant), weight=weight, key_id=key_id, is_admin=is_admin)
