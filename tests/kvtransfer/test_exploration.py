"""Every order of delivery, loss, duplicate, end, deadline, break and restart of a small transfer; mutants that it must catch."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.core.ids import TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import Opened, ReceiveClosed
from pdserve.kvtransfer.framing import FramePlanner, FrameRange
from pdserve.kvtransfer.instructions import Emit, Send
from pdserve.kvtransfer.memory import Tombstones
from pdserve.kvtransfer.messages import Beat, Commit, Data, Message, NackReason, Open
from pdserve.kvtransfer.receive_window import ReceiveWindow
from pdserve.kvtransfer.receiver import ReceiveTransfer
from pdserve.kvtransfer.receiver_link import ReceiverLink
from pdserve.kvtransfer.receiver_table import ReceiverTable
from pdserve.kvtransfer.sender import SendState, SendTransfer
from tests.kvtransfer import scenarios
from tests.kvtransfer.explore import Scenario, search
from tests.kvtransfer.model_parts import Broken

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_order_breaks_a_rule(scenario: Scenario) -> None:
    """Never raises, each place freed once, every run ends, nothing delivered that was not sent."""
    found = search(scenario)
    print(f"{scenario.name}: {found}")  # noqa: T201 - the record of the run
    assert found.is_whole, "the search was cut short"
    if scenario is not scenarios.STALE:
        assert any("received" in outcome for outcome in found.outcomes), "the search never saw a success"


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", scenarios.DEEP, ids=lambda scenario: scenario.name)
def test_no_order_breaks_a_rule_with_larger_budgets(scenario: Scenario) -> None:
    found = search(scenario)
    print(f"{scenario.name}: {found}")  # noqa: T201 - the record of the run
    assert found.is_whole or scenario.depth < Scenario.depth, "the search was cut short"
    assert any("received" in outcome for outcome in found.outcomes), "the search never saw a success"


def test_a_false_claim_to_hold_a_prefix_is_not_found_out() -> None:
    """A stated limit: GRANT says how much is held, not of what. That this is the prompt's is the decode node's own proof."""
    with pytest.raises(Broken, match="bytes that were not sent"):
        search(scenarios.FALSELY_HELD)


def no_tombstone(patch: Patch) -> None:
    patch.setattr(Tombstones, "add", lambda *_: None)


def no_attempt_check(patch: Patch) -> None:
    mismatch, data, commit = ReceiveTransfer._open_mismatch, ReceiveTransfer._data_fault, ReceiveTransfer._commit_fault

    def any_open(self: ReceiveTransfer, message: Open) -> str:
        return mismatch(self, replace(message, attempt=self.spec.attempt))

    def any_data(self: ReceiveTransfer, message: Data, payload: memoryview) -> tuple[NackReason, str] | None:
        return data(self, replace(message, attempt=self.spec.attempt), payload)

    def any_commit(self: ReceiveTransfer, message: Commit) -> tuple[NackReason, str] | None:
        return commit(self, replace(message, attempt=self.spec.attempt))

    patch.setattr(ReceiveTransfer, "_open_mismatch", any_open)
    patch.setattr(ReceiveTransfer, "_data_fault", any_data)
    patch.setattr(ReceiveTransfer, "_commit_fault", any_commit)


def double_release(patch: Patch) -> None:
    end = ReceiveTransfer._end

    def twice(self: ReceiveTransfer, answer: None) -> None:
        end(self, answer)
        self._out.append(Emit(ReceiveClosed(self.spec.transfer_id)))

    patch.setattr(ReceiveTransfer, "_end", twice)


def lost_window_update(patch: Patch) -> None:
    patch.setattr(ReceiveWindow, "grow", lambda self: False)
    patch.setattr(ReceiveWindow, "top_up", lambda self: None)


def window_only_once(patch: Patch) -> None:
    """The window travels only in the beat that a frame causes: one lost beat and the sender waits for ever."""
    expire = ReceiverLink.expire

    def without_window(self: ReceiverLink, parked: tuple[TransferId, ...], now_s: float) -> str | None:
        num_said = len(self._out)
        lost = expire(self, parked, now_s)
        if len(self._out) > num_said and isinstance(said := self._out[-1], Send) and isinstance(said.message, Beat):
            self._out[-1] = Send(self.route, replace(said.message, window_limit=0))
        return lost

    patch.setattr(ReceiverLink, "expire", without_window)


def no_checksum(patch: Patch) -> None:
    fault = ReceiveTransfer._data_fault

    def trusting(self: ReceiveTransfer, message: Data, payload: memoryview) -> tuple[NackReason, str] | None:
        found = fault(self, message, payload)
        return None if found is not None and found[0] is NackReason.CHECKSUM else found

    patch.setattr(ReceiveTransfer, "_data_fault", trusting)


def a_count_is_no_coverage(patch: Patch) -> None:
    patch.setattr(ReceiveTransfer, "_commit_fault", lambda self, message: None)


def no_deadline_after_grant(patch: Patch) -> None:
    def never(self: ReceiveTransfer, now_s: float) -> None:
        self.due_s = self._silent_until_s = float("inf")

    patch.setattr(ReceiveTransfer, "_renew", never)


def a_lost_link_keeps_its_transfers(patch: Patch) -> None:
    def only_the_link(self: ReceiverTable, link: ReceiverLink, reason: str, now_s: float) -> None:
        link.lost(reason, now_s)
        self._forget(link)

    patch.setattr(ReceiverTable, "_link_lost", only_the_link)


def what_came_counts_on_the_next_connection(patch: Patch) -> None:
    """Coverage is not reset when a connection breaks."""
    lost = ReceiveTransfer.link_lost

    def keep(self: ReceiveTransfer, reason: str, now_s: float) -> None:
        known = self._coverage
        lost(self, reason, now_s)
        self._coverage = known

    patch.setattr(ReceiveTransfer, "link_lost", keep)


def frames_are_counted_over_connections(patch: Patch) -> None:
    lost = ReceiveTransfer.link_lost

    def keep(self: ReceiveTransfer, reason: str, now_s: float) -> None:
        known = self._sequence
        lost(self, reason, now_s)
        self._sequence = known

    patch.setattr(ReceiveTransfer, "link_lost", keep)


def what_was_sent_is_not_sent_again(patch: Patch) -> None:
    patch.setattr(FramePlanner, "rewind", lambda self: None)


def a_late_frame_of_the_old_connection_is_taken(patch: Patch) -> None:
    message = ReceiverTable.message

    def on_any(self: ReceiverTable, route: Route, said: Message, payload: memoryview, now_s: float) -> None:
        if isinstance(said, Data) and route not in self._links:
            route = next((link.route for link in self._links.values() if link.is_up), route)
        message(self, route, said, payload, now_s)

    patch.setattr(ReceiverTable, "message", on_any)


def an_answer_given_again_is_not_taken(patch: Patch) -> None:
    acked = SendTransfer.acked

    def only_committed(self: SendTransfer, now_s: float) -> None:
        if self.life.state is SendState.COMMITTED:
            acked(self, now_s)

    patch.setattr(SendTransfer, "acked", only_committed)


def the_node_is_asked_again(patch: Patch) -> None:
    again = ReceiveTransfer._opened_again

    def ask(self: ReceiveTransfer, now_s: float) -> None:
        again(self, now_s)
        self._out.append(Emit(Opened(self.spec.transfer_id)))

    patch.setattr(ReceiveTransfer, "_opened_again", ask)


def the_grant_is_forgotten(patch: Patch) -> None:
    lost = ReceiveTransfer.link_lost

    def forget(self: ReceiveTransfer, reason: str, now_s: float) -> None:
        lost(self, reason, now_s)
        self._is_promised = False

    patch.setattr(ReceiveTransfer, "link_lost", forget)


def skips_nothing(patch: Patch) -> None:
    patch.setattr(FramePlanner, "skip", lambda self, num_tokens: None)


def plans_a_frame_again_that_was_sent(patch: Patch) -> None:
    take = FramePlanner.take

    def keep(self: FramePlanner, frame: FrameRange) -> None:
        known = self._next
        take(self, frame)
        self._next, self._is_next_known = known, True

    patch.setattr(FramePlanner, "take", keep)


def packs_after_the_end(patch: Patch) -> None:
    patch.setattr(SendTransfer, "is_over", property(lambda self: False))
    patch.setattr(SendTransfer, "peek", lambda self: self._planner.peek() if self.route else None)
    close = SendTransfer._close

    def leaky(self: SendTransfer, now_s: float) -> None:
        self._planner.clear, kept = lambda: None, self._planner.clear  # type: ignore[method-assign]  # the fault
        close(self, now_s)
        self._planner.clear = kept  # type: ignore[method-assign]  # put back

    patch.setattr(SendTransfer, "_close", leaky)


CORRUPT = Scenario("a damaged frame", faults=("corrupt",), num_faults=1)
LOST = Scenario("a lost message, an end", faults=("lose",), num_faults=1, num_aborts=1)
MUTANTS: list[tuple[Callable[[Patch], None], Scenario, str]] = [
    (no_tombstone, scenarios.REPEATS, "began again after its end"),
    (no_attempt_check, scenarios.STALE, "bytes that were not sent"),
    (double_release, scenarios.ONE_CLEAN, "after the last event"),
    (lost_window_update, scenarios.WINDOW, "did not succeed"),
    (window_only_once, scenarios.WINDOW, "did not succeed"),
    (no_checksum, CORRUPT, "bytes that were not sent"),
    (a_count_is_no_coverage, LOST, "bytes that were not sent|adopted without a place"),
    (no_deadline_after_grant, LOST, "never ends"),
    (a_lost_link_keeps_its_transfers, scenarios.CUTS, "without its connection"),
    (what_came_counts_on_the_next_connection, scenarios.REOPENS, "did not succeed"),
    (frames_are_counted_over_connections, scenarios.REOPENS, "did not succeed"),
    (what_was_sent_is_not_sent_again, scenarios.REOPENS, "did not succeed"),
    (a_late_frame_of_the_old_connection_is_taken, scenarios.REOPENS, "of another connection"),
    (an_answer_given_again_is_not_taken, scenarios.REOPENS, "did not succeed"),
    (the_node_is_asked_again, scenarios.REOPENS, "told twice"),
    (the_grant_is_forgotten, scenarios.REOPENS, "did not succeed"),
    (skips_nothing, scenarios.DELTA_CLEAN, "did not succeed"),
    (plans_a_frame_again_that_was_sent, scenarios.ONE_CLEAN, "is remembered as"),
    (packs_after_the_end, scenarios.TWO_ENDS, "taken back|is kept"),
]


@pytest.mark.parametrize(("mutant", "scenario", "why"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_mutant_is_killed(mutant: Callable[[Patch], None], scenario: Scenario, why: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(Broken, match=why):
            search(scenario)
