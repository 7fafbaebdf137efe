"""The token budget of a step, checked against the number of sequences."""

from __future__ import annotations

import msgspec

from weft.common.errors import ConfigError
from weft.config.sections.all import SchedulerSection

DEFAULT_TOKENS = {"cuda": 2048, "cpu": 512}
"""Default tokens per step. A CPU computes 512 tokens at the throughput of 2048, and decode rows in the step
then wait a quarter of the time (docs/adr/0017).
"""


def with_budget(scheduler: SchedulerSection, device: str, drafts: int = 0) -> SchedulerSection:
    """Return ``scheduler`` with a token budget: as set, or a default by device.

    The default has room for the decode rows of ``max_num_seqs`` sequences, plus prompts.
    """
    if scheduler.max_num_batched_tokens:
        return scheduler
    tokens = DEFAULT_TOKENS[device]
    needed = scheduler.max_num_seqs * (1 + drafts) + tokens // 2
    return msgspec.structs.replace(scheduler, max_num_batched_tokens=max(tokens, needed))


def check_budget(scheduler: SchedulerSection, block: int, drafts: int = 0) -> None:
    """Raise ConfigError if decode rows can leave less than one block of ``block`` tokens for prefill.

    A decoding sequence takes ``1 + drafts`` tokens per step, reserved before prefill. While one sequence
    prefills, at most ``max_num_seqs - 1`` others decode. The exclusive policy reserves nothing, but a decode
    step must have tokens for every sequence. The exclusive policy also excludes an ITL target. The error
    names the flags, with values that work.
    """
    tokens = scheduler.max_num_batched_tokens
    sequences = scheduler.max_num_seqs
    each = 1 + drafts
    beside = f" and --num-speculative-tokens {drafts}" if drafts else ""
    if scheduler.step_policy == "exclusive":
        if scheduler.itl_target_ms:
            raise ConfigError(
                "--itl-target-ms sizes the prompt chunks of steps that also decode, and --step-policy "
                "exclusive has no such steps: set --step-policy mixed or --itl-target-ms 0",
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
    # The worst case: one sequence prefills, all others decode.
    left = tokens - (sequences - 1) * each
    if left < block:
        most = (tokens - block) // each + 1
        fewer = f" or --max-num-seqs to at most {most}" if most >= 1 else ""
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} with --max-num-seqs {sequences}{beside} can leave "
            f"prefill {max(left, 0)} tokens per step, less than one block (--block-size {block}): set "
            f"--max-num-batched-tokens to at least {block + (sequences - 1) * each}{fewer}",
            param="--max-num-batched-tokens",
        )
