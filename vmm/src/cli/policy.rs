//! Reads and writes policies: a TOML file, or single settings as `KEY=VALUE`. Both have the same keys. One policy is
//! built in, and has a name in place of a file's: [`TENANT`].
//!
//! An error names the line and suggests what may have been meant: a policy that is misread would give a guest counters
//! that it must not have.

use std::fs;
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::path::Path;

use serde::Serialize;
use toml::de::{DeTable, DeValue};
use vpmu::policy::{
    Allowed, Base, Change, Freeze, OnStarvation, Policy, Rule, Setting, Tier, UnknownEvent, suggestion,
};

/// A file that cannot be read as a policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    File { file: String, error: io::Error },
    /// The file has a mistake.
    #[error("{file}, line {line}: {mistake}")]
    Line { file: String, line: usize, mistake: Mistake },
}

/// A mistake in a policy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mistake {
    /// The text is not TOML.
    #[error("{0}")]
    Syntax(String),
    #[error("unknown key `{0}`{hint}", hint = hint(.0, KEYS.iter().map(|key| key.name)))]
    Key(String),
    #[error("{key}: unknown word `{word}`{hint}", hint = hint(word, words.iter().copied()))]
    Word {
        key: &'static str,
        word: String,
        /// The words that the key takes.
        words: &'static [&'static str],
    },
    /// The event does not exist.
    #[error("{0}: {1}")]
    Event(&'static str, UnknownEvent),
    /// The value is of a wrong type.
    #[error("{0} is {1}")]
    Kind(&'static str, &'static str),
    #[error("`{0}` is no KEY=VALUE; the keys are {keys}", keys = KEYS.map(|key| key.name).join(", "))]
    Assignment(String),
    #[error("`{0}` and `{1}` both say which events are allowed: leave one of them out")]
    Both(&'static str, &'static str),
}

/// A key of a policy.
struct Key {
    name: &'static str,
    /// Description of the value, for error messages.
    value: &'static str,
    read: fn(&Self, Value) -> Result<Setting, Mistake>,
    /// Renders the policy's value, if this key is the one that expresses it.
    write: fn(&Policy) -> Option<String>,
}

/// Name of the policy for guests that the host does not trust. A file of this name is reached as `./tenant`.
pub const TENANT: &str = "tenant";
const TENANT_TEXT: &str = include_str!("policy/tenant.toml");

const TIER: &str = "tier";
const ALLOW: &str = "allow";
/// Name of the key that has an effect only when a guest starts.
pub const SPARE_COUNTERS: &str = "spare-counters";
/// Description of a value that is true or false.
const TRUTH: &str = "`true` or `false`";
/// The word for no limit.
const NONE: &str = "none";

