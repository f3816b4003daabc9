//! Relative links of the documentation: each names a file that exists, and a heading or anchor in it.

use std::{collections::BTreeSet, fs, path::Path};

use crate::pages;

/// The text outside code blocks and code spans.
fn prose(markdown: &str) -> String {
    let outside_blocks = markdown.split("```").step_by(2);
    outside_blocks
        .flat_map(|text| text.split('`').step_by(2))
        .collect()
}

/// The anchor that GitHub gives to a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(markdown: &str) -> BTreeSet<String> {
    let outside_blocks = markdown.split("```").step_by(2);
    let headings = outside_blocks
        .flat_map(str::lines)
        .filter(|line| line.starts_with('#'));
    let explicit = markdown
        .split("<a id=\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next());
    headings
        .map(anchor)
        .chain(explicit.map(str::to_owned))
        .collect()
}

pub(crate) fn targets(markdown: &str) -> Vec<String> {
    let text = prose(markdown);
    let targets = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    targets
        .filter(|target| !target.contains(':'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut seen, mut broken) = (0, Vec::new());
    for (name, text) in pages() {
        let folder = root
            .join(&name)
            .parent()
            .expect("a page has a folder")
            .to_owned();
        for target in targets(&text) {
            seen += 1;
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let path = if file.is_empty() {
                root.join(&name)
            } else {
                folder.join(file)
            };
            let known = match heading {
                "" => path.exists(),
                heading => {
                    fs::read_to_string(&path).is_ok_and(|text| anchors(&text).contains(heading))
                }
            };
            if !known {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    assert!(seen > 100, "only {seen} links were seen");
    assert!(
        broken.is_empty(),
        "links that lead nowhere:\n{}",
        broken.join("\n")
    );
}

#[test]
fn anchors_are_those_of_github() {
    assert_eq!(anchor("## `[upstream.NAME.health]`"), "upstreamnamehealth");
    assert_eq!(anchor("## `[[user]] from = \"jwt\"`"), "user-from--jwt");
    assert_eq!(anchor("# TG0102 not built yet"), "tg0102-not-built-yet");
    assert_eq!(targets("[a](b.md#c), `[d](e)`, [f](https://g)"), ["b.md#c"]);
}
