//! Reads the modules of a crate, and what each takes from the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{Taken, circle};

/// Names from the crate's root to a module or an item.
type Names = Vec<String>;

/// Returns the roots of the library and of the programs of a crate.
pub fn roots(folder: &Path) -> Vec<PathBuf> {
    let source = folder.join("src");
    let programs = fs::read_dir(source.join("bin")).into_iter().flatten().flatten();
    let programs = programs.map(|entry| {
        let path = entry.path();
        if path.is_dir() { path.join("main.rs") } else { path }
    });
    let roots = [source.join("lib.rs"), source.join("main.rs")].into_iter().chain(programs);
    roots.filter(|root| root.is_file()).collect()
}

/// The first name of what is in another crate.
const ELSEWHERE: &str = "elsewhere";

/// A file of a crate.
#[derive(Default)]
struct Module {
    /// The file's name from the project on.
    file: String,
    items: BTreeSet<String>,
    /// Names that it has from elsewhere, with what they stand for.
    imported: BTreeMap<String, Names>,
    globs: Vec<Names>,
    /// All paths in it that are of this crate.
    paths: BTreeSet<Names>,
}

/// The modules of a crate, without those of tests.
pub struct Tree {
    modules: BTreeMap<Names, Module>,
}

impl Tree {
    /// Reads the module `root` and those below it. Files are named as seen from `project`.
    pub fn read(root: &Path, project: &Path) -> Self {
        let mut tree = Self { modules: BTreeMap::new() };
        let folder = root.parent().expect("a file is in a folder");
        tree.add(root, folder, project, &[]);
        tree
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    fn add(&mut self, file: &Path, folder: &Path, project: &Path, path: &[String]) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let name = file.strip_prefix(project).unwrap_or(file).display().to_string();
        let mut module = Module { file: name, ..Module::default() };
        let mut children = Vec::new();
        Reader { module: &mut module, children: &mut children, file: path }.read(tokens, path);
        self.modules.insert(path.to_vec(), module);
        for child in children {
            let found = [folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs")];
            let below = [path, std::slice::from_ref(&child)].concat();
            let Some(found) = found.into_iter().find(|found| found.is_file()) else { continue };
            self.add(&found, &folder.join(&child), project, &below);
        }
    }

    /// Returns the module that has what a path names, or `None` if that is in another crate.
    fn owner(&self, path: &[String], depth: usize) -> Option<Names> {
        if path.first().is_some_and(|name| name == ELSEWHERE) {
            return None;
        }
        let mut module = Names::new();
        for (at, name) in path.iter().enumerate() {
            let below = [&module[..], std::slice::from_ref(name)].concat();
            if self.modules.contains_key(&below) {
                module = below;
                continue;
            }
            let here = &self.modules[&module];
            if depth > 0 && !here.items.contains(name) {
                if let Some(imported) = here.imported.get(name) {
                    return self.owner(&[&imported[..], &path[at + 1..]].concat(), depth - 1);
                }
                let rest = &path[at..];
                let has = |glob: &&Names| self.has(glob, &rest[0]);
                if let Some(glob) = here.globs.iter().find(has) {
                    return self.owner(&[&glob[..], rest].concat(), depth - 1);
                }
            }
            break;
        }
        Some(module)
    }

    fn has(&self, module: &Names, name: &str) -> bool {
        let below = [&module[..], &[name.to_owned()]].concat();
        self.modules.contains_key(&below)
            || self
                .modules
                .get(module)
                .is_some_and(|module| module.items.contains(name) || module.imported.contains_key(name))
    }

    /// Returns the circles and the imports that run upwards, the first ones of each folder.
    pub fn faults(&self) -> Vec<String> {
        const RE_EXPORTS: usize = 8;
        let mut rooms: BTreeMap<Names, Taken> = BTreeMap::new();
        let mut upwards = BTreeSet::new();
        for (from, module) in &self.modules {
            for path in &module.paths {
                let Some(to) = self.owner(path, RE_EXPORTS) else { continue };
                let common = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
                let name = path.last().cloned().unwrap_or_default();
                if common == to.len() {
                    // From above, or from itself.
                    if to.is_empty() && from.len() > 1 {
                        let (file, above) = (&module.file, &self.modules[&to].file);
                        upwards.insert(format!("upwards: {file} takes from {above}: {name}"));
                    }
                } else if common < from.len() {
                    let room = |path: &Names| self.modules[&path[..=common]].file.clone();
                    let taken = rooms.entry(from[..common].to_vec()).or_default();
                    taken.entry(room(from)).or_default().entry(room(&to)).or_default().insert(name);
                }
            }
        }
        rooms.values().filter_map(circle).chain(upwards).collect()
    }
}

/// Reads the tokens of a file.
struct Reader<'a> {
    module: &'a mut Module,
    children: &'a mut Vec<String>,
    file: &'a [String],
}

