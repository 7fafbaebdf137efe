"""The data types that packages exchange: sampling parameters, plans, results, messages. No torch."""
