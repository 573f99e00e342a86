"""Buffer assignment of scheduled HLO modules: which allocation holds each buffer, and where."""
