"""vLLM's counters of speculative decoding: summed over engines, subtracted, checked (step 8 of the walk).

A server counts from its start on and, with data parallelism, in every engine by itself. So a measurement is the
difference of two readings, each summed over the engines. Source: vLLM's v1/spec_decode/metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eagle3.decoding import Acceptance
from eagle3.errors import EngineError

PREFIX = "vllm:spec_decode_num_"
Reading = Iterable[tuple[str, Mapping[str, str], list[int]]]


@dataclass(frozen=True)
class DraftCounters:
    """Rounds (vLLM calls them drafts), tokens that were drafted and accepted, and accepted tokens by position."""

    rounds: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    @classmethod
    def of(cls, reading: Reading) -> DraftCounters:
        """From (name, labels, numbers) of all engines; EngineError when a counter is absent."""
        sums: dict[str, list[int]] = {}
        for name, _, numbers in reading:
            name = name.removeprefix(PREFIX).removesuffix("_total")
            known = sums.setdefault(name, [0] * len(numbers))
            if len(known) != len(numbers):
                raise EngineError(f"vllm: engines count {len(known)} and {len(numbers)} draft positions in {name}")
            sums[name] = [a + b for a, b in zip(known, numbers, strict=True)]
        missing = {"drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"} - sums.keys()
        if missing:
            raise EngineError(
                f"vllm: found no counters {sorted(PREFIX + name for name in missing)}, expected those of speculative "
                "decoding; this version does not speculate, or names them otherwise"
            )
        drafts, drafted, accepted = (sums[name][0] for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return cls(drafts, drafted, accepted, tuple(sums["accepted_tokens_per_pos"]))

    def since(self, before: DraftCounters) -> DraftCounters:
        """What was counted between an earlier reading and this one."""
        pairs = zip(self.per_position, before.per_position, strict=True)
        return DraftCounters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in pairs),
        )

    def acceptance(self) -> Acceptance:
        """As the decoder of ours counts. EngineError when the counters contradict each other."""
        if self.accepted != sum(self.per_position) or self.drafted > self.rounds * len(self.per_position):
            raise EngineError(
                f"vllm: {self.accepted} accepted of {self.drafted} drafted tokens in {self.rounds} rounds, but "
                f"{list(self.per_position)} by position, which must add up to the accepted tokens"
            )
        return Acceptance((self.rounds, *self.per_position))