const KEYS: [Key; 9] = [
    Key {
        name: TIER,
        value: "`architectural`, `standard` or `enhanced`",
        read: |key, value| {
            let tiers = [Tier::Architectural, Tier::Standard, Tier::Enhanced];
            let index = key.one_of(&["architectural", "standard", "enhanced"], value)?;
            Ok(Setting::Allowed(Allowed::Tier(tiers[index])))
        },
        write: |policy| match &policy.allowed {
            Allowed::Tier(tier) => quoted(tier),
            Allowed::These(_) => None,
        },
    },
    Key {
        name: ALLOW,
        value: "a list of events: [\"instructions\", \"r00c0/00ff\"]",
        read: |key, value| {
            let Value::Words(words) = value else { return Err(key.wrong()) };
            let rules = words.iter().map(|word| word.parse::<Rule>());
            let rules = rules.collect::<Result<_, _>>().map_err(|event| Mistake::Event(key.name, event))?;
            Ok(Setting::Allowed(Allowed::These(rules)))
        },
        write: |policy| match &policy.allowed {
            Allowed::Tier(_) => None,
            Allowed::These(rules) => {
                let words: Vec<String> = rules.iter().map(|rule| format!("\"{rule}\"")).collect();
                Some(format!("[{}]", words.join(", ")))
            }
        },
    },
    Key {
        name: "min-period",
        value: "a number of counts, from 1 on",
        read: |key, value| {
            let Value::Number(counts) = value else { return Err(key.wrong()) };
            NonZeroU64::new(counts).map(Setting::MinPeriod).ok_or_else(|| key.wrong())
        },
        write: |policy| Some(policy.min_period.to_string()),
    },
    Key {
        name: "max-interrupts-per-second",
        value: "a number from 1 on, or `none`",
        read: |key, value| {
            let max = match value {
                Value::Number(max) => u32::try_from(max).ok().and_then(NonZeroU32::new).map(Some),
                Value::Words(words) => (words == [NONE]).then_some(None),
                Value::Truth(_) => None,
            };
            max.map(Setting::MaxInterruptsPerSecond).ok_or_else(|| key.wrong())
        },
        write: |policy| {
            let max = policy.max_interrupts_per_second;
            Some(max.map_or(format!("\"{NONE}\""), |max| max.to_string()))
        },
    },
    Key {
        name: "freeze",
        value: "`guest`, `hybrid` or `host`",
        read: |key, value| {
            let freezes = [Freeze::Guest, Freeze::Hybrid, Freeze::Host];
            Ok(Setting::Freeze(freezes[key.one_of(&["guest", "hybrid", "host"], value)?]))
        },
        write: |policy| quoted(&policy.freeze),
    },
    Key {
        name: "on-starvation",
        value: "`report`, `scale` or `stop`",
        read: |key, value| {
            let ways = [OnStarvation::Report, OnStarvation::Scale, OnStarvation::Stop];
            Ok(Setting::OnStarvation(ways[key.one_of(&["report", "scale", "stop"], value)?]))
        },
        write: |policy| quoted(&policy.on_starvation),
    },
    Key {
        name: SPARE_COUNTERS,
        value: "a number of counters",
        read: |key, value| {
            let Value::Number(counters) = value else { return Err(key.wrong()) };
            u32::try_from(counters).map(Setting::SpareCounters).map_err(|_| key.wrong())
        },
        write: |policy| Some(policy.spare_counters.to_string()),
    },
    Key {
        name: "ebb",
        value: TRUTH,
        read: |key, value| Ok(Setting::Ebb(key.truth(value)?)),
        write: |policy| Some(policy.ebb.to_string()),
    },
    Key {
        name: "record",
        value: TRUTH,
        read: |key, value| Ok(Setting::Record(key.truth(value)?)),
        write: |policy| Some(policy.record.to_string()),
    },
];

/// Renders a word in quotes: its name in JSON, which is how it is sent to a running VM, is the one in TOML.
fn quoted(word: &impl Serialize) -> Option<String> {
    serde_json::to_string(word).ok()
}

/// Value of a key, as it was written.
enum Value {
    Number(u64),
    Truth(bool),
    Words(Vec<String>),
}

impl Key {
    fn named(name: &str) -> Result<&'static Self, Mistake> {
        KEYS.iter().find(|key| key.name == name).ok_or_else(|| Mistake::Key(name.to_owned()))
    }

    /// Returns the index of a value that must be one of these words.
    fn one_of(&self, words: &'static [&'static str], value: Value) -> Result<usize, Mistake> {
        let Value::Words(given) = value else { return Err(self.wrong()) };
        let [word] = given.try_into().map_err(|_| self.wrong())?;
        let index = words.iter().position(|known| *known == word);
        index.ok_or(Mistake::Word { key: self.name, word, words })
    }

    /// Returns a value that must be true or false.
    fn truth(&self, value: Value) -> Result<bool, Mistake> {
        match value {
            Value::Truth(truth) => Ok(truth),
            value => Ok(self.one_of(&["false", "true"], value)? == 1),
        }
    }

    fn wrong(&self) -> Mistake {
        Mistake::Kind(self.name, self.value)
    }
}

/// Reads a policy from a file, or returns the one that is built in.
pub fn of_file(path: &Path) -> Result<Policy, PolicyError> {
    let settings = settings_of_file(path)?;
    Ok(settings.iter().fold(Policy::default(), Policy::with))
}

/// Returns the change that `tally policy` with these arguments makes. A file replaces the whole policy; settings apply
/// after it.
pub fn change(file: Option<&Path>, settings: &[Setting]) -> Result<Change, PolicyError> {
    let from = if file.is_some() { Base::Default } else { Base::Present };
    let mut all = file.map(settings_of_file).transpose()?.unwrap_or_default();
    all.extend_from_slice(settings);
    Ok(Change { from, settings: all })
}

