//! Files of a module import each other in one direction only: what a file needs can be read without the files that need it.
//!
//! An import counts against the file that defines the name: a re-export (`pub use`) is followed, and is no import itself.

use std::collections::{BTreeMap, BTreeSet};

use super::{Source, source_files, words};

/// Modules without a circle of files. Add a module here once it is free of them.
const FREE_OF_CIRCLES: &[&str] = &["gateway", "issuer", "overload", "route"];

type Name = Vec<String>;

#[test]
fn files_of_a_module_import_each_other_in_one_direction() {
    let files: BTreeMap<Name, String> = source_files().iter().map(named).collect();
    let imports = imports(&files);
    let circular: Vec<String> = imports
        .keys()
        .filter(|file| {
            FREE_OF_CIRCLES.contains(&file[0].as_str()) && reaches_itself(file, &imports)
        })
        .map(|file| file.join("/"))
        .collect();
    assert!(
        circular.is_empty(),
        "files that import each other in a circle:\n{}",
        circular.join("\n")
    );
    for module in FREE_OF_CIRCLES {
        assert!(
            files.keys().any(|file| file[0] == *module),
            "no file of {module} was seen"
        );
    }
}

#[test]
fn a_circle_of_files_is_found() {
    let files = |texts: &[(&str, &str)]| -> BTreeMap<Name, String> {
        let name = |name: &str| name.split('/').map(str::to_owned).collect();
        let file = |(path, code): &(&str, &str)| (name(path), (*code).to_owned());
        texts.iter().map(file).collect()
    };
    let circular = |texts: &[(&str, &str)]| {
        let imports = imports(&files(texts));
        let names = imports.keys().filter(|file| reaches_itself(file, &imports));
        names.map(|file| file.join("/")).collect::<Vec<_>>()
    };
    let there = ("a/one", "use super::two::{self, Two}; struct One;");
    assert_eq!(
        circular(&[there, ("a/two", "use crate::a::{one::One};")]),
        ["a/one", "a/two"]
    );
    assert_eq!(circular(&[there, ("a/two", "struct Two;")]), [""; 0]);
    let by_parent = ("a", "mod one; pub use two::Two; use one::One;");
    assert_eq!(
        circular(&[by_parent, ("a/one", "use super::Two;"), ("a/two", "")]),
        [""; 0],
        "a re-export is followed"
    );
    assert_eq!(
        circular(&[
            ("a", "use one::One; struct Two;"),
            ("a/one", "fn f(x: super::Two) {}")
        ]),
        ["a", "a/one"]
    );
    assert_eq!(
        circular(&[
            ("a", "mod one; struct Two; fn f() { one::f() }"),
            ("a/one", "use super::Two;")
        ]),
        ["a", "a/one"],
        "a path in the code is an import"
    );
    let parent = "#[cfg(test)]\nmod tests;\nuse a;\n#[cfg(test)]\nmod more {\nuse b;";
    assert!(without_tests(parent).contains("use a;"));
    assert!(!without_tests(parent).contains("use b;"));
}

fn named(file: &Source) -> (Name, String) {
    let path = file.path.with_extension("");
    let parts = path.iter().map(|part| part.to_string_lossy().into_owned());
    let mut name: Name = parts.collect();
    let src = name.iter().rposition(|part| part == "src");
    name.drain(..=src.expect("a file below src"));
    if name.last().is_some_and(|last| last == "mod") {
        name.pop();
    }
    (name, without_tests(&file.code).to_owned())
}

/// The code before an inline module of tests. `mod tests;` names a file of its own.
fn without_tests(code: &str) -> &str {
    let is_inline = |(at, start): &(usize, &str)| {
        let rest = &code[at + start.len()..];
        rest.split_once('\n')
            .is_some_and(|(line, _)| line.ends_with('{'))
    };
    match code.match_indices("#[cfg(test)]\nmod ").find(is_inline) {
        Some((at, _)) => &code[..at],
        None => code,
    }
}

/// Which files each file imports from.
fn imports(files: &BTreeMap<Name, String>) -> BTreeMap<Name, BTreeSet<Name>> {
    let uses: BTreeMap<&Name, Vec<Use>> = files
        .iter()
        .map(|(name, code)| (name, uses(name, code, files)))
        .collect();
    let mut exported = BTreeMap::new();
    for (file, uses) in &uses {
        for one in uses {
            let last = one.path.last().cloned().unwrap_or_default();
            exported.insert(((*file).clone(), last), one.path.clone());
        }
    }
    let from = |(file, uses): (&&Name, &Vec<Use>)| {
        let imported = uses.iter().filter(|one| !one.is_export);
        let targets = imported.filter_map(|one| defining(&one.path, files, &exported));
        (
            (*file).clone(),
            targets.filter(|target| target != *file).collect(),
        )
    };
    uses.iter().map(from).collect()
}

