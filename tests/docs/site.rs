//! The documentation site: its navigation names every page, its links stay inside it, and it builds where Zensical is
//! installed.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use crate::{links::targets, pages};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The pages of the site, as paths below `docs`.
fn site() -> Vec<(String, String)> {
    let pages = pages().into_iter();
    pages
        .filter_map(|(name, text)| Some((name.strip_prefix("docs/")?.to_owned(), text)))
        .collect()
}

#[test]
fn the_navigation_names_every_page_once() {
    let settings = fs::read_to_string(root().join("mkdocs.yml")).expect("mkdocs.yml");
    let (_, navigation) = settings.split_once("\nnav:\n").expect("a navigation");
    let named: Vec<&str> = navigation
        .lines()
        .map(|line| line.rsplit(' ').next().unwrap_or(line))
        .filter(|name| name.ends_with(".md"))
        .collect();
    let there: BTreeSet<String> = site().into_iter().map(|(name, _)| name).collect();
    let listed: BTreeSet<String> = named.iter().map(|&name| name.to_owned()).collect();
    let difference: Vec<&String> = there.symmetric_difference(&listed).collect();
    assert!(
        difference.is_empty(),
        "in docs/ or in `nav` of mkdocs.yml, and not in both: {difference:?}"
    );
    assert_eq!(named.len(), listed.len(), "a page is named twice");
}

#[test]
fn links_of_the_site_stay_inside_it() {
    let mut outside = Vec::new();
    for (name, text) in site() {
        let depth = name.matches('/').count();
        let leaves = |target: &String| target.matches("../").count() > depth;
        outside.extend(
            targets(&text)
                .into_iter()
                .filter(leaves)
                .map(|target| format!("docs/{name}: {target}")),
        );
    }
    assert!(
        outside.is_empty(),
        "write the address of the file in the repository instead:\n{}",
        outside.join("\n")
    );
}

#[test]
fn no_page_of_the_site_is_longer_than_400_lines() {
    // to be split into one page for each top-level table
    let known = ["config.md"];
    let long: Vec<String> = site()
        .into_iter()
        .filter(|(name, text)| text.lines().count() > 400 && !known.contains(&name.as_str()))
        .map(|(name, _)| name)
        .collect();
    assert!(long.is_empty(), "{long:?}");
}

#[test]
fn the_site_builds_without_a_broken_link() {
    let built = Command::new("zensical")
        .args(["build", "--strict", "--clean"])
        .current_dir(root())
        .env("NO_COLOR", "1")
        .output();
    let Ok(built) = built else {
        eprintln!("SKIPPED: zensical is not installed (pip install zensical)");
        return;
    };
    let said = [built.stdout, built.stderr].concat();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&said));
}
