//! House rules that a machine can check: imports point down, the core is pure, every file has a
//! header.
//!
//! The tests read the source as text. They blank out comments and literals, then collect `crate::`
//! paths, also from `use crate::{a, b::c}` trees. A test over a folder without matching files would
//! prove nothing, so each asserts that it found its files.

mod circles;
mod sleeps;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// From the command line down to the core. A module may import only itself and modules of later
/// rows.
const ORDER: &[&[&str]] = &[
    &["main"],
    &["lib"],
    &["cli"],
    &["server"],
    &["admin"],
    &["gateway"],
    &["config"],
    &["response"],
    &["listener", "budget", "upstream", "overload", "issuer"],
    &["receive_buffer", "body"],
    &["telemetry"],
    &["route"],
    &["identity"],
    &["cost"],
    &["limit"],
];

/// Modules that use neither the runtime nor the network.
const CORE: &[&str] = &["route", "identity", "cost", "limit"];

/// Crates that the core must not name.
const SHELL_CRATES: &[&str] = &[
    "tokio",
    "hyper",
    "hyper_util",
    "redis",
    "tracing",
    "metrics",
];

#[test]
fn imports_point_down_the_request_path_only() {
    let mut upward = Vec::new();
    for file in source_files() {
        for target in imports(&file.code, &file.siblings) {
            if let Some(problem) = forbidden(&file.module, &target) {
                upward.push(format!("{}: {problem}", file.path.display()));
            }
        }
    }
    assert!(
        upward.is_empty(),
        "imports that do not point down:\n{}",
        upward.join("\n")
    );
}

#[test]
fn core_modules_name_no_runtime_network_or_telemetry() {
    let core: Vec<Source> = source_files()
        .into_iter()
        .filter(|file| CORE.contains(&file.module.as_str()))
        .collect();
    for module in CORE {
        assert!(
            core.iter().any(|file| file.module == *module),
            "no file of the core module {module} was seen"
        );
    }
    let impure: Vec<String> = core
        .iter()
        .flat_map(|file| {
            SHELL_CRATES
                .iter()
                .filter(|name| words(&file.code).any(|word| word == **name))
                .map(move |name| format!("{} names {name}", file.path.display()))
        })
        .collect();
    assert!(impure.is_empty(), "{}", impure.join("\n"));
}

/// Crates of the HTTP libraries. `http`, which only has words for heads, is none of them.
const HTTP_LIBRARIES: &[&str] = &["hyper", "hyper_util", "http_body", "http_body_util", "h2"];

#[test]
fn the_gateway_names_no_http_library() {
    let gateway: Vec<Source> = source_files()
        .into_iter()
        .filter(|file| file.module == "gateway")
        .collect();
    assert!(gateway.len() > 30, "{} files were seen", gateway.len());
    let naming: Vec<String> = gateway
        .iter()
        .flat_map(|file| {
            HTTP_LIBRARIES
                .iter()
                .filter(|name| words(&file.code).any(|word| word == **name))
                .map(move |name| format!("{} names {name}", file.path.display()))
        })
        .collect();
    assert!(naming.is_empty(), "{}", naming.join("\n"));
}

#[test]
fn every_file_begins_by_saying_what_it_is_for() {
    let files: Vec<PathBuf> = ["src", "tests", "benches"]
        .iter()
        .flat_map(|folder| rust_files(&root().join(folder)))
        .collect();
    assert!(
        files.iter().any(|path| path.ends_with("tests/it/tidy.rs")),
        "this file was not seen"
    );
    let silent: Vec<String> = files
        .iter()
        .filter(|path| !read(path).starts_with("//! "))
        .map(|path| path.display().to_string())
        .collect();
    assert!(
        silent.is_empty(),
        "files without a first line `//! …`:\n{}",
        silent.join("\n")
    );
}

#[test]
fn a_type_name_stands_for_one_type() {
    let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in source_files() {
        for name in type_names(&file.code) {
            let at = file.path.display().to_string();
            defined.entry(name).or_default().push(at);
        }
    }
    assert!(
        defined.len() > 400,
        "only {} types were seen",
        defined.len()
    );
    let twice: Vec<String> = defined
        .iter()
        .filter(|(_, files)| files.len() > 1)
        .map(|(name, files)| format!("{name}: {}", files.join(", ")))
        .collect();
    assert!(
        twice.is_empty(),
        "defined more than once, so that a search finds the wrong one:\n{}",
        twice.join("\n")
    );
    // the check sees what it forbids, and associated types are not definitions
    let sample = "pub struct A;\nenum B {}\n    pub(super) union C {}\ntype D = u8;\n    type Output = u8;\n";
    assert_eq!(type_names(sample), ["A", "B", "C", "D"]);
}

