"""The directory of engines: engines publish where they are, and API servers find engines there."""
