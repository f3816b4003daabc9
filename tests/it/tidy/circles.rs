//! Files of a module need each other in one direction only, so that a file can be read without the files that need it.

mod imports;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};

use super::{ORDER, Source, source_files, without_comments_and_literals};
use imports::{Name, Needs, needs};

#[test]
fn files_of_a_module_import_each_other_in_one_direction() {
    let files: BTreeMap<Name, String> = source_files().iter().map(named).collect();
    let needs = needs(&files);
    let circles = circles(&needs);
    let shown: Vec<String> = circles
        .iter()
        .flat_map(|circle| edges(&needs, circle))
        .collect();
    assert!(
        shown.is_empty(),
        "files that need each other in a circle:\n{}",
        shown.join("\n")
    );
    for module in ORDER.iter().copied().flatten() {
        let is_of_module = |file: &&Name| file[0] == *module;
        assert!(needs.keys().any(|file| is_of_module(&file)), "{module}");
    }
}

/// The circles of a crate with these files, as `a/one a/two`.
fn found(texts: &[(&str, &str)]) -> Vec<String> {
    let name = |name: &str| name.split('/').map(str::to_owned).collect();
    let file = |(path, code): &(&str, &str)| (name(path), without_comments_and_literals(code));
    let needs = needs(&texts.iter().map(file).collect());
    let files = |circle: &BTreeSet<Name>| circle.iter().map(|file| file.join("/")).collect();
    let shown = |circle| -> Vec<String> { files(circle) };
    let circles = circles(&needs);
    circles
        .iter()
        .map(|circle| shown(circle).join(" "))
        .collect()
}

#[test]
fn a_circle_of_files_is_found() {
    let there = ("a/one", "use super::two::{self, Two}; struct One;");
    for back in [
        "use crate::a::{one::One}; struct Two;",
        "pub(super) use crate::a::one::One; struct Two(One);",
        "struct Two(crate::a::one::One);",
        "struct Two; fn f() -> Option<super::one::One> { None }",
        "use super::one; struct Two; fn f() { one::f() }",
        "use super::one as three; struct Two; fn f() { three::f() }",
        "use super as a; struct Two; fn f() { a::one::f() }",
        "struct Two; fn f() { use super::one::One; }",
        "struct Two; #[cfg(not(test))] use super::one::One;",
        "#[cfg(test)] mod tests { fn f() {} } struct Two(super::one::One);",
        "#[cfg(test)] mod tests; struct Two(super::one::One);",
        "struct Two; macro_rules! m { () => { $crate::a::one::f() } }",
        "struct Two; macro_rules! m { () => { super::one::f() } }",
    ] {
        let files = [("a", "mod one; mod two;"), there, ("a/two", back)];
        assert_eq!(found(&files), ["a/one a/two"], "{back}");
    }
}

#[test]
fn a_circle_through_the_parent_or_a_child_is_found() {
    for parent in [
        "mod one; use one::One; struct Two;",
        "mod one; struct Two(one::One);",
        "mod one; struct Two; fn f() { self::one::f() }",
        "mod one; pub use one::One; struct Two(One);",
        "mod one; pub use one::*; struct Two; fn f() { one::f() }",
        // a method that the child adds to a type of the parent
        "mod one; struct Two; impl Two { fn g(&self) { self.added() } }",
        "#[macro_use] mod one; struct Two; fn f() { made!() }",
    ] {
        let child = "fn f(x: super::Two) {} struct One; impl super::Two { fn added(&self) {} } macro_rules! made { () => {} }";
        let files = [("a", parent), ("a/one", child)];
        assert_eq!(found(&files), ["a a/one"], "{parent}");
    }
}

#[test]
fn a_reexport_is_followed_to_the_file_that_defines_the_name() {
    for parent in [
        "mod one; mod two; pub use two::Two;",
        "mod one; mod two; pub use two::*;",
        "mod one; mod two; use two::Two;",
        "mod one; mod two; pub use two::Other as Two;",
    ] {
        let files = |child| {
            [
                ("a", parent),
                ("a/one", "use super::Two; struct One;"),
                ("a/two", child),
            ]
        };
        assert_eq!(
            found(&files("struct Two; struct Other;")),
            [""; 0],
            "{parent}"
        );
        let back = "struct Two; struct Other; fn f(x: super::one::One) {}";
        assert_eq!(found(&files(back)), ["a/one a/two"], "{parent}");
    }
}

#[test]
fn what_only_tests_need_makes_no_circle() {
    let one = ("a/one", "use super::two::Two; struct One;");
    for two in [
        "struct Two;",
        "struct Two; // super::one::One",
        "struct Two; #[cfg(test)] mod tests { use super::super::one::One; }",
        "struct Two; #[cfg(test)] use super::one::One;",
        "struct Two; #[cfg(test)] #[allow(x)] fn f(a: [u8; 3], b: super::one::One) { } fn g() {}",
        "struct Two { #[cfg(test)] one: super::one::One, more: u8 }",
        // a field, a binding and a method are not the item of their name
        "struct Two { one: u8 } fn f(t: Two) { let one = t.one; t.one() }",
    ] {
        assert_eq!(found(&[one, ("a/two", two)]), [""; 0], "{two}");
    }
    let files = [
        one,
        ("a/two", "struct Two; #[cfg(test)] mod tests;"),
        ("a/two/tests", "use crate::a::one::One; mod within { }"),
    ];
    assert_eq!(found(&files), [""; 0]);
}

/// The sets of files that reach each other.
fn circles(needs: &Needs) -> BTreeSet<BTreeSet<Name>> {
    let reached: BTreeMap<&Name, BTreeSet<&Name>> = needs
        .keys()
        .map(|file| (file, reached(file, needs)))
        .collect();
    let circle = |file: &&Name| -> BTreeSet<Name> {
        let reached_from = &reached[file];
        let both = reached_from
            .iter()
            .filter(|other| reached[*other].contains(file));
        both.map(|other| (*other).clone()).collect()
    };
    let circles = reached.keys().map(circle);
    circles.filter(|circle| !circle.is_empty()).collect()
}

fn reached<'a>(file: &Name, needs: &'a Needs) -> BTreeSet<&'a Name> {
    let mut seen = BTreeSet::new();
    let mut ahead: Vec<&Name> = needs[file].keys().collect();
    while let Some(next) = ahead.pop() {
        if seen.insert(next) {
            ahead.extend(needs[next].keys());
        }
    }
    seen
}

/// `from → to: names` for each need within a circle.
fn edges(needs: &Needs, circle: &BTreeSet<Name>) -> Vec<String> {
    let mut found = Vec::new();
    for from in circle {
        let within = needs[from].iter().filter(|(to, _)| circle.contains(*to));
        found.extend(within.map(|(to, names)| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let names = names.join(", ");
            format!("{} → {}: {names}", from.join("/"), to.join("/"))
        }));
    }
    found
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
    (name, file.code.clone())
}
