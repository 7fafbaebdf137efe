"""Token ids in, token ids out: the routes that routers of other projects use."""