impl Reader<'_> {
    /// Reads what is in the module `path`, which is the file's or one within the file.
    fn read(&mut self, tokens: TokenStream, path: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            at += self.one(&tokens[at..], path);
        }
    }

    /// Reads the first of these tokens, with those that belong to it. Returns their number.
    fn one(&mut self, tokens: &[TokenTree], path: &[String]) -> usize {
        let word = |at: usize| match tokens.get(at) {
            Some(TokenTree::Ident(word)) => Some(word.to_string()),
            _ => None,
        };
        match &tokens[0] {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let is_for_tests = matches!(tokens.get(1), Some(TokenTree::Group(group))
                    if group.stream().to_string().replace(' ', "") == "cfg(test)");
                if is_for_tests { 2 + item(&tokens[2..]) } else { 1 }
            }
            TokenTree::Group(group) => {
                self.read(group.stream(), path);
                1
            }
            TokenTree::Ident(first) => match first.to_string().as_str() {
                "mod" => {
                    let Some(name) = word(1) else { return 1 };
                    let below = [path, std::slice::from_ref(&name)].concat();
                    if let Some(TokenTree::Group(group)) = tokens.get(2) {
                        self.read(group.stream(), &below);
                    } else {
                        self.children.push(name);
                    }
                    3
                }
                "use" => {
                    let end =
                        tokens.iter().position(|token| token.to_string() == ";").unwrap_or(tokens.len());
                    self.import(&tokens[1..end], None, path);
                    end
                }
                "struct" | "enum" | "union" | "trait" | "fn" | "type" | "const" | "static"
                | "macro_rules" => {
                    let name = (1..4).find_map(|at| word(at).filter(|word| word != "mut" && word != "fn"));
                    self.module.items.extend(name);
                    1
                }
                "crate" | "self" | "super" => {
                    let (names, length) = names(tokens);
                    if let Some(names) =
                        absolute(&names, path).filter(|names| !names.is_empty() && length > 1)
                    {
                        self.insert(names);
                    }
                    length
                }
                _ => 1,
            },
            _ => 1,
        }
    }

    fn insert(&mut self, path: Names) {
        if path.first().is_some_and(|name| name != ELSEWHERE) {
            self.module.paths.insert(path);
        }
    }

    /// Reads a tree of imports, which begins after `before`.
    fn import(&mut self, tokens: &[TokenTree], before: Option<&Names>, path: &[String]) {
        let (found, length) = names(tokens);
        let whole = match before {
            Some(before) if found == ["self"] => Some(before.clone()),
            Some(before) => Some([&before[..], &found[..]].concat()),
            None if found.is_empty() => None,
            // Without a keyword, it begins with a module of this one, or with another crate.
            None if ["crate", "self", "super"].contains(&found[0].as_str()) => absolute(&found, path),
            None if self.children.contains(&found[0]) => Some([path, &found[..]].concat()),
            None => Some([&[ELSEWHERE.to_owned()], &found[..]].concat()),
        };
        let Some(whole) = whole else { return };
        match tokens.get(length) {
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for part in inner.split(|token| token.to_string() == ",") {
                    self.import(part, Some(&whole), path);
                }
            }
            Some(TokenTree::Punct(star)) if star.as_char() == '*' => {
                // What a module has from above it, it may have by a glob; that is for what is in the file.
                if path == self.file && whole[0] != ELSEWHERE {
                    self.module.globs.push(whole.clone());
                }
                self.insert(whole);
            }
            renamed => {
                let name = match renamed {
                    Some(TokenTree::Ident(word)) if word == "as" => tokens[length + 1].to_string(),
                    _ => whole.last().cloned().unwrap_or_default(),
                };
                if path == self.file {
                    self.module.imported.insert(name, whole.clone());
                }
                self.insert(whole);
            }
        }
    }
}

/// Returns the names of a path at the beginning of these tokens, and the number of tokens, with the last `::` if there
/// is no name behind it.
fn names(tokens: &[TokenTree]) -> (Names, usize) {
    let (mut names, mut at) = (Names::new(), 0);
    while let Some(TokenTree::Ident(word)) = tokens.get(at) {
        if word == "as" {
            break;
        }
        names.push(word.to_string());
        at += 1;
        let is_colon =
            |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(colon)) if colon.as_char() == ':');
        if !(is_colon(at) && is_colon(at + 1)) {
            break;
        }
        at += 2;
    }
    (names, at)
}

/// Returns a path from the crate's root on, of one that is seen from a module.
fn absolute(names: &[String], module: &[String]) -> Option<Names> {
    let mut from = module.to_vec();
    let mut rest = names;
    match rest.first()?.as_str() {
        "crate" => {
            from.clear();
            rest = &rest[1..];
        }
        "self" => rest = &rest[1..],
        _ => {}
    }
    while rest.first().is_some_and(|name| name == "super") {
        from.pop()?;
        rest = &rest[1..];
    }
    from.extend_from_slice(rest);
    Some(from)
}

/// Returns the number of tokens of an item.
fn item(tokens: &[TokenTree]) -> usize {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Punct(punct) => punct.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        _ => false,
    };
    tokens.iter().position(is_end).map_or(tokens.len(), |end| end + 1)
}
