"""Rollout: sampling G responses to each prompt with the current policy.

    scheduler  which samples decode in a step          token counts only
    blocks     who owns which K/V block                no torch either
    noise      counter-based Gumbel noise              keyed by what a token is, never by where it is computed
    sampler    logits and noise to ids and log-probs
    engine     ties them to the model

The first four know neither the model nor each other's insides; the scheduler alone uses the blocks.
"""
