//! Checks that the files of one crate import each other without cycles.
//!
//! An import is a path of a `use` or of an expression that begins at `crate`, `super`, `self` or a child module. It
//! leads to the file that defines the name, through any re-export. Test code does not count, nor does a `mod`
//! declaration.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::ops::Range;

use super::files::Repository;
use super::scan::{matching_brace, words};
use super::{Finding, Level};

/// Crates whose files must not import each other in cycles. For the others, the number of such imports is reported.
const ORDERED: [&str; 2] = ["forebay-lab", "forebay-model"];

/// Largest number of re-exports that a path is followed through.
const HOPS_MAX: usize = 8;

type ModulePath = Vec<String>;

/// A path in `use` or elsewhere, and the name that it is imported under.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    path: Vec<String>,
    name: String,
}

struct Module {
    file: String,
    uses: Vec<Import>,
    mentions: Vec<Vec<String>>,
}

/// Modules of one crate, by their path from the crate's root.
struct Crate {
    modules: BTreeMap<ModulePath, Module>,
}

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    let sources = repository.rust_sources().iter();
    let crates: BTreeSet<&str> = sources
        .filter_map(|source| source.path.strip_prefix("crates/")?.split('/').next())
        .collect();
    for name in crates {
        let Some(found) = Crate::of(repository, name) else { continue };
        let imports = found.imports();
        let cyclic = in_cycles(&imports);
        if ORDERED.contains(&name) {
            for (from, to) in &cyclic {
                let message = format!("its import of {to} is part of a cycle");
                findings.push(Finding::fail(from, 0, message));
            }
        } else if !cyclic.is_empty() {
            let count = cyclic.len();
            let message = format!("{count} of {} imports are part of a cycle", imports.len());
            let path = format!("crates/{name}/src");
            findings.push(Finding { level: Level::Report, path, line: 0, message });
        }
    }
}

/// Returns the imports that are part of a cycle.
fn in_cycles(imports: &BTreeSet<(String, String)>) -> Vec<&(String, String)> {
    let reaches = |from: &str, to: &str| {
        let (mut seen, mut waiting) = (BTreeSet::from([from]), vec![from]);
        while let Some(at) = waiting.pop() {
            if at == to {
                return true;
            }
            let next = imports.iter().filter(|(source, _)| source == at);
            waiting
                .extend(next.map(|(_, target)| target.as_str()).filter(|next| seen.insert(next)));
        }
        false
    };
    imports.iter().filter(|(from, to)| reaches(to, from)).collect()
}

impl Crate {
    /// Reads a crate. Returns `None` if it has neither a library nor a program at `src/main.rs`.
    fn of(repository: &Repository, name: &str) -> Option<Crate> {
        let folder = format!("crates/{name}/src/");
        let sources: BTreeMap<&str, &str> = repository
            .rust_sources()
            .iter()
            .filter_map(|source| Some((source.path.strip_prefix(&folder)?, source.code.as_str())))
            .collect();
        let root = ["lib.rs", "main.rs"].into_iter().find(|root| sources.contains_key(root))?;
        let mut modules = BTreeMap::new();
        let mut waiting = vec![(ModulePath::new(), root.to_owned())];
        while let Some((path, file)) = waiting.pop() {
            let code = without_tests(sources[file.as_str()]);
            for child in declared(&code) {
                let mut path = path.clone();
                path.push(child);
                let base = path.join("/");
                let files = [format!("{base}.rs"), format!("{base}/mod.rs")];
                if let Some(file) =
                    files.into_iter().find(|file| sources.contains_key(file.as_str()))
                {
                    waiting.push((path, file));
                }
            }
            let (uses, mentions) = paths(&code);
            modules.insert(path, Module { file: format!("{folder}{file}"), uses, mentions });
        }
        Some(Crate { modules })
    }

    /// Returns every import between two files.
    fn imports(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for (at, module) in &self.modules {
            let paths = module.uses.iter().map(|import| &import.path).chain(&module.mentions);
            for target in paths.filter_map(|path| self.definer(at, path, HOPS_MAX)) {
                if target != *at {
                    found.insert((module.file.clone(), self.modules[&target].file.clone()));
                }
            }
        }
        found
    }

