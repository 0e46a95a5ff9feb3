"""Which chunks of which prompts a step computes, and what each event means for a prompt. Pure: no clock, tensor or socket.

First come, first served by the time a request reached the router. Prompts near the head of the queue ask their decode node for
blocks early (at most `open_ahead`); a prompt takes blocks for all of its context at once, after its grant, and ungranted ones
are passed over, so that no two pools wait for each other in a circle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.hold import Hold, HoldStage
from pdserve.core.ids import LegKey, TransferId
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import LegOutcome, SampledToken, Work
from pdserve.engine.batch import ChunkResult, RowFailed
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease
from pdserve.prefill_node.instructions import (
    AbortTransfer,
    BindBlocks,
    CommitTransfer,
    Instruction,
    OpenTransfer,
    PlannedChunk,
    ReportFirstToken,
    ReportPromptScores,
    StepPlan,
)
from pdserve.prefill_node.job import JOB_TABLE, Job, JobEvent, JobState


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of scheduling; see `PrefillSettings`."""

    token_budget: int
    max_prompts_per_step: int
    open_ahead: int
    max_model_len: int
    block_size: int


class PrefillScheduler:
    """All prompts of a prefill node. Every method returns what to do; nothing is done here but the books."""

    def __init__(
        self, limits: PrefillLimits, pool: BlockPool, eos_token_ids: frozenset[int], hold: Hold | None = None
    ) -> None:
        self._limits, self._pool, self._eos, self._hold = limits, pool, eos_token_ids, hold
        self._jobs: dict[LegKey, Job] = {}
        self._by_transfer: dict[TransferId, Job] = {}

    def submit(self, work: Work, now_s: float) -> list[Instruction]:
        """Take a prompt, or refuse it if it can never fit."""
        fault = self._never_fits(work)
        if work.transfer_id in self._by_transfer:
            return [ReportEnd(work.leg, LegOutcome.REFUSED, "transfer_id_in_use"), ReportRelease(work.leg, {})]
        if fault:
            return [
                ReportEnd(work.leg, LegOutcome.REFUSED, "never_fits", fault),
                ReportRelease(work.leg, {}, 0, 0),
            ]
        job = Job(work, now_s, LifeCycle(JOB_TABLE, str(work.leg), now_s))
        job.awaits_constraint = work.sampling.grammar is not None
        self._jobs[work.leg] = job
        if work.transfer_id is not None:
            self._by_transfer[work.transfer_id] = job
        return self._look_ahead(now_s)

    def granted(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The decode node promised blocks."""
        job = self._by_transfer.get(transfer_id)
        if job is not None:
            job.life.advance(JobEvent.GRANT, now_s)
        return []

    def acked(self, transfer_id: TransferId, exposed_s: float, stalled_s: float, now_s: float) -> list[Instruction]:
        """The decode node holds everything. `stalled_s`: data was ready, but window, socket or staging was not."""
        job = self._by_transfer.get(transfer_id)
        if job is None:
            return []
        job.durations_s["prefill.exposed_transfer"] = exposed_s
        job.durations_s["prefill.stalled"] = stalled_s
        return self._end(job, LegOutcome.FINISHED, "handed_over", "", now_s)

    def transfer_failed(
        self, transfer_id: TransferId, reason: str, detail: str, *, busy: bool, now_s: float
    ) -> list[Instruction]:
        """The corridor gave the transfer up."""
        job = self._by_transfer.get(transfer_id)
        if job is None:
            return []
        return self._end(job, LegOutcome.BUSY if busy else LegOutcome.FAILED, reason, detail, now_s)

    def transfer_closed(
        self, transfer_id: TransferId, kv_bytes: int, kv_frames: int, pack_s: float, now_s: float
    ) -> list[Instruction]:
        """The corridor will not touch the blocks again. The last event of every opened transfer."""
        job = self._by_transfer.get(transfer_id)
        if job is None:
            return []
        job.transfer_open = False
        job.kv_bytes, job.kv_frames = kv_bytes, kv_frames
        job.durations_s["prefill.pack"] = pack_s
        ended = self._end(job, LegOutcome.FAILED, "transfer_closed", "the corridor closed it early", now_s)
        return ended + self._let_go(job, now_s)

    def cancel(self, leg: LegKey, outcome: LegOutcome, reason: str, now_s: float) -> list[Instruction]:
        """End a prompt at whatever stage it is."""
        job = self._jobs.get(leg)
        return [] if job is None else self._end(job, outcome, reason, "", now_s)

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str, now_s: float) -> list[Instruction]:
        """End some sequences of a prompt; those that are cancelled before their first token never get one.

        When none is left, the leg ends as a whole: it did its part if one of them ended by itself.
        """
        job = self._jobs.get(leg)
        if job is None:
            return []
        job.cancelled |= sequences & set(job.work.sequences)
        if job.live_sequences:
            return []
        if job.state is JobState.HANDING_OVER and len(job.cancelled) < job.work.num_sequences:
            return self._finish_early(job, now_s)
        return self._end(job, LegOutcome.CANCELLED, reason, "", now_s)

    def constraint_ready(self, leg: LegKey) -> list[Instruction]:
        """What constrains the leg's output is compiled: its first tokens may be sampled."""
        job = self._jobs.get(leg)
        if job is not None:
            job.awaits_constraint = False
        return []

    def constraint_failed(self, leg: LegKey, reason: str, detail: str, now_s: float) -> list[Instruction]:
        """What should constrain the leg's output cannot be served."""
        job = self._jobs.get(leg)
        return [] if job is None else self._end(job, LegOutcome.REFUSED, reason, detail, now_s)

    def expire(self, now_s: float) -> list[Instruction]:
        """End prompts whose client's deadline passed (the router cancels them too; this is the backstop)."""
        late = [job for job in self._jobs.values() if job.work.deadline_s is not None and now_s > job.work.deadline_s]
        return [step for job in late for step in self._end(job, LegOutcome.CANCELLED, "deadline", "", now_s)]

    def plan(self, now_s: float) -> tuple[StepPlan | None, list[Instruction]]:
        """Return the next step, or None if nothing can run, and what to do before it."""
        instructions = self._look_ahead(now_s)
        instructions += self._start_granted(now_s)
        chunks: list[PlannedChunk] = []
        budget = self._limits.token_budget
        for job in self._in_order(JobState.RUNNING):
            if budget == 0 or len(chunks) == self._limits.max_prompts_per_step:
                break
            if self._holds(job, HoldStage.PREFILLING, job.num_chunks):
                continue
            size = min(budget, job.num_left - job.awaits_constraint)
            if size > 0:
                chunks.append(_chunk(job, range(job.num_computed, job.num_computed + size)))
                budget -= size
        if not chunks:
            return None, instructions
        for chunk in chunks:
            chunk.job.in_step = True
            if chunk.job.started_s is None:
                chunk.job.started_s = now_s
        return StepPlan(tuple(chunks)), instructions

    def step_done(
        self, plan: StepPlan, results: Sequence[ChunkResult], compute_s: float, now_s: float
    ) -> list[Instruction]:
        """Take a step's results: what each chunk got."""
        instructions: list[Instruction] = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            job = chunk.job
            job.in_step = False
            job.num_computed = chunk.tokens.stop
            job.num_chunks += 1
            job.compute_s += compute_s
            if job.state is JobState.CLOSING:
                instructions += self._let_go(job, now_s)
                continue
            if result.scores:
                instructions.append(ReportPromptScores(job.work.leg, chunk.scored.start, result.scores))
            if chunk.sequences:
                instructions += self._take_choices(chunk, result, now_s)
        return instructions

    def step_failed(self, plan: StepPlan, detail: str, now_s: float) -> list[Instruction]:
        """End the prompts of a step that raised."""
        instructions: list[Instruction] = []
        for chunk in plan.chunks:
            chunk.job.in_step = False
            instructions += self._end(chunk.job, LegOutcome.FAILED, "engine_error", detail, now_s)
            instructions += self._let_go(chunk.job, now_s)
        return instructions

    @property
    def num_waiting(self) -> int:
        """Prompts that hold no blocks yet."""
        return sum(job.state in (JobState.WAITING, JobState.OPENING, JobState.GRANTED) for job in self._jobs.values())

    @property
    def num_running(self) -> int:
        """Prompts that hold blocks."""
        return sum(job.lease is not None for job in self._jobs.values())

    @property
    def num_waiting_tokens(self) -> int:
        """Context tokens still to be computed."""
        return sum(job.num_left for job in self._jobs.values() if job.state is not JobState.CLOSING)

    @property
    def num_held(self) -> int:
        """Prompts that stand at the test hook."""
        return sum(job.is_held for job in self._jobs.values())

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every prompt's state and age."""
        return [
            {
                "leg": str(leg),
                "state": job.state.value,
                "age_s": round(job.life.age_s(now_s), 3),
                "computed": f"{job.num_computed}/{job.work.context_len}",
            }
            for leg, job in self._jobs.items()
        ]

    def check_invariants(self) -> None:
        """Raise InternalError or AssertionError if the books do not agree."""
        self._pool.check_invariants()
        for job in self._jobs.values():
            running = job.state in (JobState.RUNNING, JobState.HANDING_OVER)
            assert not running or job.lease is not None, f"{job.work.leg} runs without blocks"
            assert job.state is not JobState.OVER, f"{job.work.leg} is over but on the books"
        handed_over = sum(job.work.transfer_id is not None for job in self._jobs.values())
        assert handed_over == len(self._by_transfer), "a transfer belongs to one prompt"
        leased = sum(len(job.lease.block_ids) for job in self._jobs.values() if job.lease is not None)
        assert leased == self._pool.num_blocks - self._pool.num_free, "blocks are leased to nobody"

    def _never_fits(self, work: Work) -> str:
        if work.context_len >= self._limits.max_model_len:
            return f"{work.context_len} tokens leave no room in a model length of {self._limits.max_model_len}"
        capacity = self._pool.num_blocks * self._limits.block_size
        return "" if work.context_len <= capacity else f"{work.context_len} tokens exceed the pool of {capacity} tokens"

    def _in_order(self, state: JobState) -> list[Job]:
        return sorted((job for job in self._jobs.values() if job.state is state), key=lambda job: job.work.arrived_s)

    def _look_ahead(self, now_s: float) -> list[Instruction]:
        asking = sum(job.state in (JobState.OPENING, JobState.GRANTED) for job in self._jobs.values())
        instructions: list[Instruction] = []
        for job in self._in_order(JobState.WAITING)[: max(0, self._limits.open_ahead - asking)]:
            if job.work.transfer_id is None:
                job.life.advance(JobEvent.GRANT, now_s)
            else:
                job.life.advance(JobEvent.OPEN, now_s)
                job.transfer_open = True
                instructions.append(OpenTransfer(job.work))
        return instructions

    def _start_granted(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for job in self._in_order(JobState.GRANTED):
            if self._holds(job, HoldStage.QUEUED):
                continue
            job.lease = self._pool.try_lease(job.num_blocks(self._limits.block_size), str(job.work.leg))
            if job.lease is None:
                break
            job.life.advance(JobEvent.START, now_s)
            if job.work.transfer_id is not None:
                instructions.append(BindBlocks(job.work.transfer_id, job.lease))
        return instructions

    def _take_choices(self, chunk: PlannedChunk, result: ChunkResult, now_s: float) -> list[Instruction]:
        """Take the first token of each sequence. One that could get none ends the leg: a request ends as a whole."""
        job, work = chunk.job, chunk.job.work
        tokens: list[SampledToken] = []
        for sequence, choice in zip(chunk.sequences, result.choices, strict=True):
            if sequence in job.cancelled:
                continue
            if isinstance(choice, RowFailed):
                outcome = LegOutcome.REFUSED if choice.is_final else LegOutcome.FAILED
                return self._end(job, outcome, "no_token", choice.reason, now_s)
            reason = work.finish_reason(choice.token_id, work.next_index, self._eos)
            token = (work.next_index, choice.token_id, choice.logprob, reason, sequence, choice.top)
            tokens.append(SampledToken(*token))
        job.first_tokens = tuple(tokens)
        return self._sampled(job, now_s)

    def _sampled(self, job: Job, now_s: float) -> list[Instruction]:
        work, tokens = job.work, job.first_tokens
        started_s = job.submitted_s if job.started_s is None else job.started_s
        queue_s = now_s - job.submitted_s - job.compute_s
        durations = {
            "prefill.queue": started_s - job.submitted_s,
            "prefill.wait": max(0.0, queue_s - (started_s - job.submitted_s)),
            "prefill.compute": job.compute_s,
        }
        job.durations_s.update(durations)
        job.life.advance(JobEvent.SAMPLED, now_s)
        report: list[Instruction] = [ReportFirstToken(work.leg, tokens, durations)]
        if work.transfer_id is None or not job.live_sequences:
            return report + self._finish_early(job, now_s)
        if self._holds(job, HoldStage.HANDING_OVER):
            return report
        return [*report, CommitTransfer(work.transfer_id, tokens, durations)]

    def _finish_early(self, job: Job, now_s: float) -> list[Instruction]:
        """Every sequence is over: there is nothing to hand over."""
        ended = self._end(job, LegOutcome.FINISHED, "finished", "", now_s)
        if job.work.transfer_id is None:
            return ended
        return [AbortTransfer(job.work.transfer_id, "finished", finished=True), *ended]

    def _end(self, job: Job, outcome: LegOutcome, reason: str, detail: str, now_s: float) -> list[Instruction]:
        if job.state is JobState.CLOSING or not job.life.advance(JobEvent.END, now_s):
            return []
        job.outcome = outcome
        job.is_held = False
        instructions: list[Instruction] = [ReportEnd(job.work.leg, outcome, reason, detail)]
        unfinished = outcome is not LegOutcome.FINISHED
        if job.transfer_open and unfinished and job.work.transfer_id is not None:
            is_busy = outcome is LegOutcome.DRAINED
            instructions.append(AbortTransfer(job.work.transfer_id, reason, is_busy=is_busy))
        return instructions + self._let_go(job, now_s)

    def _let_go(self, job: Job, now_s: float) -> list[Instruction]:
        if job.state is not JobState.CLOSING or not job.is_untouched:
            return []
        job.life.advance(JobEvent.LET_GO, now_s)
        if job.lease is not None:
            job.lease.release()
        del self._jobs[job.work.leg]
        if job.work.transfer_id is not None:
            del self._by_transfer[job.work.transfer_id]
        return [ReportRelease(job.work.leg, job.durations_s, job.kv_bytes, job.kv_frames)]

    def _holds(self, job: Job, stage: HoldStage, progress: int = 0) -> bool:
        job.is_held = self._hold is not None and self._hold.at(stage, job.work.leg.attempt, progress)
        return job.is_held


def _chunk(job: Job, tokens: range) -> PlannedChunk:
    """Return the chunk of `tokens`: with the last of the context every sequence that is not cancelled gets its first token."""
    work = job.work
    sequences = job.live_sequences if tokens.stop == work.context_len else ()
    if not work.prompt_logprobs:
        return PlannedChunk(job, tokens, sequences)
    return PlannedChunk(job, tokens, sequences, range(tokens.start + 1, min(tokens.stop + 1, len(work.prompt_ids))))
