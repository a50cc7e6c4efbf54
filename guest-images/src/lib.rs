//! Builds what Tally boots: the default guest and bare-metal payloads.
