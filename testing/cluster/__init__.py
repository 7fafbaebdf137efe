"""A model checker: a whole cluster with faults on virtual time.

``python -m testing.cluster`` runs schedules. ``python -m testing.cluster replay SEED`` shows one schedule.
"""
