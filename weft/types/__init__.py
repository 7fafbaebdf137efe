"""The data types exchanged by packages: sampling parameters, plans, results, messages. No torch."""