    /// Returns the module that defines what `path` names inside of the module `at`, or `None` for names of other
    /// crates.
    fn definer(&self, at: &ModulePath, path: &[String], hops: usize) -> Option<ModulePath> {
        let (mut here, mut rest) = (at.clone(), path);
        match rest.first()?.as_str() {
            "crate" => (here, rest) = (ModulePath::new(), &rest[1..]),
            "self" | "super" => {
                while let Some(word @ ("self" | "super")) = rest.first().map(String::as_str) {
                    if word == "super" {
                        here.pop();
                    }
                    rest = &rest[1..];
                }
            }
            first if self.child(&here, first).is_none() => return None,
            _ => {}
        }
        while let Some((first, behind)) = rest.split_first() {
            if let Some(child) = self.child(&here, first) {
                (here, rest) = (child, behind);
                continue;
            }
            let mut exports = self.modules[&here].uses.iter().filter(|use_| use_.name == *first);
            let renamed = exports.find_map(|export| {
                let path: Vec<String> = export.path.iter().chain(behind).cloned().collect();
                self.definer(&here, &path, hops.checked_sub(1)?)
            });
            return Some(renamed.unwrap_or(here));
        }
        Some(here)
    }

    fn child(&self, of: &ModulePath, name: &str) -> Option<ModulePath> {
        let path: ModulePath =
            of.iter().map(String::as_str).chain([name]).map(String::from).collect();
        self.modules.contains_key(&path).then_some(path)
    }
}

/// Returns where modules marked `#[cfg(test)]` are, whether declared or with a body.
pub(super) fn tests_of(code: &str) -> Vec<Range<usize>> {
    let (mut found, mut done) = (Vec::new(), 0);
    while let Some(start) = code[done..].find("#[cfg(test)]").map(|at| done + at) {
        let end = match code[start..].find(['{', ';']).map(|at| start + at) {
            Some(at) if code.as_bytes()[at] == b'{' => matching_brace(code, at),
            Some(at) => at + 1,
            None => code.len(),
        };
        done = end.min(code.len());
        found.push(start..done);
    }
    found
}

/// Returns the code with blanks in place of its tests.
fn without_tests(code: &str) -> String {
    let mut without = code.to_owned();
    for range in tests_of(code) {
        without.replace_range(range.clone(), &" ".repeat(range.len()));
    }
    without
}

/// Returns the names of the modules that `mod NAME;` declares.
fn declared(code: &str) -> Vec<String> {
    let names = words(code, "mod").into_iter().filter_map(|start| {
        let tokens = tokens(&code[start..]);
        let mut tokens = tokens.into_iter().skip(1);
        let name = tokens.next()?;
        (tokens.next()? == ";").then(|| name.to_owned())
    });
    names.collect()
}

/// Returns words, `::` and single punctuation marks up to and including the first `;` or `{`, or all of `code` if it
/// has neither.
fn tokens(code: &str) -> Vec<&str> {
    Tokens(code).take_while_inclusive(|token| !matches!(*token, ";" | "{"))
}

struct Tokens<'a>(&'a str);

impl<'a> Iterator for Tokens<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.0 = self.0.trim_start();
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let length = match self.0.find(|c| !is_word(c)) {
            _ if self.0.is_empty() => return None,
            Some(0) if self.0.starts_with("::") => 2,
            Some(0) => self.0.chars().next().map_or(1, char::len_utf8),
            Some(length) => length,
            None => self.0.len(),
        };
        let (token, rest) = self.0.split_at(length);
        self.0 = rest;
        Some(token)
    }
}

trait TakeWhileInclusive: Iterator + Sized {
    fn take_while_inclusive(self, keep: impl Fn(&Self::Item) -> bool) -> Vec<Self::Item> {
        let mut taken = Vec::new();
        for item in self {
            let last = !keep(&item);
            taken.push(item);
            if last {
                break;
            }
        }
        taken
    }
}

impl<I: Iterator> TakeWhileInclusive for I {}