/// The structs, enums, traits, unions and free-standing aliases that a file defines.
fn type_names(code: &str) -> Vec<String> {
    let name_in = |line: &str| {
        let mut words = line.split_whitespace().peekable();
        words.next_if(|word| word.starts_with("pub"));
        // `pub(in crate::upstream)` has a space
        words.next_if(|word| word.starts_with("crate::"));
        let keyword = words.next()?;
        let is_type = match keyword {
            "struct" | "enum" | "trait" | "union" => true,
            "type" => !line.starts_with(' '),
            _ => false,
        };
        let name = words.next().filter(|_| is_type)?;
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
        Some(name[..end.unwrap_or(name.len())].to_owned())
    };
    code.lines().filter_map(name_in).collect()
}

#[test]
fn every_test_module_is_compiled_and_none_is_skipped() {
    let files = rust_files(&root().join("tests/it"));
    let code: String = files
        .iter()
        .map(|path| without_comments_and_literals(&read(path)))
        .collect();
    let modules: Vec<String> = files
        .iter()
        .map(|path| {
            path.file_stem()
                .expect("a file has a name")
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| name != "main" && name != "mod")
        .collect();
    assert!(
        modules.len() >= 9,
        "only {} modules were seen: {modules:?}",
        modules.len()
    );
    for module in modules {
        assert!(
            code.contains(&format!("mod {module};")),
            "tests/it/…/{module}.rs is declared nowhere"
        );
    }

    let skipped: Vec<String> = ["src", "tests"]
        .iter()
        .flat_map(|folder| rust_files(&root().join(folder)))
        .filter(|path| without_comments_and_literals(&read(path)).contains("#[ignore"))
        .map(|path| path.display().to_string())
        .collect();
    assert!(
        skipped.is_empty(),
        "skipped tests in:\n{}",
        skipped.join("\n")
    );
}

#[test]
fn the_checks_above_see_what_they_forbid() {
    let no_siblings: &[String] = &[];
    let found = |text: &str| imports(&without_comments_and_literals(text), no_siblings);

    assert_eq!(found("use crate::limit::Key;"), ["limit"]);
    assert_eq!(
        found("use crate::{limit::{self, Key}, route, identity::address::{A, B}};"),
        ["limit", "route", "identity"]
    );
    assert_eq!(found("fn f() { crate::cli::run() }"), ["cli"]);
    assert_eq!(found("pub(crate) fn f() {}"), Vec::<String>::new());
    assert_eq!(
        found("//! See [`crate::cli`].\nlet s = \"crate::cli\"; /* crate::server */"),
        Vec::<String>::new()
    );
    assert_eq!(found("use super::server::Server;"), ["server"]);
    assert_eq!(
        imports("use super::route::Raw;", &["route".to_owned()]),
        Vec::<String>::new()
    );

    assert!(forbidden("limit", "identity").is_some(), "upward");
    assert!(forbidden("listener", "upstream").is_some(), "sideways");
    assert!(forbidden("upstream", "config").is_some(), "upward");
    assert!(forbidden("config", "upstream").is_none(), "downward");
    assert!(forbidden("limit", "limit").is_none(), "itself");
    assert!(
        forbidden("limit", "unheard_of").is_some(),
        "a module that the order does not know"
    );

    assert!(words("use tokio::time;").any(|word| word == "tokio"));
    assert!(!words("let tokio_free = 1;").any(|word| word == "tokio"));
}

#[test]
fn comments_and_literals_are_blanked_and_nothing_else() {
    let blank = without_comments_and_literals;
    assert_eq!(blank("a /* b /* c */ d */ e"), "a   e");
    assert_eq!(blank("a // b\nc"), "a  \nc");
    assert_eq!(blank(r#"x("a\"b", y)"#), "x( , y)");
    assert_eq!(blank(r###"x(r#"a"b"#, y)"###), "x( , y)");
    assert_eq!(blank("f('\"', '\\'', b'x') + \"s\""), "f( ,  ,  ) +  ");
    assert_eq!(blank("fn f<'a>(x: &'a str) {}"), "fn f<'a>(x: &'a str) {}");
}

/// One file under `src/`.
struct Source {
    path: PathBuf,
    /// Its top-level module; `main` and `lib` for the two roots.
    module: String,
    /// Its text without comments and literals.
    code: String,
    /// Names of its sibling modules, to which `super::` may refer.
    siblings: Vec<String>,
}

fn source_files() -> Vec<Source> {
    let src = root().join("src");
    let files: Vec<Source> = rust_files(&src)
        .into_iter()
        .map(|path| {
            let relative = path.strip_prefix(&src).expect("found below src").to_owned();
            let first = relative
                .components()
                .next()
                .expect("a file has a path")
                .as_os_str();
            let module = Path::new(first)
                .file_stem()
                .expect("a file has a name")
                .to_string_lossy()
                .into_owned();
            let siblings = if relative.components().count() > 1 {
                module_names(path.parent().expect("a file is in a folder"))
            } else {
                Vec::new()
            };
            Source {
                module,
                code: without_comments_and_literals(&read(&path)),
                siblings,
                path,
            }
        })
        .collect();
    for known in ["lib", "main", "gateway", "config", "limit"] {
        assert!(
            files.iter().any(|file| file.module == known),
            "no file of src/{known} was seen"
        );
    }
    files
}

fn module_names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .expect("a folder of src is readable")
        .filter_map(|entry| {
            Some(
                entry
                    .ok()?
                    .path()
                    .file_stem()?
                    .to_string_lossy()
                    .into_owned(),
            )
        })
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry of a readable folder").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Why `module` must not import `target`; `None` if it may.
fn forbidden(module: &str, target: &str) -> Option<String> {
    if module == target {
        return None;
    }
    let row = |name: &str| ORDER.iter().position(|row| row.contains(&name));
    match (row(module), row(target)) {
        (Some(from), Some(to)) if from < to => None,
        (Some(from), Some(to)) if from == to => {
            Some(format!("{module} and {target} stand side by side"))
        }
        (Some(_), Some(_)) => Some(format!("{target} stands above {module}")),
        (None, _) => Some(format!("{module} has no place in the order of modules")),
        (_, None) => Some(format!("{target} has no place in the order of modules")),
    }
}

/// Top-level modules that the code names, by `crate::` or by a `super::` that refers to one.
fn imports(code: &str, siblings: &[String]) -> Vec<String> {
    let by_crate = paths_after("crate::", code);
    let by_super = paths_after("super::", code)
        .into_iter()
        .filter(|name| ORDER.concat().contains(&name.as_str()) && !siblings.contains(name));
    by_crate.into_iter().chain(by_super).collect()
}

/// The first names after each `prefix`, one per branch where a `{a, b}` tree follows.
fn paths_after(prefix: &str, code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c == '_' || c.is_alphanumeric()) {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(tree) => found.extend(branches(tree)),
            None => found.extend(words(rest).next().map(str::to_owned)),
        }
    }
    found
}

/// The first name of each branch of `a::{b, c}, d}`: `a` and `d`.
fn branches(tree: &str) -> Vec<String> {
    let (mut depth, mut start, mut found) = (0_usize, 0, Vec::new());
    for (at, c) in tree.char_indices() {
        let ends = matches!(c, ',' | '}') && depth == 0;
        if ends {
            found.extend(words(&tree[start..at]).next().map(str::to_owned));
            start = at + 1;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| c != '_' && !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
}

/// The code with every comment, string and character replaced by one space. Keeps line ends.
fn without_comments_and_literals(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let after_word = code.ends_with(|c: char| c == '_' || c.is_alphanumeric());
        let length = comment(rest)
            .or_else(|| if after_word { None } else { literal(rest) })
            .or_else(|| {
                if rest.starts_with('"') {
                    literal(rest)
                } else {
                    None
                }
            });
        match length {
            Some(length) => {
                code.push(' ');
                rest = &rest[length..];
            }
            None => {
                code.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    code
}

/// The length of the comment that `text` starts with.
fn comment(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    text.strip_prefix("/*")?;
    let (mut depth, mut at) = (0_usize, 0);
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return Some(at);
        }
    }
    Some(text.len())
}

/// The length of the string or character that `text` starts with, its prefix (`b`, `c`, `r#`)
/// included.
fn literal(text: &str) -> Option<usize> {
    let unprefixed = text.trim_start_matches(['b', 'c']);
    let prefix = text.len() - unprefixed.len();
    if let Some(raw) = unprefixed.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let body = raw[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(prefix + 1 + hashes + 1 + body.find(&end)? + end.len());
    }
    let quote = unprefixed
        .chars()
        .next()
        .filter(|c| matches!(c, '"' | '\''))?;
    let mut chars = unprefixed.char_indices().skip(1);
    let mut seen = 0;
    while let Some((at, c)) = chars.next() {
        if c == quote {
            return (quote == '"' || seen == 1).then_some(prefix + at + 1);
        }
        if c == '\\' {
            let (_, escaped) = chars.next()?;
            if escaped == 'u' {
                chars.by_ref().find(|(_, c)| *c == '}')?;
            } else if escaped == 'x' {
                chars.nth(1)?;
            }
        }
        seen += 1;
        // a lifetime, not a character: it has no closing quote after one character
        if quote == '\'' && seen > 1 {
            return None;
        }
    }
    None
}
