//! How an operator writes a policy: as a file in TOML, or one thing at a time as `KEY=VALUE`. Both have the same keys.
//!
//! A mistake is told with its line, and with what may have been meant: a policy that was read otherwise than it was meant would
//! give a guest what it is not to have.

use std::fs;
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::path::Path;

use serde::Serialize;
use toml::de::{DeTable, DeValue};
use vpmu::policy::{
    Allowed, Change, Freeze, From, OnStarvation, Policy, Rule, Setting, Tier, UnknownEvent, suggestion,
};

/// A file that has no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// There is no such file, say.
    #[error("{file}: {error}")]
    File {
        /// Which.
        file: String,
        /// Why.
        error: io::Error,
    },
    /// It says what no policy can.
    #[error("{file}, line {line}: {mistake}")]
    Line {
        /// Which.
        file: String,
        /// Where in it.
        line: usize,
        /// What.
        mistake: Mistake,
    },
}

/// What cannot be said of a policy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mistake {
    /// It is no TOML.
    #[error("{0}")]
    Syntax(String),
    /// There is no such key.
    #[error("unknown key `{0}`{hint}", hint = hint(.0, KEYS.iter().map(|key| key.name)))]
    Key(String),
    /// A word that means nothing there.
    #[error("{key}: unknown word `{word}`{hint}", hint = hint(word, words.iter().copied()))]
    Word {
        /// Where.
        key: &'static str,
        /// Which.
        word: String,
        /// The words that do.
        words: &'static [&'static str],
    },
    /// There is no such event.
    #[error("{0}: {1}")]
    Event(&'static str, UnknownEvent),
    /// A value of another kind.
    #[error("{0} is {1}")]
    Kind(&'static str, &'static str),
    /// What is no `KEY=VALUE`.
    #[error("`{0}` is no KEY=VALUE; the keys are {keys}", keys = KEYS.map(|key| key.name).join(", "))]
    Assignment(String),
    /// The same is said twice.
    #[error("`{0}` and `{1}` both say which events are allowed: leave one of them out")]
    Both(&'static str, &'static str),
}

/// What can be said.
struct Key {
    name: &'static str,
    /// What its value is, in words.
    value: &'static str,
    read: fn(&Self, Value) -> Result<Setting, Mistake>,
    /// What a policy has there, if it is said by this key.
    write: fn(&Policy) -> Option<String>,
}

const TIER: &str = "tier";
const ALLOW: &str = "allow";
/// The word for no limit.
const NONE: &str = "none";

const KEYS: [Key; 6] = [
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
            NonZeroU64::new(counts).map(Setting::LeastPeriod).ok_or_else(|| key.wrong())
        },
        write: |policy| Some(policy.least_period.to_string()),
    },
    Key {
        name: "max-interrupts-per-second",
        value: "a number from 1 on, or `none`",
        read: |key, value| {
            let most = match value {
                Value::Number(most) => u32::try_from(most).ok().and_then(NonZeroU32::new).map(Some),
                Value::Words(words) => (words == [NONE]).then_some(None),
            };
            most.map(Setting::MostInterrupts).ok_or_else(|| key.wrong())
        },
        write: |policy| Some(policy.most_interrupts.map_or(format!("\"{NONE}\""), |most| most.to_string())),
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
];

/// A word as it also travels to a running VM, which is how a file has it.
fn quoted(word: &impl Serialize) -> Option<String> {
    serde_json::to_string(word).ok()
}

/// What is said of a key.
enum Value {
    Number(u64),
    Words(Vec<String>),
}