struct Use {
    /// From the root of the crate.
    path: Name,
    is_export: bool,
}

/// Every path that a file names in `use`, or in its code from `crate`, `super` or a child module on.
fn uses(file: &Name, code: &str, files: &BTreeMap<Name, String>) -> Vec<Use> {
    let mut found = Vec::new();
    let mut rest = code;
    let mut body = String::new();
    while let Some(at) = rest.find("use ") {
        let is_word = !rest[..at].ends_with(|c: char| c == '_' || c.is_alphanumeric());
        let Some(length) = rest[at..].find(';').filter(|_| is_word) else {
            body.push_str(&rest[..at + 4]);
            rest = &rest[at + 4..];
            continue;
        };
        let before = rest[..at]
            .rsplit(['\n', ';', '}'])
            .next()
            .unwrap_or_default();
        let is_export = before.contains("pub");
        let mut paths = Vec::new();
        expand(&rest[at + 4..at + length], &[], &mut paths);
        found.extend(paths.into_iter().map(|path| (path, is_export)));
        body.push_str(&rest[..at]);
        rest = &rest[at + length..];
    }
    body.push_str(rest);
    let paths = body.split(|c: char| c != ':' && c != '_' && !c.is_alphanumeric());
    for path in paths.filter(|path| path.contains("::")) {
        let names: Name = path.split("::").map(str::to_owned).collect();
        if names.iter().all(|name| !name.is_empty()) {
            found.push((names, false));
        }
    }
    let from_root = |(path, is_export): (Name, bool)| {
        let path = absolute(file, &path, files)?;
        Some(Use { path, is_export })
    };
    found.into_iter().filter_map(from_root).collect()
}

/// The paths of a tree such as `a::{b, c::{self, d}}`.
fn expand(tree: &str, prefix: &[String], found: &mut Vec<Name>) {
    let (mut depth, mut start) = (0_usize, 0);
    let mut branches = Vec::new();
    for (at, c) in tree.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                branches.push(&tree[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    branches.push(&tree[start..]);
    for branch in branches {
        let (path, inner) = match branch.split_once('{') {
            Some((path, inner)) => (path, inner.rsplit_once('}').map(|(inner, _)| inner)),
            None => (branch, None),
        };
        let path = path.split(" as ").next().unwrap_or_default();
        let mut whole = prefix.to_vec();
        whole.extend(
            words(path)
                .filter(|word| *word != "self")
                .map(str::to_owned),
        );
        match inner {
            Some(inner) => expand(inner, &whole, found),
            None if branch.trim().is_empty() => {}
            None => found.push(whole),
        }
    }
}

/// A path from the root of the crate; `None` for what another crate has.
fn absolute(file: &Name, path: &[String], files: &BTreeMap<Name, String>) -> Option<Name> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "super" => Some([&file[..file.len().checked_sub(ups)?], &path[ups..]].concat()),
        child => {
            let child = [&file[..], &[child.to_owned()]].concat();
            files
                .contains_key(&child)
                .then(|| [&file[..], path].concat())
        }
    }
}

/// The file that defines a path: the deepest one on it, or the one that it re-exports the next name from.
fn defining(
    path: &[String],
    files: &BTreeMap<Name, String>,
    exported: &BTreeMap<(Name, String), Name>,
) -> Option<Name> {
    let mut path = path.to_vec();
    for _ in 0..4 {
        let depth = (1..=path.len())
            .rev()
            .find(|&depth| files.contains_key(&path[..depth]))?;
        let (file, rest) = (path[..depth].to_vec(), path[depth..].to_vec());
        let next = rest
            .first()
            .and_then(|name| exported.get(&(file.clone(), name.clone())));
        match next {
            Some(next) => path = [&next[..], &rest[1..]].concat(),
            None => return Some(file),
        }
    }
    None
}

fn reaches_itself(file: &Name, imports: &BTreeMap<Name, BTreeSet<Name>>) -> bool {
    let mut seen = BTreeSet::new();
    let mut ahead: Vec<&Name> = imports[file].iter().collect();
    while let Some(next) = ahead.pop() {
        if next == file {
            return true;
        }
        if seen.insert(next) {
            ahead.extend(imports.get(next).into_iter().flatten());
        }
    }
    false
}
