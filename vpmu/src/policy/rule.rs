//! Rules: an event that a policy allows, or a group of events, as an operator writes it: `instructions`, `r00c0`,
//! `r00c0/00ff`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::suggestion::suggestion;
use crate::event::Cache;
use crate::translation::{self, PLAIN};
use crate::x86::Vendor;

/// Name of an event: one of [`translation::names`] or [`Cache::names`].
pub type Name = &'static str;

/// An event that a policy allows, or a group of events. Serialized as the text that the operator writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Rule {
    /// The event with this name of `perf`, whatever the guest's PMU's encoding is.
    Named(Name),
    /// All encodings that have this value in the bits of the mask.
    Raw {
        /// The bits that are compared.
        mask: u64,
        /// Value of these bits.
        value: u64,
    },
}

/// Why a text is not a [`Rule`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownEvent {
    /// The text is neither the name of an event nor an encoding.
    #[error("unknown event `{text}`{}", hint(text))]
    Name {
        /// The text.
        text: String,
    },
    /// The text looks like an encoding but cannot be parsed.
    #[error(
        "unknown event `{text}`: an encoding is `r`, unit mask and event in hexadecimal, and perhaps a mask: `r00c0/00ff`"
    )]
    Encoding {
        /// The text.
        text: String,
    },
    /// The value has bits outside of the mask, so the rule would match nothing.
    #[error("`{text}` can be no event: its mask {mask:#x} leaves out bits of {value:#x}")]
    Mask {
        /// The text.
        text: String,
        /// The mask.
        mask: u64,
        /// The value.
        value: u64,
    },
}

impl Rule {
    /// Returns whether the rule matches an encoding of this vendor's PMU.
    pub fn matches(&self, vendor: Vendor, code: u64) -> bool {
        match self {
            Self::Named(name) => translation::is_named(name, vendor, code),
            Self::Raw { mask, value } => code & mask == *value,
        }
    }

    /// Returns the rule's name if this vendor's PMU has no event of that name.
    pub(super) fn unknown_event_name(&self, vendor: Vendor) -> Option<Name> {
        match self {
            Self::Named(name) if !translation::has_name(name, vendor) => Some(name),
            _ => None,
        }
    }
}

impl UnknownEvent {
    /// Returns the text.
    pub fn text(&self) -> &str {
        match self {
            Self::Name { text } | Self::Encoding { text } | Self::Mask { text, .. } => text,
        }
    }
}

/// Returns the names that rules can have. Some of them are events of one vendor's PMU only.
pub(super) fn names() -> impl Iterator<Item = Name> {
    translation::names().chain(Cache::names())
}

fn hint(text: &str) -> String {
    match suggestion(text, names()) {
        Some(name) => format!(": did you mean `{name}`?"),
        None => {
            ": write a name of `perf`, such as `instructions`, or an encoding, such as `r00c0`".to_owned()
        }
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
            // A misspelled name, such as `ref-cycle`, may begin with `r` and a hexadecimal digit, too.
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
