"""Trials of ``--overlap auto``: metrics, sums over engine processes, messages of earlier versions."""

from __future__ import annotations

from weft.engine.server.replicas import summed
from weft.front.monitoring.overlap_metrics import overlap_rows
from weft.overlap.bucket_trials import SETTLED, TIMES, Bucket, BucketTrial
from weft.types.messages import OVERLAP_SINCE, EngineStats, OverlapChoice, stats_in

FASTER = OverlapChoice(
    rows=8, each=1, context=2048, micro_batches=True, whole_seconds=0.02, micro_batch_seconds=0.01
)
UNMEASURED = OverlapChoice(rows=2, each=3, context=96, micro_batches=False, whole_seconds=0.02)


def test_each_measured_form_has_a_row() -> None:
    stats = [("head0", EngineStats(overlap_choices=(FASTER, UNMEASURED))), ("head1", EngineStats())]
    assert list(overlap_rows(stats)) == [
        (("head0", "8x1@2048", "whole", "no"), 0.02),
        (("head0", "8x1@2048", "micro-batches", "yes"), 0.01),
        (("head0", "2x3@96", "whole", "yes"), 0.02),
    ]


def test_sums_have_the_trials_of_all_engines() -> None:
    both = summed([EngineStats(overlap_choices=(FASTER,)), EngineStats(overlap_choices=(UNMEASURED,))])
    assert both.overlap_choices == (FASTER, UNMEASURED)


def test_trials_go_to_api_servers_that_know_them() -> None:
    stats = EngineStats(overlap_choices=(FASTER,))
    assert stats_in(OVERLAP_SINCE, stats) == stats
    assert stats_in(OVERLAP_SINCE - 1, stats) == EngineStats()


def test_a_trial_becomes_a_message() -> None:
    trial = BucketTrial()
    for _ in range(SETTLED + 2 * TIMES):
        form = trial.next()
        trial.observe(form, 0.01 if form else 0.02)
    assert trial.choice is not None
    assert trial.choice.message(Bucket(8, 1, 2048)) == FASTER
