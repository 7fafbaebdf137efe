"""Sampling parameters that together use every part of the sampling rule."""

from __future__ import annotations

from weft.types.sampling import TokenParams


def every_way_of_sampling(max_tokens: int) -> list[TokenParams]:
    return [
        TokenParams(temperature=0.0, max_tokens=max_tokens),
        TokenParams(temperature=1.0, max_tokens=max_tokens),
        TokenParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, max_tokens=max_tokens),
        TokenParams(temperature=0.7, top_p=0.8, max_tokens=max_tokens, logprobs=3),
        TokenParams(temperature=0.9, min_p=0.1, max_tokens=max_tokens),
        TokenParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=max_tokens),
        TokenParams(
            temperature=1.0,
            max_tokens=max_tokens,
            min_tokens=3,
            stop_ids=(4,),
            bad=((3,), (5, 6)),
            logit_bias=((7, 1.5), (9, -3.0)),
            prompt_logprobs=2,
        ),
        TokenParams(temperature=1.0, max_tokens=max_tokens, allowed=(1, 2, 3)),
    ]
