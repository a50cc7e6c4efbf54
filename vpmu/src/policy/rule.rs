//! One event that a policy allows, or one kind of them, as an operator writes it: `instructions`, `r00c0`, `r00c0/00ff`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::suggestion::suggestion;
use crate::event::Cache;
use crate::translation::{self, PLAIN};
use crate::x86::Vendor;

/// One of [`translation::names`], or of [`Cache::names`].
pub type Name = &'static str;

/// Written and read as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Rule {
    /// What `perf` calls so, however the guest's PMU encodes it.
    Named(Name),
    /// The encodings that have this value in these bits.
    Raw {
        /// The bits.
        mask: u64,
        /// What they are.
        value: u64,
    },
}

/// A text that is no rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownEvent {
    /// Neither the name of an event nor an encoding.
    #[error("unknown event `{text}`{}", hint(text))]
    Name {
        /// What was written.
        text: String,
    },
    /// Something like an encoding.
    #[error(
        "unknown event `{text}`: an encoding is `r`, unit mask and event in hexadecimal, and perhaps a mask: `r00c0/00ff`"
    )]
    Encoding {
        /// What was written.
        text: String,
    },
    /// Its mask leaves out bits that are asked for.
    #[error("`{text}` can be no event: its mask {mask:#x} leaves out bits of {value:#x}")]
    Mask {
        /// What was written.
        text: String,
        /// What is compared.
        mask: u64,
        /// With what.
        value: u64,
    },
}

impl Rule {
    /// Whether it is about what a PMU of this vendor's encodes so.
    pub fn is_about(&self, vendor: Vendor, code: u64) -> bool {
        match self {
            Self::Named(name) => translation::is_named(name, vendor, code),
            Self::Raw { mask, value } => code & mask == *value,
        }
    }

    /// Its name, if that is not an event of this vendor's.
    pub(super) fn name_without_meaning(&self, vendor: Vendor) -> Option<Name> {
        match self {
            Self::Named(name) if !translation::has_name(name, vendor) => Some(name),
            _ => None,
        }
    }
}

impl UnknownEvent {
    /// What was written.
    pub fn text(&self) -> &str {
        match self {
            Self::Name { text } | Self::Encoding { text } | Self::Mask { text, .. } => text,
        }
    }
}

/// Those that a policy can have; several PMUs have some of them.
pub(super) fn names() -> impl Iterator<Item = Name> {
    translation::names().chain(Cache::names())
}

fn hint(text: &str) -> String {
    match suggestion(text, names()) {
        Some(name) => format!(": did you mean `{name}`?"),
        None => ": `perf` has names for some, and an encoding for all of them, like `r00c0`".to_owned(),
    }
}

impl FromStr for Rule {
    type Err = UnknownEvent;

    fn from_str(text: &str) -> Result<Self, UnknownEvent> {
        if let Some(name) = names().find(|name| *name == text) {
            return Ok(Self::Named(name));
        }
        let Some(digits) =
            text.strip_prefix('r').filter(|rest| rest.starts_with(|c: char| c.is_ascii_hexdigit()))
        else {
            return Err(UnknownEvent::Name { text: text.to_owned() });
        };
        let (value, mask) =
            digits.split_once('/').map_or((digits, None), |(value, mask)| (value, Some(mask)));
        let number = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let (Some(value), Some(mask)) = (number(value), mask.map_or(Some(PLAIN), number)) else {
            // A name may begin like that, too: `ref-cycles`.
            let text = text.to_owned();
            return Err(if digits.chars().all(|c| c.is_ascii_hexdigit() || c == '/') {
                UnknownEvent::Encoding { text }
            } else {
                UnknownEvent::Name { text }
            });
        };
        if value & !mask != 0 {
            return Err(UnknownEvent::Mask { text: text.to_owned(), mask, value });
        }
        Ok(Self::Raw { mask, value })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Raw { mask: PLAIN, value } => write!(f, "r{value:04x}"),
            Self::Raw { mask, value } => write!(f, "r{value:04x}/{mask:04x}"),
        }
    }
}

impl TryFrom<String> for Rule {
    type Error = UnknownEvent;

    fn try_from(text: String) -> Result<Self, UnknownEvent> {
        text.parse()
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> Self {
        rule.to_string()
    }
}
