//! The bus and the few devices that Tally's guests need.
