//! Tally's Debian package and release archives. The same commit gives the same bytes.
//!
//! The programs are compiled in a folder of their own, without this machine's paths in them ([`build`]). [`deb`] and
//! [`archive`] put them together with what [`contents`] adds, as [`tree`]s of files with one owner and one time.

pub mod archive;
pub mod bom;
pub mod build;
pub mod contents;
pub mod crates;
pub mod deb;
pub mod tree;
