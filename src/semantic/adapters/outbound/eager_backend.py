"""What backends have in common that compute a step the moment it is launched."""

from dataclasses import dataclass

from semantic.domain.errors import CacheCorruptionError
from semantic.ports.outbound import KVPayload, PayloadSlice, StepOutput, Ticket


@dataclass(frozen=True, slots=True)
class StepTicket:
    """A step that is computed."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class PayloadTicket:
    """A snapshot that is taken."""

    payload: KVPayload


class EagerBackend:
    """The half of `ModelBackendPort` that only hands over what is there."""

    def collect(self, ticket: Ticket) -> StepOutput:
        """Return what `launch` computed."""
        if not isinstance(ticket, StepTicket):
            raise TypeError("not the ticket of a step of this backend")
        return ticket.output

    def payload(self, ticket: Ticket) -> KVPayload:
        """Return what `snapshot` copied."""
        if not isinstance(ticket, PayloadTicket):
            raise TypeError("not the ticket of a snapshot of this backend")
        return ticket.payload


def check_follows(part: PayloadSlice, position: int, abi: str) -> None:
    """See that a payload is of this backend and continues at `position`.

    Raises:
        CacheCorruptionError: it is not, or does not.
    """
    payload = part.payload
    if payload.abi != abi:
        raise CacheCorruptionError(f"a payload of {payload.abi} cannot be loaded")
    if payload.start != position or not payload.start < part.end <= payload.end:
        raise CacheCorruptionError(f"a payload from {payload.start} does not follow {position}")
