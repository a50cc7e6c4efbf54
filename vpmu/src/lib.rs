//! The virtual PMU of Tally's guests.
