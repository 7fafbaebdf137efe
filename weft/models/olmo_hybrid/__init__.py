"""OLMo Hybrid: gated delta nets and attention with norms behind, gated feed-forward blocks."""
