"""Authentication: finds the principal of a request by its API key, and the limits in force."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from semantic.application.requests.limits import RateLimits
from semantic.domain.access import KeyRing
from semantic.domain.agents import LOCAL_TENANT, Principal
from semantic.domain.errors import AuthenticationError, InvalidRequestError


class Access:
    """Authenticates requests against the current API keys.

    Thread-safe: `reload` replaces the key ring as a whole.
    """

    def __init__(
        self,
        load: Callable[[], KeyRing],
        principal: Callable[[str], Principal],
        on_loaded: Callable[[KeyRing], None] = lambda _: None,
    ) -> None:
        """Load the keys; raises InvalidRequestError if they cannot be read."""
        self._load = load
        self._principal = principal
        self._on_loaded = on_loaded
        self.ring = load()
        self._limits = RateLimits(lambda: self.ring)
        on_loaded(self.ring)

    def reload(self) -> None:
        """Load the keys again; if that fails, the current keys stay in force.

        Raises:
            InvalidRequestError: the keys cannot be read, or there are none although there were
                some: a lost key file must not make the server public.
        """
        ring = self._load()
        if self.ring.is_guarded and not ring.is_guarded:
            raise InvalidRequestError(
                "the key file has no keys; the current keys stay in force until a restart.",
                param="key_file",
            )
        self.ring = ring
        self._on_loaded(ring)

    def limits(self) -> RateLimits | None:
        return self._limits if self.ring.has_limits else None

    def authenticate(self, secrets: Iterable[str]) -> Principal:
        """Return the principal of a request, whose client may send two keys.

        Raises:
            AuthenticationError: no key is valid. The message does not reveal the cause.
        """
        ring = self.ring
        if not ring.is_guarded:
            return self._known(ring, LOCAL_TENANT, is_admin=True)
        for key in map(ring.find_key, secrets):
            if key is not None:
                return self._known(ring, key.tenant, key_id=key.id, is_admin=key.is_admin)
        raise AuthenticationError(
            "valid API key required: send it as x-api-key, or as authorization: Bearer."
        )

    def _known(
        self, ring: KeyRing, tenant: str, *, key_id: str = "", is_admin: bool = False
    ) -> Principal:
        weight = ring.policy(tenant).weight
        return replace(self._principal(tenant), weight=weight, key_id=key_id, is_admin=is_admin)
