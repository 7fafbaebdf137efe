"""Data types that packages exchange: sampling parameters, plans, results and messages. No torch."""
