"""The words that packages exchange: sampling parameters, plans, results, messages. Data only, no torch."""
