//! Which file needs which: names are followed through `use`, re-exports, aliases and globs to the file that defines them.
//!
//! A file needs another where it names an item of it, in a `use` or in its code, calls a method that only the other file
//! adds to a type, or expands its macro. `mod child;` and a re-export that the file does not use itself are no need.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Token, after_closing, is_word, tokens, without_tests};

/// A module by its path from the root of the crate.
pub type Name = Vec<String>;

/// Per file, the files that it needs, and the names that it needs of each.
pub type Needs = BTreeMap<Name, BTreeMap<Name, BTreeSet<String>>>;

/// Reads the files of a crate, given as their module and code. Comments and literals are blank.
pub fn needs(files: &BTreeMap<Name, String>) -> Needs {
    let code = Code::read(files);
    let mut needs = Needs::new();
    for (name, file) in &code.files {
        let needed = needs.entry(name.clone()).or_default();
        for (path, target) in code.needed_by(name, file) {
            if target != *name && code.files.contains_key(&target) {
                needed.entry(target).or_default().insert(path);
            }
        }
    }
    needs
}

struct Code<'a> {
    files: BTreeMap<Name, File<'a>>,
    /// Methods that a file adds to a type of another file, and that no other type has.
    added_methods: BTreeMap<&'a str, Name>,
    macros: BTreeMap<&'a str, Name>,
}

#[derive(Default)]
struct File<'a> {
    /// The code without `use` items.
    body: Vec<Token<'a>>,
    uses: Vec<Use<'a>>,
    /// Items and methods.
    defines: BTreeSet<&'a str>,
}

struct Use<'a> {
    path: Vec<&'a str>,
    /// The name in this file; `*` for a glob.
    name: &'a str,
    is_export: bool,
}

