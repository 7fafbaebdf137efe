"""Weft as a rollout engine of verl: ``actor_rollout_ref.rollout.name=weft``.

| module | runs in |
|---|---|
| ``plugin`` | every process of verl: registers the names |
| ``replica`` | the driver, and one Ray actor for each replica, which owns a server |
| ``rollout`` | the trainer's ranks: sends weights |
| ``server`` | both: the HTTP routes, and the process of a server. Needs neither verl nor Ray |
"""
