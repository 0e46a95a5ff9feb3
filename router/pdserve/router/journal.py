"""What the log says of one request: every line carries its label and session number, so that a label is found in the log."""

import logging

from pdserve.core.api_keys import Owner
from pdserve.core.build import Role
from pdserve.core.errors import PdserveError
from pdserve.core.ids import Incarnation
from pdserve.core.logs import RequestLogger
from pdserve.core.work import LegOutcome
from pdserve.router.events import Adopted, Event, FirstToken, LegEnded, Submitted
from pdserve.router.family import Family
from pdserve.router.instructions import Submit
from pdserve.router.lifecycle import IN_ATTEMPT, SessionState
from pdserve.router.session import Session

QUIET_OUTCOMES = frozenset({LegOutcome.FINISHED, LegOutcome.CANCELLED})
"""Ends of a leg that nobody needs to look at."""

logger = logging.getLogger(__name__)


class Journal:
    """The story of one session: its end at info, its failures as warnings, its milestones at debug."""

    def __init__(self, label: str, session: Session, family: Family) -> None:
        self._session, self._family = session, family
        facts = session.facts
        fields = {"request_id": label, "owner": facts.caller.owner, "session_id": facts.session_id}
        self.log = RequestLogger(logger, fields)

    def admitted(self) -> None:
        """Tell that the session is open."""
        facts = self._session.facts
        self.log.debug("admitted: %d prompt tokens, up to %d new ones", len(facts.prompt_ids), facts.max_tokens)

    def placed(self, submit: Submit) -> None:
        """Tell the nodes of an attempt."""
        nodes = f"prefill {short(submit.prefill)}" + (f", decode {short(submit.decode)}" if submit.decode else "")
        self.log.debug("placed on %s", nodes, extra={"attempt": submit.attempt})

    def happened(self, event: Event) -> None:
        """Tell the milestones of an attempt."""
        match event:
            case Submitted(attempt):
                self.log.debug("submitted", extra={"attempt": attempt})
            case FirstToken():
                self.log.debug("first token", extra={"attempt": event.attempt, "peer": short(event.node)})
            case Adopted():
                self.log.debug("adopted", extra={"attempt": event.attempt, "peer": short(event.node)})
            case _:
                pass

    def leg_ended(self, event: LegEnded) -> None:
        """Tell how a leg ended; only what ends a running attempt is worth a warning."""
        if event.outcome in QUIET_OUTCOMES:
            return
        session = self._session
        is_current = event.attempt == session.attempt and session.state in IN_ATTEMPT
        level = logging.WARNING if is_current else logging.DEBUG
        extra = {"attempt": event.attempt, "peer": short(event.node)}
        self.log.log(level, "leg %s: %s %s", event.outcome.name, event.reason, event.detail, extra=extra)

    def resuming(self) -> None:
        """Tell that an attempt ended and another follows."""
        session = self._session
        num_tokens = session.sequences.num_tokens
        extra = {"attempt": session.attempt}
        self.log.warning("attempt ended: %s; resuming after %d tokens", session.patience.told, num_tokens, extra=extra)

    def abandoned(self, node: Incarnation, attempt: int) -> None:
        """Tell of a leg that was never released."""
        extra = {"attempt": attempt, "peer": short(node)}
        self.log.error("a node never released a leg; %s", self._session.life.tell(), extra=extra)

    def broke(self) -> None:
        """Tell of a fault of ours, with the exception that is being handled."""
        self.log.exception("a session broke; its request fails")

    def forked(self, child: Session) -> None:
        """Tell that a sequence goes on in a session of its own."""
        extra = {"attempt": child.attempt}
        self.log.debug(
            "sequence %s goes on as session %d", child.sequences.unfinished, child.facts.session_id, extra=extra
        )

    def ended(self) -> None:
        """Tell how the request ended, in one line. The attempts and nodes are those of the session that ended last."""
        session, error = self._session, self._family.error
        match self._family.state:
            case SessionState.FINISHED:
                how = f"finished: {','.join(end.reason.name for end in self._family.ends)}"
            case SessionState.CANCELLED:
                how = "cancelled: the client left"
            case _:
                how = f"failed: {error.reason}: {error.message}" if error else "failed"
        self.log.info(
            "request %s; prompt_tokens=%d completion_tokens=%d attempts=%d ttft_ms=%s e2el_ms=%s %s",
            how,
            len(session.facts.prompt_ids),
            self._family.num_shown_tokens,
            session.attempt,
            _ms(session.timeline.ttft_s),
            _ms(session.e2el_s),
            self._nodes(),
        )

    def _nodes(self) -> str:
        legs = [leg for leg in self._session.legs if leg.attempt == self._session.attempt]
        names = {leg.role: short(leg.node) for leg in legs}
        return " ".join(f"{role.label}={names.get(role, '-')}" for role in (Role.PREFILL, Role.DECODE))


def refused(label: str, owner: Owner, error: PdserveError) -> None:
    """Tell of a request that got no session. `label` must be checked: it stands on the line."""
    extra = {"request_id": label, "owner": owner}
    logger.info("request refused: %s: %s", error.reason, error.message, extra=extra)


def short(node: Incarnation) -> str:
    """Return a node's short name."""
    return node.hex()[:8]


def _ms(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s * 1e3:.1f}"
