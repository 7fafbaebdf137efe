"""The token budget of a step against the sequences that may run."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections import SchedulerSection


def check_budget(scheduler: SchedulerSection, block: int) -> None:
    """Decode is reserved first: what it can leave for prefill must be a block (of ``block`` tokens) at least.

    While a sequence is prefilled at most ``max_num_seqs - 1`` others decode. Under the exclusive policy
    nothing is reserved, but every decoding sequence must have its token in a decode step. Raises ConfigError
    naming both flags, with values that work; also for a target that the policy could not keep.
    """
    tokens, sequences = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if scheduler.step_policy == "exclusive":
        if scheduler.itl_target_ms:
            raise ConfigError(
                "--itl-target-ms sizes the prompt chunks of steps that also decode, and --step-policy "
                "exclusive has none: set --step-policy mixed or --itl-target-ms 0",
                param="--itl-target-ms",
            )
        if tokens < sequences:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} is less than one token for each of --max-num-seqs "
                f"{sequences}: set --max-num-batched-tokens to at least {sequences} "
                f"or --max-num-seqs to at most {tokens}",
                param="--max-num-batched-tokens",
            )
        return
    left = tokens - (sequences - 1)
    if left < block:
        most = tokens - block + 1
        fewer = f" or --max-num-seqs to at most {most}" if most >= 1 else ""
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} with --max-num-seqs {sequences} can leave prefill "
            f"{max(left, 0)} tokens a step, less than one block (--block-size {block}): set "
            f"--max-num-batched-tokens to at least {block + sequences - 1}{fewer}",
            param="--max-num-batched-tokens",
        )
