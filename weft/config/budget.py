"""The token budget of a step against the sequences that may run."""

from __future__ import annotations

import msgspec

from weft.common.errors import ConfigError
from weft.config.sections import SchedulerSection

DEFAULT_TOKENS = {"cuda": 2048, "cpu": 512}
"""Tokens of a step. A CPU computes 512 tokens at the rate of 2048, and decode rows beside them wait a quarter
of the time (docs/adr/0017)."""


def with_budget(scheduler: SchedulerSection, device: str, drafts: int = 0) -> SchedulerSection:
    """``scheduler`` with a token budget as set or, by default, by the device.

    That is enough for the decode rows of ``max_num_seqs`` sequences, and prompts beside them.
    """
    if scheduler.max_num_batched_tokens:
        return scheduler
    tokens = DEFAULT_TOKENS[device]
    needed = scheduler.max_num_seqs * (1 + drafts) + tokens // 2
    return msgspec.structs.replace(scheduler, max_num_batched_tokens=max(tokens, needed))


def check_budget(scheduler: SchedulerSection, block: int, drafts: int = 0) -> None:
    """Decode is reserved first: what it can leave for prefill must be a block (of ``block`` tokens) at least.

    A decoding sequence takes ``1 + drafts`` tokens of a step. While a sequence is prefilled at most
    ``max_num_seqs - 1`` others decode. Under the exclusive policy nothing is reserved, but every decoding
    sequence must have its tokens in a decode step. Raises ConfigError naming both flags, with values that
    work; also for a target that the policy could not keep.
    """
    tokens = scheduler.max_num_batched_tokens
    sequences = scheduler.max_num_seqs
    each = 1 + drafts
    beside = f" and --num-speculative-tokens {drafts}" if drafts else ""
    if scheduler.step_policy == "exclusive":
        if scheduler.itl_target_ms:
            raise ConfigError(
                "--itl-target-ms sizes the prompt chunks of steps that also decode, and --step-policy "
                "exclusive has none: set --step-policy mixed or --itl-target-ms 0",
                param="--itl-target-ms",
            )
        if tokens < sequences * each:
            fewer = f" or --max-num-seqs to at most {tokens // each}" if tokens >= each else ""
            need = "one token" if each == 1 else f"{each} tokens (--num-speculative-tokens {drafts})"
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} is less than {need} for each of --max-num-seqs "
                f"{sequences}: set --max-num-batched-tokens to at least {sequences * each}{fewer}",
                param="--max-num-batched-tokens",
            )
        return
    left = tokens - (sequences - 1) * each
    if left < block:
        most = (tokens - block) // each + 1
        fewer = f" or --max-num-seqs to at most {most}" if most >= 1 else ""
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} with --max-num-seqs {sequences}{beside} can leave prefill "
            f"{max(left, 0)} tokens a step, less than one block (--block-size {block}): set "
            f"--max-num-batched-tokens to at least {block + (sequences - 1) * each}{fewer}",
            param="--max-num-batched-tokens",
        )
