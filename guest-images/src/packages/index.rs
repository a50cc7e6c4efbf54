//! The packages of a release, and which others they depend on (Debian Policy, chapter 7).
//!
//! The choices are apt's: of each package the newest version, of alternatives the first that there is, and of the
//! packages that provide a virtual one that of the highest priority.

use std::collections::HashMap;

use super::package::Package;
use super::stanza::Stanza;
use super::version::compare;

/// Priorities, from the highest on.
const PRIORITIES: [&str; 5] = ["required", "important", "standard", "optional", "extra"];

/// A package, and what it says of others.
struct Candidate {
    package: Package,
    depends: String,
    provides: String,
    priority: usize,
    /// Its place in the lists.
    place: usize,
}

/// All packages of a release.
#[derive(Default)]
pub struct Index {
    candidates: HashMap<String, Candidate>,
    /// Names of virtual packages, and the packages that provide them.
    providers: HashMap<String, Vec<String>>,
}

/// Why packages cannot be installed.
#[derive(Debug, PartialEq, Eq)]
pub enum Unmet {
    /// There is no package of this name.
    NoPackage(String),
    /// A package depends on one that is not there.
    Dependency { package: String, on: String },
}

/// One of the alternatives of a dependency.
#[derive(Clone, Copy)]
struct Alternative<'a> {
    name: &'a str,
    version: Option<(&'a str, &'a str)>,
}

impl Index {
    /// Reads the lists of archives, each with the archive's address.
    pub fn new<'a>(lists: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut index = Self::default();
        let stanzas =
            lists.into_iter().flat_map(|(text, uri)| Stanza::all(text).map(move |stanza| (stanza, uri)));
        for (place, (stanza, uri)) in stanzas.enumerate() {
            if let Some(candidate) = Candidate::parse(stanza, uri, place) {
                index.add(candidate);
            }
        }
        for candidate in index.candidates.values() {
            for provided in alternatives(&candidate.provides) {
                let providers = index.providers.entry(provided.name.to_owned()).or_default();
                providers.push(candidate.package.name.clone());
            }
        }
        for providers in index.providers.values_mut() {
            providers.sort_by_key(|name| {
                let candidate = &index.candidates[name];
                (candidate.priority, candidate.place)
            });
        }
        index
    }

    fn add(&mut self, candidate: Candidate) {
        let package = &candidate.package;
        let is_newest = self
            .candidates
            .get(&package.name)
            .is_none_or(|other| compare(&package.version, &other.package.version).is_gt());
        if is_newest {
            self.candidates.insert(package.name.clone(), candidate);
        }
    }

    /// Returns the packages with these names, and all that they depend on.
    pub fn resolve(&self, names: &[&str]) -> Result<Vec<Package>, Unmet> {
        let mut chosen = Chosen { index: self, packages: Vec::new() };
        let mut left = Vec::new();
        for name in names {
            let candidate = self.find(name).ok_or_else(|| Unmet::NoPackage((*name).to_owned()))?;
            left.push(candidate);
        }
        // All that are asked for come first: they may be what others depend on.
        for candidate in &left {
            chosen.add(candidate);
        }
        for candidate in left {
            chosen.add_dependencies(candidate)?;
        }
        Ok(chosen.packages.into_iter().map(|candidate| candidate.package.clone()).collect())
    }

    /// Returns the package of this name, or the best of those that provide it.
    fn find(&self, name: &str) -> Option<&Candidate> {
        self.candidates.get(name).or_else(|| self.candidates.get(self.providers.get(name)?.first()?))
    }

    /// Returns the packages with which an alternative is met, the best one first.
    fn meeting<'a>(&'a self, wanted: Alternative<'a>) -> impl Iterator<Item = &'a Candidate> {
        let own = self.candidates.get(wanted.name);
        let providers = self.providers.get(wanted.name).into_iter().flatten();
        let providers = providers.filter_map(|name| self.candidates.get(name));
        own.into_iter().chain(providers).filter(move |candidate| candidate.meets(wanted))
    }
}

impl Candidate {
    fn parse(stanza: Stanza, uri: &str, place: usize) -> Option<Self> {
        let package = Package::parse(stanza, uri)?;
        let text = |name| stanza.field(name).unwrap_or_default();
        let depends = [text("Pre-Depends"), text("Depends")].join(",");
        let priority = PRIORITIES.iter().position(|priority| *priority == text("Priority"));
        let provides = text("Provides").to_owned();
        Some(Self { package, depends, provides, priority: priority.unwrap_or(PRIORITIES.len()), place })
    }

    fn meets(&self, wanted: Alternative) -> bool {
        let is_own = self.package.name == wanted.name && wanted.is_met(Some(&self.package.version));
        is_own
            || alternatives(&self.provides).any(|provided| {
                provided.name == wanted.name && wanted.is_met(provided.version.map(|(_, version)| version))
            })
    }
}

/// The packages that were chosen.
struct Chosen<'a> {
    index: &'a Index,
    packages: Vec<&'a Candidate>,
}

impl<'a> Chosen<'a> {
    /// Adds a package. Returns true if it is new.
    fn add(&mut self, candidate: &'a Candidate) -> bool {
        let is_new = !self.packages.iter().any(|other| other.package.name == candidate.package.name);
        if is_new {
            self.packages.push(candidate);
        }
        is_new
    }

    fn add_dependencies(&mut self, of: &'a Candidate) -> Result<(), Unmet> {
        for dependency in of.depends.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let wanted = || dependency.split('|').filter_map(Alternative::parse);
            if wanted().any(|wanted| self.packages.iter().any(|candidate| candidate.meets(wanted))) {
                continue;
            }
            let index = self.index;
            let best = wanted().find_map(|wanted| index.meeting(wanted).next());
            let best = best.ok_or_else(|| Unmet::Dependency {
                package: of.package.name.clone(),
                on: dependency.split_whitespace().collect::<Vec<_>>().join(" "),
            })?;
            if self.add(best) {
                self.add_dependencies(best)?;
            }
        }
        Ok(())
    }
}

impl<'a> Alternative<'a> {
    /// Parses `NAME`, `NAME:any` or `NAME (RELATION VERSION)`.
    fn parse(text: &'a str) -> Option<Self> {
        let (name, version) = match text.split_once('(') {
            Some((name, version)) => (name, Some(version.trim().strip_suffix(')')?.trim())),
            None => (text, None),
        };
        let name = name.trim().split(':').next()?;
        let version = version.map(|text| {
            let version = text.trim_start_matches(['<', '=', '>']);
            (&text[..text.len() - version.len()], version.trim())
        });
        (!name.is_empty()).then_some(Self { name, version })
    }

    /// Returns true if a version is one of those that are wanted. A package that provides no particular one meets only
    /// a dependency that wants none.
    fn is_met(&self, version: Option<&str>) -> bool {
        let Some((relation, wanted)) = self.version else { return true };
        let Some(version) = version else { return false };
        let order = compare(version, wanted);
        match relation {
            "<<" => order.is_lt(),
            "<=" | "<" => order.is_le(),
            "=" => order.is_eq(),
            ">=" | ">" => order.is_ge(),
            ">>" => order.is_gt(),
            _ => false,
        }
    }
}

/// Returns what a list without alternatives names, such as `Provides`.
fn alternatives(list: &str) -> impl Iterator<Item = Alternative<'_>> {
    list.split(',').filter_map(Alternative::parse)
}

#[cfg(test)]
mod tests;
