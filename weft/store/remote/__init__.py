"""A store of records that hosts share: segments as objects of an object store."""