impl Key {
    fn called(name: &str) -> Result<&'static Self, Mistake> {
        KEYS.iter().find(|key| key.name == name).ok_or_else(|| Mistake::Key(name.to_owned()))
    }

    /// Which of the words it is.
    fn one_of(&self, words: &'static [&'static str], value: Value) -> Result<usize, Mistake> {
        let Value::Words(given) = value else { return Err(self.wrong()) };
        let [word] = given.try_into().map_err(|_| self.wrong())?;
        let index = words.iter().position(|known| *known == word);
        index.ok_or(Mistake::Word { key: self.name, word, words })
    }

    fn wrong(&self) -> Mistake {
        Mistake::Kind(self.name, self.value)
    }
}

/// The policy that a file has.
pub fn of_file(path: &Path) -> Result<Policy, PolicyError> {
    let settings = settings_of_file(path)?;
    Ok(settings.iter().fold(Policy::default(), Policy::with))
}

/// What is to be different after `tally policy` with these arguments: a file says all of a policy, and what stands beside it is said
/// after it.
pub fn change(file: Option<&Path>, settings: &[Setting]) -> Result<Change, PolicyError> {
    let from = if file.is_some() { From::Default } else { From::Present };
    let mut all = file.map(settings_of_file).transpose()?.unwrap_or_default();
    all.extend_from_slice(settings);
    Ok(Change { from, settings: all })
}

/// A policy as a file says it.
pub fn toml(policy: &Policy) -> String {
    KEYS.iter().filter_map(|key| Some(format!("{} = {}\n", key.name, (key.write)(policy)?))).collect()
}

/// Reads `KEY=VALUE`; a list is separated by commas.
pub fn assignment(text: &str) -> Result<Setting, Mistake> {
    let (name, value) = text.split_once('=').ok_or_else(|| Mistake::Assignment(text.to_owned()))?;
    let key = Key::called(name.trim())?;
    let value = value.trim();
    let words = || value.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned);
    (key.read)(key, value.parse().map_or_else(|_| Value::Words(words().collect()), Value::Number))
}

fn settings_of_file(path: &Path) -> Result<Vec<Setting>, PolicyError> {
    let file = || path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| PolicyError::File { file: file(), error })?;
    settings_of(&text).map_err(|(at, mistake)| PolicyError::Line {
        file: file(),
        line: line(&text, at),
        mistake,
    })
}

/// What a text in TOML says, or where it has a mistake.
fn settings_of(text: &str) -> Result<Vec<Setting>, (usize, Mistake)> {
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        (at, Mistake::Syntax(error.message().replace('\n', ", ")))
    })?;
    let mut settings = Vec::new();
    let mut says_what_is_allowed = None;
    let mut keys: Vec<_> = table.get_ref().iter().collect();
    keys.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in keys {
        let Range { start, .. } = name.span();
        let key = Key::called(name.get_ref()).map_err(|mistake| (start, mistake))?;
        let setting = value_of(key, value.get_ref()).and_then(|value| (key.read)(key, value));
        let setting =
            setting.map_err(|mistake| (place(value.get_ref(), &mistake).unwrap_or(start), mistake))?;
        if matches!(setting, Setting::Allowed(_))
            && let Some(other) = says_what_is_allowed.replace(key.name)
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
        DeValue::Array(values) => {
            let words = values.iter().map(|value| value.get_ref().as_str().map(str::to_owned));
            words.collect::<Option<_>>().map(Value::Words)
        }
        _ => None,
    }
    .ok_or_else(|| key.wrong())
}

/// Where in a list the mistake is.
fn place(value: &DeValue<'_>, mistake: &Mistake) -> Option<usize> {
    let Mistake::Event(_, event) = mistake else { return None };
    let wrong = value.as_array()?.iter().find(|value| value.get_ref().as_str() == Some(event.text()))?;
    Some(wrong.span().start)
}

/// The line, from 1 on, of a place in a text.
fn line(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

/// What may have been meant, or else what there is.
fn hint<'a>(text: &str, words: impl Iterator<Item = &'a str> + Clone) -> String {
    match suggestion(text, words.clone()) {
        Some(word) => format!(": did you mean `{word}`?"),
        None => format!(" (there are {})", words.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests;
