"""What backends have in common that compute a step the moment it is launched."""

from dataclasses import dataclass

from semantic.ports.backend import KVPayload, StepOutput, Ticket


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