impl<'a> Code<'a> {
    fn read(files: &'a BTreeMap<Name, String>) -> Code<'a> {
        let mut kept = BTreeMap::new();
        let mut tests = BTreeSet::new();
        for (name, text) in files {
            let (tokens, test_modules) = without_tests(&tokens(text));
            let below = |module: &&str| [&name[..], &[(*module).to_owned()]].concat();
            tests.extend(test_modules.iter().map(below));
            kept.insert(name, tokens);
        }
        kept.retain(|name, _| !tests.iter().any(|test| name.starts_with(test)));
        let read = |(name, tokens): (&&Name, &Vec<_>)| ((*name).clone(), File::read(name, tokens));
        let read = kept.iter().map(read).collect();
        let mut code = Code {
            files: read,
            added_methods: BTreeMap::new(),
            macros: BTreeMap::new(),
        };
        code.add_methods_and_macros();
        code
    }

    fn add_methods_and_macros(&mut self) {
        let mut methods: BTreeMap<&str, Vec<Option<Name>>> = BTreeMap::new();
        for (name, file) in &self.files {
            let body = &file.body;
            let mut added_until = 0;
            for (at, token) in body.iter().enumerate() {
                match *token {
                    "impl" => {
                        if let Some((subject, open)) = inherent_impl(body, at) {
                            let definer = self.defining(name, &subject);
                            if definer.is_some_and(|definer| definer != *name) {
                                added_until = after_closing(body, open);
                            }
                        }
                    }
                    "fn" => {
                        let adds = (at < added_until).then(|| name.clone());
                        methods.entry(body[at + 1]).or_default().push(adds);
                    }
                    "macro_rules" => {
                        self.macros.insert(body[at + 2], name.clone());
                    }
                    _ => {}
                }
            }
        }
        for (method, adders) in methods {
            if let [Some(adder)] = &adders[..] {
                self.added_methods.insert(method, adder.clone());
            }
        }
    }

    /// What the code of a file names, and the file that defines it.
    fn needed_by(&self, name: &Name, file: &File<'a>) -> Vec<(String, Name)> {
        let mut found = Vec::new();
        let mut need = |path: &[&str]| {
            let target = self.defining(name, path)?;
            found.push((path.join("::"), target));
            Some(())
        };
        for one in file.uses.iter().filter(|one| !one.is_export) {
            need(&one.path);
        }
        let body = &file.body;
        let mut at = 0;
        while at < body.len() {
            let path = path_at(body, at);
            let before = if at > 0 { body[at - 1] } else { "" };
            let (start, length) = (at, path.len() * 2);
            at += length.max(2) - 1;
            let next = body.get(at).copied().unwrap_or_default();
            if path.is_empty() || matches!(before, "." | "fn" | "mod" | "::" | "'") {
                continue;
            }
            let is_field_or_binding = path.len() == 1 && (next == ":" || before == "let");
            if !is_field_or_binding && body[start] != "Self" {
                need(&path);
            }
        }
        for (at, token) in body.iter().enumerate() {
            let next = body.get(at + 1).copied().unwrap_or_default();
            let before = if at > 0 { body[at - 1] } else { "" };
            let target = match (before, next) {
                ("." | "::", "(" | "::" | ",") => self.added_methods.get(token),
                (_, "!") => self.macros.get(token),
                _ => None,
            };
            if let Some(target) = target {
                found.push(((*token).to_owned(), target.clone()));
            }
        }
        found
    }

    /// The file that defines what `path` means in `file`; `None` for names of other crates and for
    /// names of the file itself.
    fn defining(&self, file: &Name, path: &[&str]) -> Option<Name> {
        self.follow(file, path, 0)
    }

    fn follow(&self, file: &Name, path: &[&str], depth: usize) -> Option<Name> {
        const MAX_REEXPORTS: usize = 8;
        if depth > MAX_REEXPORTS {
            return None;
        }
        let ups = path.iter().take_while(|part| **part == "super").count();
        let (mut module, mut rest) = match *path.first()? {
            "crate" => (Vec::new(), &path[1..]),
            "super" => (file[..file.len().checked_sub(ups)?].to_vec(), &path[ups..]),
            "self" => (file.clone(), &path[1..]),
            _ => (file.clone(), path),
        };
        let is_relative = rest.len() == path.len();
        while let Some(first) = rest.first() {
            let child = [&module[..], &[(*first).to_owned()]].concat();
            if self.files.contains_key(&child) {
                (module, rest) = (child, &rest[1..]);
                continue;
            }
            let named = self.files.get(&module)?;
            if named.defines.contains(first) {
                break;
            }
            if let Some(one) = named.uses.iter().find(|one| one.name == *first) {
                let through = [&one.path[..], &rest[1..]].concat();
                // `use tokio::x` is a name of another crate
                return (through != path || module != *file)
                    .then(|| self.follow(&module, &through, depth + 1))?;
            }
            let mut globs = named.uses.iter().filter(|one| one.name == "*");
            return globs
                .find_map(|one| {
                    let through = [&one.path[..], rest].concat();
                    let definer = self.follow(&module, &through, depth + 1)?;
                    let defines = &self.files.get(&definer)?.defines;
                    defines.contains(first).then_some(definer)
                })
                .or_else(|| (!is_relative && module != *file).then_some(module));
        }
        // a module alone defines nothing: what is named through it counts
        (!rest.is_empty() && (module != *file || depth > 0)).then_some(module)
    }
}

impl<'a> File<'a> {
    fn read(name: &Name, all: &[Token<'a>]) -> File<'a> {
        let mut file = File::default();
        let mut at = 0;
        while at < all.len() {
            let next = all.get(at + 1).copied().unwrap_or_default();
            match all[at] {
                "use" if next != "<" => {
                    let length = all[at..].iter().position(|token| *token == ";");
                    let end = at + length.expect("a `use` ends with a semicolon");
                    let is_export = file.body.last() == Some(&"pub");
                    let mut paths = Vec::new();
                    expand(&all[at + 1..end], &[], &mut paths);
                    file.uses.extend(paths.into_iter().map(|(path, name)| Use {
                        path,
                        name,
                        is_export,
                    }));
                    at = end;
                    continue;
                }
                "pub" if next == "(" => {
                    at = after_closing(all, at + 1);
                    file.body.push("pub");
                    continue;
                }
                "mod" if is_word(next) && all.get(at + 2) == Some(&"{") => {
                    panic!("{}: mod {next} has no file of its own", name.join("/"))
                }
                "#" if all[at + 1..].starts_with(&["[", "path", "="]) => {
                    panic!("{}: #[path]", name.join("/"))
                }
                "struct" | "enum" | "union" | "trait" | "type" | "fn" | "const" | "static"
                    if is_word(next) =>
                {
                    file.defines.insert(next);
                }
                "macro_rules" => {
                    file.defines.insert(all[at + 2]);
                }
                _ => {}
            }
            file.body.push(all[at]);
            at += 1;
        }
        file
    }
}

/// The paths of a tree such as `a::{b, c::{self, d as e}}`, each with its name in the file.
fn expand<'a>(tree: &[Token<'a>], prefix: &[&'a str], found: &mut Vec<(Vec<&'a str>, &'a str)>) {
    let mut path = prefix.to_vec();
    let mut at = 0;
    while at < tree.len() {
        match tree[at] {
            "{" => {
                let end = after_closing(tree, at);
                let (mut start, mut inner) = (at + 1, at + 1);
                while inner < end - 1 {
                    match tree[inner] {
                        "," => {
                            expand(&tree[start..inner], &path, found);
                            start = inner + 1;
                            inner += 1;
                        }
                        "{" => inner = after_closing(tree, inner),
                        _ => inner += 1,
                    }
                }
                return expand(&tree[start..end - 1], &path, found);
            }
            "as" => {
                found.push((path, tree[at + 1]));
                return;
            }
            "*" => {
                found.push((path, "*"));
                return;
            }
            "self" if !path.is_empty() => {}
            word if is_word(word) => path.push(word),
            _ => {}
        }
        at += 1;
    }
    if let Some(name) = path.last().copied().filter(|_| !tree.is_empty()) {
        found.push((path, name));
    }
}

/// The words of `a::b::c` at `at`; empty if no word is there.
fn path_at<'a>(body: &[Token<'a>], at: usize) -> Vec<&'a str> {
    let mut path = Vec::new();
    let mut at = at;
    while let Some(word) = body.get(at).filter(|token| is_word(token)) {
        path.push(*word);
        if body.get(at + 1) != Some(&"::") {
            break;
        }
        at += 2;
    }
    path
}

/// The type of an `impl Type {` at `at`, and the index of its brace; `None` for a trait's.
fn inherent_impl<'a>(body: &[Token<'a>], at: usize) -> Option<(Vec<&'a str>, usize)> {
    let mut start = at + 1;
    if body.get(start) == Some(&"<") {
        let mut depth = 0_usize;
        loop {
            match *body.get(start)? {
                "<" => depth += 1,
                ">" if body[start - 1] != "-" => depth -= 1,
                _ => {}
            }
            start += 1;
            if depth == 0 {
                break;
            }
        }
    }
    let subject = path_at(body, start);
    let open = start
        + body[start..]
            .iter()
            .position(|token| matches!(*token, "{" | ";"))?;
    let header = &body[start..open];
    (body[open] == "{" && !subject.is_empty() && !header.contains(&"for"))
        .then_some((subject, open))
}