/// Returns the imports of `use` declarations, and all paths of two words or more elsewhere.
fn paths(code: &str) -> (Vec<Import>, Vec<Vec<String>>) {
    let (mut uses, mut mentions) = (Vec::new(), Vec::new());
    let all: Vec<&str> = Tokens(code).collect();
    let mut at = 0;
    while at < all.len() {
        if all[at] == "use" {
            let end =
                at + all[at..].iter().position(|token| *token == ";").unwrap_or(all.len() - at);
            tree(&mut all[at + 1..end].iter().copied().peekable(), &[], &mut uses);
            at = end + 1;
            continue;
        }
        let mut path = vec![all[at].to_owned()];
        while all.get(at + 1) == Some(&"::") && all.get(at + 2).is_some_and(|next| is_name(next)) {
            path.push(all[at + 2].to_owned());
            at += 2;
        }
        if path.len() > 1 {
            mentions.push(path);
        }
        at += 1;
    }
    (uses, mentions)
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads one tree of a `use` declaration that follows the path `before`.
fn tree<'a>(
    tokens: &mut Peekable<impl Iterator<Item = &'a str>>,
    before: &[String],
    found: &mut Vec<Import>,
) {
    let mut path = before.to_vec();
    while let Some(token) = tokens.next() {
        match token {
            "{" => {
                while tokens.peek().is_some_and(|next| *next != "}") {
                    tree(tokens, &path, found);
                    if tokens.peek() == Some(&",") {
                        tokens.next();
                    }
                }
                tokens.next();
                return;
            }
            "self" if !path.is_empty() && path.last().is_some_and(|last| last != "super") => {}
            "*" => return found.push(Import { path, name: "*".to_owned() }),
            "as" => {
                let name = tokens.next().unwrap_or_default().to_owned();
                return found.push(Import { path, name });
            }
            "::" => {}
            name => path.push(name.to_owned()),
        }
        if matches!(tokens.peek(), None | Some(&"," | &"}")) {
            break;
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    found.push(Import { path, name });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(files: &[(&str, &str)]) -> Vec<String> {
        let named: Vec<(String, &str)> = files
            .iter()
            .map(|(path, text)| (format!("crates/forebay-model/src/{path}"), *text))
            .collect();
        let texts: Vec<(&str, &str)> =
            named.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let mut findings = Vec::new();
        check(&Repository::from_texts(&texts), &mut findings);
        findings
            .iter()
            .map(|f| format!("{}: {}", f.path.rsplit('/').next().unwrap(), f.message))
            .collect()
    }

    #[test]
    fn a_cycle_fails_and_its_absence_does_not() {
        let down = [("lib.rs", "mod a;\nmod b;\n"), ("a.rs", "use crate::b::B;"), ("b.rs", "")];
        assert_eq!(failures(&down), Vec::<String>::new());
        let both = [down[0], down[1], ("b.rs", "fn f() { crate::a::g() }")];
        assert_eq!(failures(&both).len(), 2);
    }

    #[test]
    fn re_exports_lead_to_the_file_that_defines_the_name() {
        let facade =
            "mod error;\nmod a;\npub use error::{Error, Other as Renamed};\npub use a::A;\n";
        let files = [
            ("lib.rs", facade),
            ("error.rs", "pub struct Error;"),
            ("a.rs", "use crate::{Error, Renamed};"),
        ];
        assert_eq!(failures(&files), Vec::<String>::new());
        let defines = [
            ("lib.rs", "mod a;\npub use a::A;\npub struct B;\n"),
            ("a.rs", "pub struct A; use super::B;"),
        ];
        assert_eq!(failures(&defines).len(), 2);
    }

    #[test]
    fn tests_and_other_crates_do_not_count() {
        let files = [
            ("lib.rs", "mod a;\n#[cfg(test)]\nmod tests;\nuse a::A;\n"),
            ("a.rs", "use std::fmt;\n#[cfg(test)]\nmod tests { use crate::B; }\n"),
            ("tests.rs", "use crate::a::A;"),
        ];
        assert_eq!(failures(&files), Vec::<String>::new());
    }

    #[test]
    fn trees_are_taken_apart() {
        let (uses, mentions) =
            paths("pub use super::{a::{self, B as C}, d::*};\nfn f() { x::y(self::z::w) }");
        let of = |path: &str, name: &str| Import {
            path: path.split("::").map(String::from).collect(),
            name: name.to_owned(),
        };
        let expected = vec![of("super::a", "a"), of("super::a::B", "C"), of("super::d", "*")];
        assert_eq!(uses, expected);
        assert_eq!(mentions, [vec!["x", "y"], vec!["self", "z", "w"]]);
    }
}