/// Returns a policy as TOML, to begin another one from: that of a file, or the one that is built in, with its comments.
pub fn text_of_file(path: &Path) -> Result<String, PolicyError> {
    if path.as_os_str() == TENANT {
        return Ok(TENANT_TEXT.to_owned());
    }
    of_file(path).map(|policy| toml(&policy))
}

/// Renders a policy as TOML.
pub fn toml(policy: &Policy) -> String {
    KEYS.iter().filter_map(|key| Some(format!("{} = {}\n", key.name, (key.write)(policy)?))).collect()
}

/// Reads `KEY=VALUE`. The elements of a list are separated by commas.
pub fn assignment(text: &str) -> Result<Setting, Mistake> {
    let (name, value) = text.split_once('=').ok_or_else(|| Mistake::Assignment(text.to_owned()))?;
    let key = Key::named(name.trim())?;
    let value = value.trim();
    let words = || value.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned);
    (key.read)(key, value.parse().map_or_else(|_| Value::Words(words().collect()), Value::Number))
}

fn settings_of_file(path: &Path) -> Result<Vec<Setting>, PolicyError> {
    let file = || path.display().to_string();
    // Not a comparison of paths: `./tenant` is a file.
    let text = if path.as_os_str() == TENANT {
        TENANT_TEXT.to_owned()
    } else {
        fs::read_to_string(path).map_err(|error| PolicyError::File { file: file(), error })?
    };
    settings_of(&text).map_err(|(at, mistake)| PolicyError::Line {
        file: file(),
        line: line(&text, at),
        mistake,
    })
}

/// Reads the settings of a TOML text. An error comes with its offset in the text.
fn settings_of(text: &str) -> Result<Vec<Setting>, (usize, Mistake)> {
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        (at, Mistake::Syntax(error.message().replace('\n', ", ")))
    })?;
    let mut settings = Vec::new();
    let mut allowed_by = None;
    let mut keys: Vec<_> = table.get_ref().iter().collect();
    keys.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in keys {
        let Range { start, .. } = name.span();
        let key = Key::named(name.get_ref()).map_err(|mistake| (start, mistake))?;
        let setting = value_of(key, value.get_ref()).and_then(|value| (key.read)(key, value));
        let setting =
            setting.map_err(|mistake| (place(value.get_ref(), &mistake).unwrap_or(start), mistake))?;
        if matches!(setting, Setting::Allowed(_))
            && let Some(other) = allowed_by.replace(key.name)
        {
            return Err((start, Mistake::Both(other, key.name)));
        }
        settings.push(setting);
    }
    Ok(settings)
}

fn value_of(key: &Key, value: &DeValue<'_>) -> Result<Value, Mistake> {
    match value {
        DeValue::Integer(number) => {
            u64::from_str_radix(number.as_str(), number.radix()).ok().map(Value::Number)
        }
        DeValue::String(word) => Some(Value::Words(vec![word.to_string()])),
        DeValue::Boolean(truth) => Some(Value::Truth(*truth)),
        DeValue::Array(values) => {
            let words = values.iter().map(|value| value.get_ref().as_str().map(str::to_owned));
            words.collect::<Option<_>>().map(Value::Words)
        }
        _ => None,
    }
    .ok_or_else(|| key.wrong())
}

/// Returns the offset of the list element that has the mistake.
fn place(value: &DeValue<'_>, mistake: &Mistake) -> Option<usize> {
    let Mistake::Event(_, event) = mistake else { return None };
    let wrong = value.as_array()?.iter().find(|value| value.get_ref().as_str() == Some(event.text()))?;
    Some(wrong.span().start)
}

/// Returns the number of the line, from 1 on, at an offset in a text.
fn line(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

/// Returns a suggestion for a misspelt word, or else a list of the known words.
fn hint<'a>(text: &str, words: impl Iterator<Item = &'a str> + Clone) -> String {
    match suggestion(text, words.clone()) {
        Some(word) => format!(": did you mean `{word}`?"),
        None => format!(" (there are {})", words.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests;
